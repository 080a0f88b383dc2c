"""Log-probs of given tokens straight from hidden states: linear layer, log-softmax and gather in one, chunk by chunk.

Full logits of (tokens, vocabulary) are the largest tensor of an RL update; in fp32 at most one chunk of them exists at
a time. What the backward pass needs of them, d log_prob / d logit = onehot - p, is kept in the model's dtype while it
fits a budget (then the backward pass is two matrix products), else the logits are computed again. All reductions over
the vocabulary are in fp32 (fp64 for fp64 models).

Dimension key: N tokens, D hidden size, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

import functools
import importlib.util

import torch

from verl.hardware.launching import launches, or_without
from verl.models.host_linear import product

KERNELS = "log-probs"
CHUNK_ELEMENTS = 32 * 1024 * 1024  # logits at a time: 128 MB in fp32
CHUNK_ELEMENTS_KERNEL = 512 * 1024 * 1024  # with the kernels they exist in half precision only: 1 GB
KEPT_BYTES_CPU = 1 << 30
KEPT_SHARE_CUDA = 8  # an eighth of the card's memory: a constant of the machine, not of what is free now


@functools.cache
def _has_kernels(device: torch.device) -> bool:
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (7, 0)


def _kernels_for(hidden: torch.Tensor) -> bool:
    half = hidden.dtype in (torch.bfloat16, torch.float16)
    return half and _has_kernels(hidden.device) and launches(KERNELS, hidden.device)


@functools.cache
def _kept_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // KEPT_SHARE_CUDA
    return KEPT_BYTES_CPU


def _chunk_rows(hidden: torch.Tensor, vocabulary: int) -> int:
    elements = CHUNK_ELEMENTS_KERNEL if _kernels_for(hidden) else CHUNK_ELEMENTS
    return max(1, elements // vocabulary)


def _logits(hidden, weight, bias, softcap: float | None, temperature: float) -> torch.Tensor:
    """(C, V) logits after soft-capping and temperature, in at least fp32."""
    logits = product(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    return logits.div_(temperature) if temperature != 1.0 else logits


def _uncap_(grad: torch.Tensor, logits: torch.Tensor, softcap: float | None, temperature: float) -> torch.Tensor:
    """Turn the gradient of shaped logits into that of raw ones, in place."""
    if softcap is not None:
        capped = logits * (temperature / softcap)
        grad.mul_(capped.square_().neg_().add_(1))
    return grad.div_(temperature) if temperature != 1.0 else grad


def _chunk_forward(logits, target, out, softcap, temperature, delta: bool) -> torch.Tensor | None:
    """Fill (log_prob, normaliser, entropy or None) of a chunk of shaped logits, in plain torch; returns its delta."""
    log_prob, normaliser, entropy = out
    if not delta and entropy is None:
        torch.logsumexp(logits, -1, out=normaliser)
        torch.sub(logits.gather(-1, target[:, None])[:, 0], normaliser, out=log_prob)
        return None
    at_target = logits.gather(-1, target[:, None])[:, 0]
    high, place = logits.max(-1)
    p = torch.softmax(logits, -1)
    # the largest probability is at least 1/V, so its logarithm is exact enough to get the normaliser from
    torch.sub(high, p.gather(-1, place[:, None])[:, 0].log_(), out=normaliser)
    torch.sub(at_target, normaliser, out=log_prob)
    if entropy is not None:
        # H = logsumexp - sum p * logit
        torch.sub(normaliser, torch.linalg.vecdot(p, logits), out=entropy)
    if not delta:
        return None
    p.neg_().scatter_add_(-1, target[:, None], p.new_ones(len(p), 1))
    return _uncap_(p, logits, softcap, temperature)


def _chunk_backward(logits, target, normaliser, entropy, grad_log_prob, grad_entropy, softcap, temperature):
    """(C, V) gradient of the raw logits, in plain torch."""
    x = logits - normaliser[:, None]
    p = torch.exp(x)
    # d log_prob / d logit = onehot - p ;  d H / d logit = -p * (logit - logsumexp + H)
    if grad_entropy is None:
        grad = p.mul_(-grad_log_prob[:, None])
    else:
        x.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_log_prob[:, None])
        grad = p.mul_(x).neg_()
    grad.scatter_add_(-1, target[:, None], grad_log_prob[:, None])
    return _uncap_(grad, logits, softcap, temperature)


def _with_kernels(device: torch.device, work):
    return or_without(KERNELS, device, work, instead="torch's own operations compute them")


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, *others):
        return _with_kernels(hidden.device, lambda: _LinearLogProb._forward(ctx, hidden, *others))

    @staticmethod
    def _forward(ctx, hidden, weight, bias, target, softcap, temperature, with_entropy, keep):
        n, vocabulary = hidden.shape[0], weight.shape[0]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        log_prob, normaliser = hidden.new_empty(2, n, dtype=wide).unbind(0)
        entropy = hidden.new_empty(n if with_entropy else 0, dtype=wide)
        kernels, chunk = _kernels_for(hidden), _chunk_rows(hidden, vocabulary)
        kept = hidden.new_empty(n, vocabulary) if keep else None
        for i in range(0, n, chunk):
            s = slice(i, i + chunk)
            out = (log_prob[s], normaliser[s], entropy[s] if with_entropy else None)
            if kernels:
                from verl.models.logprob_kernels import rows_forward

                logits = torch.mm(hidden[s], weight.t(), out=None if kept is None else kept[s])
                if bias is not None:
                    logits += bias
                rows_forward(logits, target[s], out, softcap=softcap, temperature=temperature, delta=keep)
            else:
                logits = _logits(hidden[s], weight, bias, softcap, temperature)
                delta = _chunk_forward(logits, target[s], out, softcap, temperature, keep)
                if kept is not None:
                    kept[s] = delta
        ctx.save_for_backward(hidden, weight, bias, target, normaliser, entropy, kept)
        ctx.settings = softcap, temperature, with_entropy
        ctx.set_materialize_grads(False)
        return log_prob, entropy

    @staticmethod
    def backward(ctx, grad_log_prob, grad_entropy):
        hidden, weight, bias, _, normaliser, _, kept = ctx.saved_tensors
        if not ctx.settings[2]:
            grad_entropy = None
        if grad_log_prob is None:
            grad_log_prob = torch.zeros_like(normaliser)
        need_weight = ctx.needs_input_grad[1]
        if kept is not None:
            assert grad_entropy is None, "the entropy's gradient needs the logits again"
            grads = _from_kept(kept, hidden, weight, bias, grad_log_prob, need_weight)
        else:
            grad = grad_log_prob.contiguous()
            grads = _with_kernels(hidden.device, lambda: _recomputed(ctx, grad, grad_entropy, need_weight))
        return *grads, None, None, None, None, None


def _from_kept(kept, hidden, weight, bias, grad, need_weight: bool):
    """Gradients from kept onehot - p: the loss's gradient scales rows, so it can scale the narrow sides instead."""
    column = grad[:, None]
    grad_hidden = (product(kept, weight.t()) * column).to(hidden.dtype)
    grad_weight = product(kept.t(), (hidden * column).to(hidden.dtype).t()) if need_weight else None
    grad_bias = None if bias is None else (kept.t() @ column.to(kept.dtype))[:, 0].to(bias.dtype)
    return grad_hidden, grad_weight, grad_bias


def _recomputed(ctx, grad_log_prob, grad_entropy, need_weight: bool):
    """Gradients from logits computed again, chunk by chunk; several chunks are summed in fp32."""
    hidden, weight, bias, target, normaliser, entropy, _ = ctx.saved_tensors
    softcap, temperature, _ = ctx.settings
    kernels, chunk = _kernels_for(hidden), _chunk_rows(hidden, weight.shape[0])
    wide = normaliser.dtype
    grad_hidden = torch.empty_like(hidden)
    grad_weight = grad_bias = None
    for i in range(0, hidden.shape[0], chunk):
        s = slice(i, i + chunk)
        of_entropy = None if grad_entropy is None else grad_entropy[s]
        h = entropy[s] if grad_entropy is not None else None
        if kernels:
            from verl.models.logprob_kernels import rows_backward

            grad = torch.nn.functional.linear(hidden[s], weight, bias)
            rows_backward(
                grad, target[s], normaliser[s], h, grad_log_prob[s], of_entropy,
                softcap=softcap, temperature=temperature,
            )  # fmt: skip
        else:
            logits = _logits(hidden[s], weight, bias, softcap, temperature)
            grad = _chunk_backward(
                logits, target[s], normaliser[s], h, grad_log_prob[s], of_entropy, softcap, temperature
            )
        if bias is not None:
            part = grad.sum(0, dtype=wide)
            grad_bias = part if grad_bias is None else grad_bias.add_(part)
        narrow = grad.to(hidden.dtype)
        grad_hidden[s] = product(narrow, weight.t())
        if need_weight:
            part = product(narrow.t(), hidden[s].t())
            if hidden.shape[0] <= chunk:
                grad_weight = part
            else:
                grad_weight = part.to(wide) if grad_weight is None else grad_weight.add_(part)
    return (
        grad_hidden,
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_bias is None else grad_bias.to(bias.dtype),
    )


def linear_log_prob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_gradient: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log softmax(softcap(hidden @ weight.T + bias) / temperature) at ``target``, and the entropy if asked for.

    Args:
        hidden: (N, D). weight: (V, D). target: (N,) int64. bias: (V,) or None.
        entropy_gradient: the entropy is part of the loss; if False it is a number to look at, without a gradient.

    Returns:
        (N,) log-probs and (N,) entropies in nats (or None), in fp32 (fp64 for fp64 inputs).
    """
    size = hidden.shape[0] * weight.shape[0] * hidden.element_size()
    differentiable = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    keep = differentiable and not (with_entropy and entropy_gradient) and size <= _kept_bytes(hidden.device)
    log_prob, entropy = _LinearLogProb.apply(hidden, weight, bias, target, softcap, temperature, with_entropy, keep)
    if not with_entropy:
        return log_prob, None
    return log_prob, entropy if entropy_gradient else entropy.detach()
