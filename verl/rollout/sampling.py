"""Sampling whose noise depends on nothing but the request's seed, the position and the token id.

Gumbel-max: argmax over v of logit[v] / temperature + gumbel(seed, position, v) is a draw from the softmax. The noise
comes from an integer hash (counter-based, nothing is carried from token to token), so a row's tokens do not depend on
the rows around it, on the order of work, on preemption or on the number of processes, and the integers are the same
on every device.

Dimension key: B rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from verl.rollout.base import SamplingParams

_MASK16 = 0xFFFF
_PRIME_1, _PRIME_2 = 0x7FEB352D, 0x846CA68B  # multipliers of a well-mixing 32-bit finaliser (C. Wellons, 2018)


def _signed(value: int) -> int:
    """The int32 with the same bits."""
    return value - (1 << 32) if value >= (1 << 31) else value


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijective 32-bit hash of int32 ``x``, in place. Shifts are logical: the sign's copies are masked away."""
    x ^= (x >> 16).bitwise_and_(_MASK16)
    x *= _PRIME_1
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= _signed(_PRIME_2)
    x ^= (x >> 16).bitwise_and_(_MASK16)
    return x


# The noise lies between -2.82 and 16.64 (u from 0.5 to 2**23 - 0.5 in units of 2**-23), so a token whose logit is
# further than this below the best one cannot win.
NOISE_SPAN = 19.5
CPU_ROWS = 2  # rows that a CPU handles together: their intermediate values stay in its cache


def _row_bits(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    return _mix(_mix(seed.clone()) + position * _signed(0x9E3779B9))


def _token_bits(ids: torch.Tensor) -> torch.Tensor:
    return _mix(ids.to(torch.int32) + 0x3C6EF372)


def noise_bits(seed: torch.Tensor, position: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """(B, V) int32 of hashed bits for int32 ``seed`` (B,) and ``position`` (B,)."""
    token = _token_bits(torch.arange(vocabulary, dtype=torch.int32, device=seed.device))
    return _mix(_row_bits(seed, position)[:, None] ^ token[None, :])


def _gumbel(bits: torch.Tensor) -> torch.Tensor:
    uniform = (bits >> 9).bitwise_and_(0x7FFFFF).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def gumbel_noise(seed: torch.Tensor, position: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """(B, V) float32 standard Gumbel noise: -log(-log(u)), u from 23 hashed bits, in (0, 1)."""
    return _gumbel(noise_bits(seed, position, vocabulary))


def _argmax_with_noise(logits: torch.Tensor, best: torch.Tensor, seed, position) -> torch.Tensor:
    """(B,) argmax of logits plus noise; ``best`` (B, 1) their maximum. On a CPU only for tokens that can win."""
    if logits.device.type == "cpu":
        can_win = (logits >= best - NOISE_SPAN).numpy()
        counts = np.count_nonzero(can_win, axis=1)
        if counts.sum() * 4 < can_win.size and counts.all():  # a row of NaN has no candidates
            places = torch.from_numpy(np.flatnonzero(can_win))  # many times faster than torch's nonzero
            row = places // logits.shape[1]
            return _argmax_of_candidates(logits, row, places - row * logits.shape[1], seed, position)
    return gumbel_noise(seed, position, logits.shape[1]).add_(logits).argmax(-1)


def _argmax_of_candidates(logits, row, token, seed, position) -> torch.Tensor:
    """The same argmax over the (row, token) pairs alone, which are in order; every row has at least one."""
    values = logits[row, token] + _gumbel(_mix(_row_bits(seed, position)[row] ^ _token_bits(token)))
    counts = torch.bincount(row, minlength=len(logits))
    starts = counts.cumsum(0) - counts
    table = values.new_full((len(logits), int(counts.max())), float("-inf"))
    table[row, torch.arange(len(row)) - starts[row]] = values
    return token[starts + table.argmax(-1)]


def filter_logits(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Set what top-k, top-p and min-p exclude to -inf. (B, V) scaled logits in, a new tensor out."""
    if params.top_k > 0 and params.top_k < logits.shape[-1]:
        kth = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if params.min_p > 0:
        logits = logits.masked_fill(
            logits < logits.amax(-1, keepdim=True) + torch.log(torch.tensor(params.min_p)).item(), float("-inf")
        )
    if params.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probability = ordered.softmax(-1)
        # a token stays if the mass before it is still short of top_p; the best always stays
        drop = probability.cumsum(-1) - probability >= params.top_p
        drop[:, 0] = False
        logits = logits.masked_fill(torch.zeros_like(drop).scatter_(1, order, drop), float("-inf"))
    return logits


def draw(
    logits: torch.Tensor, params: SamplingParams, seed: torch.Tensor, position: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Choose one token a row.

    Args:
        logits: (B, V) of the model. seed, position: (B,) int32.

    Returns:
        (B,) ids; (B,) float32 log-probs under the plain temperature distribution; (B,) log-probs under the filtered
        one where there is a filter, else None.
    """
    if logits.device.type == "cpu" and len(logits) > CPU_ROWS:
        cuts = [slice(i, i + CPU_ROWS) for i in range(0, len(logits), CPU_ROWS)]
        pieces = [_draw(logits[c], params, seed[c], position[c]) for c in cuts]
    else:
        pieces = [_draw(logits, params, seed, position)]
    tokens, log_probs, sampled = zip(*pieces, strict=True)
    return torch.cat(tokens), torch.cat(log_probs), torch.cat(sampled) if params.filtered else None


def _log_sum_exp(logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """(B,) log of the sum of exponentials; ``best`` (B, 1) is the maximum. Fewer passes than torch's own."""
    return (logits - best).exp_().sum(-1).log_().add_(best[:, 0])


def _draw(logits: torch.Tensor, params: SamplingParams, seed: torch.Tensor, position: torch.Tensor):
    scaled = logits.float()
    if not params.greedy and params.temperature != 1.0:
        scaled = scaled / params.temperature
    top = scaled.amax(-1, keepdim=True)
    plain = _log_sum_exp(scaled, top)
    if params.greedy:
        return scaled.argmax(-1), top[:, 0] - plain, None
    allowed = filter_logits(scaled, params) if params.filtered else scaled
    token = _argmax_with_noise(allowed, top, seed, position)
    chosen = scaled.gather(1, token[:, None])[:, 0]
    filtered = chosen - _log_sum_exp(allowed, top) if params.filtered else None
    return token, chosen - plain, filtered
