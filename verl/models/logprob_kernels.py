"""Triton kernels over rows of logits: log-sum-exp, log-prob of a target, entropy, and the gradient of the logits.

Each program owns one row and reads it once (twice if it also writes the gradient, the second time mostly from cache);
everything but the logits themselves is fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
WARPS = 8


@triton.jit
def _shaped(raw, softcap, inverse_temperature, CAPPED: tl.constexpr):
    """Logits after soft-capping and temperature, and the derivative with respect to the raw ones."""
    if CAPPED:
        e = tl.exp(-2.0 * tl.abs(raw / softcap))
        tanh = tl.where(raw >= 0, 1.0, -1.0) * (1.0 - e) / (1.0 + e)
        return tanh * softcap * inverse_temperature, (1.0 - tanh * tanh) * inverse_temperature
    return raw * inverse_temperature, tl.full(raw.shape, 1.0, tl.float32) * inverse_temperature


@triton.jit
def _forward_kernel(
    logits, target, log_prob, normaliser, entropy, stride, vocabulary, softcap, inverse_temperature,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, DELTA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    offsets = tl.arange(0, BLOCK)
    high = -float("inf")
    total = 0.0
    weighted = 0.0
    wanted = tl.load(target + row)
    raw_target = tl.load(base + wanted).to(tl.float32)
    at_target, _unused_target = _shaped(raw_target, softcap, inverse_temperature, CAPPED)
    for start in range(0, vocabulary, BLOCK):
        inside = start + offsets < vocabulary
        raw = tl.load(base + start + offsets, mask=inside, other=0.0).to(tl.float32)
        x, _unused = _shaped(raw, softcap, inverse_temperature, CAPPED)
        new_high = tl.maximum(high, tl.max(tl.where(inside, x, -float("inf")), 0))
        e = tl.where(inside, tl.exp(x - new_high), 0.0)
        shrink = tl.exp(high - new_high)
        total = total * shrink + tl.sum(e, 0)
        if ENTROPY:
            weighted = weighted * shrink + tl.sum(e * x, 0)
        high = new_high
    log_sum = high + tl.log(total)
    tl.store(normaliser + row, log_sum)
    tl.store(log_prob + row, at_target - log_sum)
    if ENTROPY:
        tl.store(entropy + row, log_sum - weighted / total)
    if DELTA:
        for start in range(0, vocabulary, BLOCK):
            columns = start + offsets
            inside = columns < vocabulary
            raw = tl.load(base + columns, mask=inside, other=0.0).to(tl.float32)
            x, derivative = _shaped(raw, softcap, inverse_temperature, CAPPED)
            delta = tl.where(columns == wanted, 1.0, 0.0) - tl.exp(x - log_sum)
            tl.store(base + columns, (delta * derivative).to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    logits, target, normaliser, entropy, grad_log_prob, grad_entropy, stride, vocabulary, softcap,
    inverse_temperature, CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    wanted = tl.load(target + row)
    log_sum = tl.load(normaliser + row)
    grad = tl.load(grad_log_prob + row)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    raw = tl.load(base + columns, mask=inside, other=0.0).to(tl.float32)
    x, derivative = _shaped(raw, softcap, inverse_temperature, CAPPED)
    p = tl.exp(x - log_sum)
    d = grad * (tl.where(columns == wanted, 1.0, 0.0) - p)
    if ENTROPY:
        d -= tl.load(grad_entropy + row) * p * (x - log_sum + tl.load(entropy + row))
    tl.store(base + columns, (d * derivative).to(logits.dtype.element_ty), mask=inside)


def rows_forward(
    logits: torch.Tensor,
    target: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    *,
    softcap: float | None,
    temperature: float,
    delta: bool,
) -> None:
    """Fill log-prob, normaliser and entropy (or None) of each row of the (C, V) raw logits.

    With ``delta`` the logits are overwritten by d log_prob / d raw logit.
    """
    log_prob, normaliser, entropy = out
    _forward_kernel[(logits.shape[0],)](
        logits, target, log_prob, normaliser, entropy if entropy is not None else log_prob,
        logits.stride(0), logits.shape[1], softcap or 1.0, 1.0 / temperature,
        CAPPED=softcap is not None, ENTROPY=entropy is not None, DELTA=delta, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


def rows_backward(
    logits: torch.Tensor,
    target: torch.Tensor,
    normaliser: torch.Tensor,
    entropy: torch.Tensor,
    grad_log_prob: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    *,
    softcap: float | None,
    temperature: float,
) -> None:
    """Overwrite the (C, V) raw logits by the loss's gradient with respect to them."""
    with_entropy = grad_entropy is not None
    grid = (logits.shape[0], triton.cdiv(logits.shape[1], BLOCK))
    _backward_kernel[grid](
        logits, target, normaliser, entropy if with_entropy else normaliser, grad_log_prob,
        grad_entropy if with_entropy else grad_log_prob, logits.stride(0), logits.shape[1], softcap or 1.0,
        1.0 / temperature, CAPPED=softcap is not None, ENTROPY=with_entropy, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
