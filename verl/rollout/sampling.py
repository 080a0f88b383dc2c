"""Sampling whose noise depends on nothing but the request's seed, the position and the token id.

Gumbel-max: argmax over v of logit[v] / temperature + gumbel(seed, position, v) is a draw from the softmax. The noise
comes from an integer hash (counter-based, nothing is carried from token to token), so a row's tokens do not depend on
the rows around it, on the order of work, on preemption or on the number of processes, and the integers are the same
on every device.

Dimension key: B rows, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

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


NEAR = 4.0  # tokens whose logit is less than this below the best one have their noise computed in any case
CPU_ROWS = 2  # rows that a CPU filters together: their intermediate values stay in its cache


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
    """(B,) argmax of logits plus noise; ``best`` (B, 1) their maximum."""
    if logits.device.type != "cpu" or not bool(torch.isfinite(best).all()):
        return gumbel_noise(seed, position, logits.shape[1]).add_(logits).argmax(-1)
    row_bits = _row_bits(seed, position).numpy().view(np.uint32)
    scratch = np.empty((2, logits.shape[1]), np.uint32)
    rows = zip(logits.numpy(), best[:, 0].tolist(), row_bits, strict=True)
    return torch.tensor([_argmax_of_candidates(*row, scratch) for row in rows])


def _argmax_of_candidates(logits: np.ndarray, best: float, row_bits: np.uint32, scratch: np.ndarray) -> int:
    """The same argmax of one row, with noise computed only for tokens that can win.

    These are the tokens near the best logit, and those whose noise makes up for being further away. The latter are
    found by a bound on the hash itself, before its last step, which leaves the upper half of the bits alone.
    """
    bits, shifted = scratch
    np.bitwise_xor(_cpu_token_bits(len(logits)), row_bits, out=bits)
    for shift, prime in ((16, _PRIME_1), (15, _PRIME_2)):
        np.right_shift(bits, np.uint32(shift), out=shifted)
        np.bitwise_xor(bits, shifted, out=bits)
        np.multiply(bits, np.uint32(prime), out=bits)
    near = np.flatnonzero(logits >= best - NEAR)
    perturbed = logits[near] + _gumbel_of_bits(bits[near])
    top = float(perturbed.max())
    # a token further than NEAR below the best logit wins only with noise above this; the margin covers rounding
    noise = min(top - best + NEAR - 1e-3 - 1e-6 * abs(best), 17.0)
    least = max(0, int(math.exp(-math.exp(-noise)) * 2.0**32) - 1024) >> 16 << 16
    far = np.flatnonzero(bits >= np.uint32(least))
    others = logits[far] + _gumbel_of_bits(bits[far])
    if not len(others) or others.max() < top:
        return int(near[perturbed.argmax()])
    return int(far[others.argmax()])  # near tokens with noise above the bound are among these


def _gumbel_of_bits(bits: np.ndarray) -> np.ndarray:
    """float32 noise of uint32 ``bits`` that lack the hash's last step."""
    bits = bits ^ (bits >> np.uint32(16))
    uniform = ((bits >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    return -np.log(-np.log(uniform))


@functools.lru_cache(maxsize=4)
def _cpu_token_bits(vocabulary: int) -> np.ndarray:
    """(V,) uint32 of hashed token ids; only read."""
    return _token_bits(torch.arange(vocabulary, dtype=torch.int32)).numpy().view(np.uint32)


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


@dataclass(frozen=True)
class Written:
    """What adjusted logits of a row depend on: its ``ids`` (prompt and response so far), the number of response
    ``tokens`` among them, and the ids that would end it."""

    ids: np.ndarray
    tokens: int
    stops: frozenset[int]


def adjust_logits(logits: torch.Tensor, params: SamplingParams, rows: Sequence[Written]) -> torch.Tensor:
    """(B, V) float logits with the repetition penalty, and without the ids that may not end a row yet; a copy."""
    logits = logits.clone()
    for row, written in zip(logits, rows, strict=True):
        if params.repetition_penalty != 1:
            ids = torch.from_numpy(written.ids).to(row.device)
            row[ids] = penalised(row[ids], params.repetition_penalty)
        if written.tokens < params.min_tokens and written.stops:
            row[torch.tensor(sorted(written.stops), device=row.device)] = float("-inf")
    return logits


def penalised(logits: torch.Tensor, penalty: float | torch.Tensor) -> torch.Tensor:
    """Logits of tokens that were written already."""
    return torch.where(logits > 0, logits / penalty, logits * penalty)


def draw(
    logits: torch.Tensor,
    params: SamplingParams,
    seed: torch.Tensor,
    position: torch.Tensor,
    rows: Sequence[Written] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Choose one token a row.

    Args:
        logits: (B, V) of the model. seed, position: (B,) int32.
        rows: what each row has written, where ``params.adjusted``.

    Returns:
        (B,) ids; (B,) float32 log-probs under the plain temperature distribution; (B,) log-probs under the filtered
        one where there is a filter, else None.
    """
    if logits.device.type == "cpu" and len(logits) > CPU_ROWS and (params.filtered or params.adjusted):
        cuts = [slice(i, i + CPU_ROWS) for i in range(0, len(logits), CPU_ROWS)]
        pieces = [_draw(logits[c], params, seed[c], position[c], rows[c]) for c in cuts]
    else:
        pieces = [_draw(logits, params, seed, position, rows)]
    tokens, log_probs, sampled = zip(*pieces, strict=True)
    return torch.cat(tokens), torch.cat(log_probs), torch.cat(sampled) if params.filtered else None


def _log_sum_exp(logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """(B,) log of the sum of exponentials; ``best`` (B, 1) is the maximum. Fewer passes than torch's own."""
    return (logits - best).exp_().sum(-1).log_().add_(best[:, 0])


def _draw(logits: torch.Tensor, params: SamplingParams, seed: torch.Tensor, position: torch.Tensor, rows):
    raw = logits.float()
    warm = not params.greedy and params.temperature != 1.0
    scaled = raw / params.temperature if warm else raw
    top = scaled.amax(-1, keepdim=True)
    plain = _log_sum_exp(scaled, top)
    allowed = scaled
    if params.adjusted:
        allowed = adjust_logits(raw, params, rows)
        allowed = allowed / params.temperature if warm else allowed
        top = allowed.amax(-1, keepdim=True)
    if params.greedy:
        token = allowed.argmax(-1)
    else:
        allowed = filter_logits(allowed, params) if params.filtered else allowed
        token = _argmax_with_noise(allowed, top, seed, position)
    chosen = scaled.gather(1, token[:, None])[:, 0]
    filtered = None
    if params.filtered:
        filtered = allowed.gather(1, token[:, None])[:, 0] - _log_sum_exp(allowed, top)
    return token, chosen - plain, filtered
