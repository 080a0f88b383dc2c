"""Models whose matrices are cut over ranks (tensor parallelism), and log-probs from a vocabulary that is cut.

Each rank of a group holds the output rows of its part of the vocabulary. Log-probs, entropy and their gradients need
three sums and a maximum a token from every rank, never another rank's logits. Logits of a rank's part exist a chunk of
tokens at a time, and are computed again in the backward pass.

Dimension key: N tokens, D hidden size, v rows of the vocabulary on this rank, C tokens of a chunk.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from verl.models.packing import PackedBatch

CHUNK_ELEMENTS = 32 * 1024 * 1024  # logits of a rank at a time: 128 MB in fp32


class OutputPart(NamedTuple):
    """Rows ``start`` to ``start + len(weight)`` of the output layer; ``most``: rows of the rank that has most."""

    weight: torch.Tensor
    start: int
    most: int
    group: dist.ProcessGroup


class TensorParallelModel(ABC):
    """The computation of a model that several ranks make together, each with its part of every matrix."""

    @abstractmethod
    def hidden_states(self, packed: PackedBatch) -> torch.Tensor:
        """(T, D) last hidden states of the packed tokens, equal on all ranks of the group."""

    @abstractmethod
    def output(self) -> OutputPart:
        """This rank's part of the output layer."""


_COMPUTED_BY: weakref.WeakKeyDictionary[PreTrainedModel, TensorParallelModel] = weakref.WeakKeyDictionary()


def tensor_parallel_of(model: PreTrainedModel) -> TensorParallelModel | None:
    """What computes in place of ``model``; None where it computes by itself."""
    return _COMPUTED_BY.get(model)


def compute_by(model: PreTrainedModel, parallel: TensorParallelModel) -> None:
    """From now on ``parallel`` computes in place of ``model``."""
    _COMPUTED_BY[model] = parallel


class _VocabParallelLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, target, part: OutputPart, temperature: float, with_entropy: bool):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        log_prob, normaliser, entropy = hidden.new_empty(3, len(hidden), dtype=wide).unbind(0)
        chunk = _chunk_rows(part)
        for i in range(0, len(hidden), chunk):
            s = slice(i, i + chunk)
            logits = _logits(hidden[s], weight, temperature)
            high = logits.max(-1).values
            dist.all_reduce(high, op=dist.ReduceOp.MAX, group=part.group)
            place, here = _own_targets(target[s], part)
            # (3, C): sum of exponentials, logit of the target, sum of exponential times logit
            sums = logits.new_zeros(3, len(logits))
            torch.where(here, logits.gather(-1, place[:, None])[:, 0], sums[1], out=sums[1])
            p = (logits - high[:, None]).exp_()
            torch.sum(p, -1, out=sums[0])
            if with_entropy:
                torch.sum(p.mul_(logits), -1, out=sums[2])
            dist.all_reduce(sums, group=part.group)
            normaliser[s] = high + sums[0].log()
            log_prob[s] = sums[1] - normaliser[s]
            # H = logsumexp - sum p * logit
            entropy[s] = normaliser[s] - sums[2] / sums[0]
        ctx.save_for_backward(hidden, weight, target, normaliser, entropy)
        ctx.part, ctx.temperature, ctx.with_entropy = part, temperature, with_entropy
        return log_prob, entropy

    @staticmethod
    def backward(ctx, grad_log_prob, grad_entropy):
        hidden, weight, target, normaliser, entropy = ctx.saved_tensors
        part: OutputPart = ctx.part
        wide = normaliser.dtype
        grad_hidden = torch.empty_like(hidden, dtype=wide)
        need_weight = ctx.needs_input_grad[1]
        grad_weight = torch.zeros_like(weight, dtype=wide) if need_weight else None
        chunk = _chunk_rows(part)
        for i in range(0, len(hidden), chunk):
            s = slice(i, i + chunk)
            x = _logits(hidden[s], weight, ctx.temperature).sub_(normaliser[s, None])
            p = x.exp()
            # d log_prob / d logit = onehot - p ;  d H / d logit = -p * (logit - logsumexp + H)
            factor = grad_log_prob[s, None]
            if ctx.with_entropy:
                factor = x.add_(entropy[s, None]).mul_(grad_entropy[s, None]).add_(factor)
            grad = p.mul_(factor).neg_()
            place, here = _own_targets(target[s], part)
            grad.scatter_add_(-1, place[:, None], torch.where(here, grad_log_prob[s], 0)[:, None])
            if ctx.temperature != 1.0:
                grad.div_(ctx.temperature)
            narrow = grad.to(hidden.dtype)
            grad_hidden[s] = narrow @ weight
            if grad_weight is not None:
                grad_weight += narrow.t() @ hidden[s]
        dist.all_reduce(grad_hidden, group=part.group)
        return (
            grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None,
            None,
            None,
            None,
        )


def _chunk_rows(part: OutputPart) -> int:
    return max(1, CHUNK_ELEMENTS // part.most)  # the same on all ranks


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = nn.functional.linear(hidden, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.div_(temperature) if temperature != 1.0 else logits


def _own_targets(target: torch.Tensor, part: OutputPart) -> tuple[torch.Tensor, torch.Tensor]:
    """(row of this rank's part, or 0; whether the target is among them)."""
    place = target - part.start
    here = (place >= 0) & (place < len(part.weight))
    return place.masked_fill(~here, 0), here


def vocab_parallel_log_prob(
    hidden: torch.Tensor,
    target: torch.Tensor,
    part: OutputPart,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_gradient: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log softmax(hidden @ weight.T / temperature) at ``target``, and the entropy if asked for, equal on all ranks.

    All ranks of the group call this together with the same ``hidden`` and ``target``, and get the same gradient of
    ``hidden``; each gets that of its own rows of the weight.

    Args:
        hidden: (N, D). target: (N,) int64, ids of the whole vocabulary.
        entropy_gradient: the entropy is part of the loss; if False it is a number to look at, without a gradient.

    Returns:
        (N,) log-probs and (N,) entropies in nats (or None), in fp32 (fp64 for fp64 inputs).
    """
    log_prob, entropy = _VocabParallelLogProb.apply(hidden, part.weight, target, part, temperature, with_entropy)
    if not with_entropy:
        return log_prob, None
    return log_prob, entropy if entropy_gradient else entropy.detach()
