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
def _stretch_kernel(
    logits, temperature, noisy, seeds, steps, best, best_id, best_logit, part_max, part_sum,
    stride, vocabulary, parts, STRETCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b, part = tl.program_id(0), tl.program_id(1)
    scale = tl.load(temperature + b)
    with_noise = tl.load(noisy + b)
    seed = _mix(tl.load(seeds + b).to(tl.uint32, bitcast=True))
    row = _mix(seed + tl.load(steps + b).to(tl.uint32, bitcast=True) * 0x9E3779B9)
    # every lane keeps its own best and its own sum; they are merged once at the end
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    top_id = tl.full([BLOCK], 0, tl.int32) + vocabulary
    top_logit = tl.full([BLOCK], -float("inf"), tl.float32)
    m = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(0, STRETCH, BLOCK):
        v = part * STRETCH + i + lane
        ok = v < vocabulary
        x = tl.load(logits + b.to(tl.int64) * stride + v, mask=ok, other=-float("inf")).to(tl.float32) / scale
        bits = _mix(row ^ _mix(v.to(tl.uint32, bitcast=True) + 0x3C6EF372))
        uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
        noise = -libdevice.log(-libdevice.log(uniform))
        y = tl.where(with_noise > 0, x + noise, x)
        better = (y > top) & ok
        top = tl.where(better, y, top)
        top_id = tl.where(better, v, top_id)
        top_logit = tl.where(better, x, top_logit)
        m_next = tl.maximum(m, x)
        total = total * tl.exp(m - m_next) + tl.where(ok, tl.exp(x - m_next), 0.0)
        m = m_next
    best_here = tl.max(top, 0)
    id_here = tl.min(tl.where(top == best_here, top_id, vocabulary), 0)
    whole = tl.max(m, 0)
    at = b * parts + part
    tl.store(best + at, best_here)
    tl.store(best_id + at, id_here)
    tl.store(best_logit + at, tl.max(tl.where(top_id == id_here, top_logit, -float("inf")), 0))
    tl.store(part_max + at, whole)
    tl.store(part_sum + at, tl.sum(total * tl.exp(m - whole), 0))


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
        logits.stride(0), vocabulary, parts, STRETCH=STRETCH, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    _merge_kernel[(rows,)](
        floats[0], ids, floats[1], floats[2], floats[3], tokens, log_probs, parts, vocabulary,
        PARTS=triton.next_power_of_2(parts), num_warps=1,
    )  # fmt: skip
    return tokens, log_probs
