"""Sampling whose noise depends on nothing but the request's seed, the position and the token id.

Gumbel-max: argmax over v of logit[v] / temperature + gumbel(seed, position, v) is a draw from the softmax. The noise
comes from an integer hash (counter-based, nothing is carried from token to token), so a row's tokens do not depend on
the rows around it, on the order of work, on preemption or on the number of processes, and the integers are the same
on every device.

Dimension key: B rows, V vocabulary.
"""

from __future__ import annotations

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


def noise_bits(seed: torch.Tensor, position: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """(B, V) int32 of hashed bits for int32 ``seed`` (B,) and ``position`` (B,)."""
    row = _mix(_mix(seed.clone()) + position * _signed(0x9E3779B9))
    token = _mix(torch.arange(vocabulary, dtype=torch.int32, device=seed.device) + 0x3C6EF372)
    return _mix(row[:, None] ^ token[None, :])


def gumbel_noise(seed: torch.Tensor, position: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """(B, V) float32 standard Gumbel noise: -log(-log(u)), u from 23 hashed bits, in (0, 1)."""
    bits = (noise_bits(seed, position, vocabulary) >> 9).bitwise_and_(0x7FFFFF)
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def _argmax_with_noise(logits: torch.Tensor, seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """(B,) argmax of logits plus noise. On a CPU a few rows at a time, so that the integers stay in the cache."""
    rows = 2 if logits.device.type == "cpu" else len(logits)
    vocabulary = logits.shape[1]
    parts = [
        (gumbel_noise(seed[i : i + rows], position[i : i + rows], vocabulary).add_(logits[i : i + rows])).argmax(-1)
        for i in range(0, len(logits), rows)
    ]
    return torch.cat(parts)


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
    scaled = logits.float()
    if not params.greedy and params.temperature != 1.0:
        scaled = scaled / params.temperature
    plain = torch.logsumexp(scaled, -1)
    if params.greedy:
        best = scaled.argmax(-1)
        return best, scaled.gather(1, best[:, None])[:, 0] - plain, None
    allowed = filter_logits(scaled, params) if params.filtered else scaled
    token = _argmax_with_noise(allowed, seed, position)
    chosen = scaled.gather(1, token[:, None])[:, 0]
    filtered = chosen - torch.logsumexp(allowed, -1) if params.filtered else None
    return token, chosen - plain, filtered
