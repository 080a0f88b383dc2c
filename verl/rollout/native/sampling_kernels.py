"""Sampling on a GPU: one pass over the logits gives the token and its log-prob.

The noise is that of ``verl.rollout.sampling``, the same integers. Each program handles a stretch of the vocabulary of
one row and leaves its best perturbed token and its part of the log-sum-exp; a second kernel merges the parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

STRETCH = 8192


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def _exponential(k):
    """-log((k + 1/2) / 2^23). Its small values decide who wins: there it is a series in the exact distance to 1, while
    the fast logarithm's error of 2e-7 is small against the others."""
    distance = (8388607.5 - k) * 1.1920928955078125e-07
    near = distance * (1 + distance * (0.5 + distance * (0.33333334 + distance * (0.25 + distance * 0.2))))
    return tl.where(distance < 0.03125, near, -libdevice.fast_logf((k + 0.5) * 1.1920928955078125e-07))


@triton.jit
def _stretch_kernel(
    logits, temperature, noisy, seeds, steps, best, best_id, best_logit, part_max, part_sum,
    stride, vocabulary, parts, STRETCH: tl.constexpr,
):  # fmt: skip
    b, part = tl.program_id(0), tl.program_id(1)
    scale = 1.0 / tl.load(temperature + b)
    with_noise = tl.load(noisy + b)
    seed = _mix(tl.load(seeds + b).to(tl.uint32, bitcast=True))
    row = _mix(seed + tl.load(steps + b).to(tl.uint32, bitcast=True) * 0x9E3779B9)
    v = part * STRETCH + tl.arange(0, STRETCH)
    ok = v < vocabulary
    x = tl.load(logits + b.to(tl.int64) * stride + v, mask=ok, other=-float("inf")).to(tl.float32) * scale
    bits = _mix(row ^ _mix(v.to(tl.uint32, bitcast=True) + 0x3C6EF372))
    noise = -libdevice.fast_logf(_exponential((bits >> 9).to(tl.float32)))
    y = tl.where(ok, tl.where(with_noise > 0, x + noise, x), -float("inf"))
    top = tl.max(y, 0)
    top_id = tl.min(tl.where(ok & (y == top), v, vocabulary), 0)
    whole = tl.maximum(tl.max(x, 0), -1e30)
    at = b * parts + part
    tl.store(best + at, top)
    tl.store(best_id + at, top_id)
    tl.store(best_logit + at, tl.max(tl.where(v == top_id, x, -float("inf")), 0))
    tl.store(part_max + at, whole)
    tl.store(part_sum + at, tl.sum(tl.exp(x - whole), 0))


@triton.jit
def _merge_kernel(
    best, best_id, best_logit, part_max, part_sum, tokens, log_probs, parts, vocabulary, PARTS: tl.constexpr
):
    b = tl.program_id(0)
    i = tl.arange(0, PARTS)
    ok = i < parts
    at = b * parts + i
    value = tl.load(best + at, mask=ok, other=-float("inf"))
    top = tl.max(value, 0)
    ids = tl.load(best_id + at, mask=ok, other=vocabulary)
    token = tl.min(tl.where((value == top) & ok, ids, vocabulary), 0)
    logit = tl.max(tl.where(ids == token, tl.load(best_logit + at, mask=ok, other=-float("inf")), -float("inf")), 0)
    m = tl.load(part_max + at, mask=ok, other=-1e30)
    whole = tl.max(m, 0)
    total = tl.sum(tl.load(part_sum + at, mask=ok, other=0.0) * tl.exp(m - whole), 0)
    tl.store(tokens + b, token.to(tl.int64))
    tl.store(log_probs + b, logit - whole - libdevice.log(total))


def draw_rows(
    logits: torch.Tensor, temperature: torch.Tensor, noisy: torch.Tensor, seeds: torch.Tensor, steps: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B,) int64 tokens and (B,) float32 log-probs under softmax(logits / temperature).

    Args:
        logits: (B, V). temperature: (B,) float32, 1 for greedy rows. noisy: (B,) int32, 0 for greedy rows.
        seeds, steps: (B,) int32 request seed and place in the response.
    """
    rows, vocabulary = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    parts = triton.cdiv(vocabulary, STRETCH)
    floats = torch.empty(4, rows, parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _stretch_kernel[(rows, parts)](
        logits, temperature, noisy, seeds, steps, floats[0], ids, floats[1], floats[2], floats[3],
        logits.stride(0), vocabulary, parts, STRETCH=STRETCH, num_warps=8,
    )  # fmt: skip
    _merge_kernel[(rows,)](
        floats[0], ids, floats[1], floats[2], floats[3], tokens, log_probs, parts, vocabulary,
        PARTS=triton.next_power_of_2(parts), num_warps=1,
    )  # fmt: skip
    return tokens, log_probs
