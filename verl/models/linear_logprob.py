"""Log-probs of given tokens straight from hidden states: linear layer, log-softmax and gather in one, chunk by chunk.

Full logits of (tokens, vocabulary) are the largest tensor of an RL update; here at most ``chunk`` rows of them exist
at a time, in the forward and in the backward pass. All reductions over the vocabulary are in fp32 (fp64 for fp64
models).

Dimension key: N tokens, D hidden size, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

import torch

CHUNK_ELEMENTS = 32 * 1024 * 1024  # logits kept at a time: 128 MB in fp32


def _chunk_rows(vocabulary: int) -> int:
    return max(1, CHUNK_ELEMENTS // vocabulary)


def _logits(hidden, weight, bias, softcap: float | None, temperature: float) -> torch.Tensor:
    """(C, V) logits after soft-capping and temperature, in at least fp32."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = torch.tanh(logits.div_(softcap)).mul_(softcap)
    return logits.div_(temperature) if temperature != 1.0 else logits


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, target, softcap, temperature, with_entropy):
        n, chunk = hidden.shape[0], _chunk_rows(weight.shape[0])
        wide = torch.promote_types(hidden.dtype, torch.float32)
        log_prob = torch.empty(n, device=hidden.device, dtype=wide)
        entropy = torch.empty(n if with_entropy else 0, device=hidden.device, dtype=wide)
        normaliser = torch.empty_like(log_prob)
        for i in range(0, n, chunk):
            s = slice(i, i + chunk)
            logits = _logits(hidden[s], weight, bias, softcap, temperature)
            normaliser[s] = torch.logsumexp(logits, -1)
            log_prob[s] = logits.gather(-1, target[s, None])[:, 0] - normaliser[s]
            if with_entropy:
                # H = logsumexp - sum p * logit
                p = torch.exp(logits - normaliser[s, None])
                entropy[s] = normaliser[s] - torch.einsum("cv,cv->c", p, logits)
        ctx.save_for_backward(hidden, weight, bias, target, normaliser, entropy)
        ctx.settings = softcap, temperature, with_entropy, chunk
        return log_prob, entropy

    @staticmethod
    def backward(ctx, grad_log_prob, grad_entropy):
        hidden, weight, bias, target, normaliser, entropy = ctx.saved_tensors
        softcap, temperature, with_entropy, chunk = ctx.settings
        wide = normaliser.dtype
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, device=weight.device, dtype=wide) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros(bias.shape, device=bias.device, dtype=wide) if bias is not None else None
        for i in range(0, hidden.shape[0], chunk):
            s = slice(i, i + chunk)
            logits = _logits(hidden[s], weight, bias, softcap, temperature)
            p = torch.exp(logits - normaliser[s, None])
            # d log_prob / d logit = onehot - p ;  d H / d logit = -p * (logit - logsumexp + H)
            grad = p * -grad_log_prob[s, None]
            grad.scatter_add_(-1, target[s, None], grad_log_prob[s, None])
            if with_entropy:
                grad -= p * (logits - normaliser[s, None] + entropy[s, None]) * grad_entropy[s, None]
            grad = grad / temperature
            if softcap is not None:
                capped = logits * temperature / softcap
                grad = grad * (1 - capped * capped)
            narrow = grad.to(hidden.dtype)
            grad_hidden[s] = narrow @ weight
            if grad_weight is not None:
                grad_weight += narrow.t() @ hidden[s]
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
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
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log softmax(softcap(hidden @ weight.T + bias) / temperature) at ``target``, and the entropy if asked for.

    Args:
        hidden: (N, D). weight: (V, D). target: (N,) int64. bias: (V,) or None.

    Returns:
        (N,) log-probs and (N,) entropies in nats (or None), in fp32 (fp64 for fp64 inputs).
    """
    log_prob, entropy = _LinearLogProb.apply(hidden, weight, bias, target, softcap, temperature, with_entropy)
    return log_prob, entropy if with_entropy else None
