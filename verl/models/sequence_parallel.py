"""Ulysses sequence parallelism: the tokens of a packed batch are split over ranks, and its heads inside attention.

Jacobs et al. 2023, arXiv:2309.14509. Everything but attention is per token, so each rank of a group computes its
part of the tokens. Around attention an all-to-all trades tokens for heads: a rank attends with its share of the heads
over all tokens, under the same layout as without the split.

The ranks of a group get the same batch. Each predicts its share of the trained tokens; the log-probs are then joined,
so that every rank computes the same loss, whose gradient flows back into its own share only: summed over ranks, the
gradients of the weights are those of the whole batch.

Dimension key: s ranks, T tokens padded to a multiple of s, t = T / s, H heads, G key-value heads, D head size.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from verl.errors import ModelError
from verl.models import attention, varlen
from verl.models.packing import PackedBatch

PACKED = (attention.NAME, varlen.VARLEN, varlen.FLASH)
_SPLIT: weakref.WeakKeyDictionary[PreTrainedModel, SequenceGroup] = weakref.WeakKeyDictionary()
_wrapped: set[str] = set()


@dataclass
class SplitLayout:
    """The layout of all ``tokens`` tokens, and the ranks that share them."""

    inner: Any
    sequence: SequenceGroup
    tokens: int


class SequenceGroup:
    """The ranks that share the tokens of a batch."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def hidden_states(self, backbone: nn.Module, packed: PackedBatch, layout: Any) -> torch.Tensor:
        """(T, D) states of all tokens on every rank, each having computed its part."""
        tokens = packed.num_tokens
        part = -(-tokens // self.size)
        mine = slice(self.rank * part, (self.rank + 1) * part)
        pad = part * self.size - tokens
        ids, positions = (nn.functional.pad(x, (0, pad))[:, mine] for x in (packed.input_ids, packed.position_ids))
        out = backbone(
            input_ids=ids,
            position_ids=positions,
            use_cache=False,
            verl_layout=SplitLayout(layout, self, tokens),
        )
        return self.gather(out.last_hidden_state[0])[:tokens]

    def gather(self, states: torch.Tensor) -> torch.Tensor:
        """(t, D) states of each rank's tokens to (T, D) of all."""
        return _GatherStates.apply(states, self)

    def share(self, count: int, device: torch.device) -> torch.Tensor:
        """(ceil(count / s),) the predicted tokens of this rank; the last one again where there are too few."""
        each = -(-count // self.size)
        return torch.arange(self.rank * each, (self.rank + 1) * each, device=device).clamp(max=count - 1)

    def join(self, values: torch.Tensor, count: int) -> torch.Tensor:
        """(count,) values of all ranks' shares; the gradient of this rank's flows back."""
        return _Join.apply(values, self)[:count]


class _GatherStates(torch.autograd.Function):
    """(t, D) to (T, D). Every rank uses some rows, so the gradients of a row are summed over ranks."""

    @staticmethod
    def forward(ctx, states: torch.Tensor, sequence: SequenceGroup) -> torch.Tensor:
        ctx.sequence = sequence
        out = states.new_empty(len(states) * sequence.size, *states.shape[1:])
        dist.all_gather_into_tensor(out, states.contiguous(), group=sequence.group)
        return out

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        sequence = ctx.sequence
        wide = torch.promote_types(grad.dtype, torch.float32)
        out = torch.empty(len(grad) // sequence.size, *grad.shape[1:], dtype=wide, device=grad.device)
        dist.reduce_scatter_tensor(out, grad.to(wide).contiguous(), group=sequence.group)
        return out.to(grad.dtype), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: torch.Tensor, sequence: SequenceGroup) -> torch.Tensor:
        ctx.mine = slice(sequence.rank * len(values), (sequence.rank + 1) * len(values))
        out = values.new_empty(len(values) * sequence.size)
        dist.all_gather_into_tensor(out, values.contiguous(), group=sequence.group)
        return out

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad[ctx.mine].contiguous(), None


class _Exchange(torch.autograd.Function):
    """Row i goes to rank i, and row i comes from rank i. Its own adjoint."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, rows.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return _Exchange.apply(grad, ctx.group), None


def sequence_of(model: PreTrainedModel) -> SequenceGroup | None:
    """The ranks that share the tokens of this model's batches; None where each has its own."""
    return _SPLIT.get(model)


def share_tokens(model: PreTrainedModel, sequence: SequenceGroup) -> None:
    """From now on the ranks of ``sequence`` get the same batches, and each predicts its share of the tokens."""
    _SPLIT[model] = sequence


def split_sequences(model: PreTrainedModel, group: dist.ProcessGroup) -> None:
    """From now on the ranks of ``group`` make their passes over ``model`` together, on the same packed batches.

    Raises:
        ModelError: the model runs padded, or its heads do not divide.
    """
    sequence = SequenceGroup(group)
    config, name = model.config.get_text_config(), model.config._attn_implementation
    if name not in PACKED:
        raise ModelError(
            f"ulysses_sequence_parallel_size={sequence.size} needs packed sequences, and {type(model).__name__} runs "
            f"with padded ones ({name})."
        )
    if config.num_attention_heads % sequence.size:
        raise ModelError(
            f"ulysses_sequence_parallel_size={sequence.size} does not divide the {config.num_attention_heads} "
            f"attention heads of {type(model).__name__}."
        )
    if name not in _wrapped:
        AttentionInterface.register(name, around(AttentionInterface()[name]))
        _wrapped.add(name)
    share_tokens(model, sequence)


def around(inner: Callable[..., Any]) -> Callable[..., Any]:
    """An attention function that trades tokens for heads where the layout says that tokens are split."""

    @torch.compiler.disable  # a compiled layer calls it between two graphs
    def forward(module, query, key, value, attention_mask, *rest, verl_layout=None, **kwargs):
        if not isinstance(verl_layout, SplitLayout):
            return inner(module, query, key, value, attention_mask, *rest, verl_layout=verl_layout, **kwargs)
        split = verl_layout
        q, k, v = _to_heads(query, key, value, split)
        out, _ = inner(module, q, k, v, attention_mask, *rest, verl_layout=split.inner, **kwargs)
        return _to_tokens(out, split.sequence, query.shape[2]), None

    return forward


def _to_heads(query, key, value, split: SplitLayout) -> tuple[torch.Tensor, ...]:
    """(1, H, t, D) queries and (1, G, t, D) keys and values to (1, H / s, tokens, D) and (1, max(G, s) / s, ...)."""
    size = split.sequence.size
    if key.shape[1] % size:  # fewer key-value heads than ranks: each is there several times
        key, value = (x.repeat_interleave(size // math.gcd(x.shape[1], size), dim=1) for x in (key, value))
    parts = [x[0].unflatten(0, (size, -1)) for x in (query, key, value)]  # (s, heads / s, t, D)
    mine = _Exchange.apply(torch.cat(parts, 1), split.sequence.group)
    joined = mine.transpose(0, 1).flatten(1, 2)[:, : split.tokens]  # (heads, tokens, D)
    return tuple(x[None] for x in joined.split([x.shape[1] for x in parts]))


def _to_tokens(out: torch.Tensor, sequence: SequenceGroup, part: int) -> torch.Tensor:
    """(1, tokens, H / s, D) to (1, t, H, D)."""
    whole = nn.functional.pad(out[0], (0, 0, 0, 0, 0, part * sequence.size - out.shape[1]))
    mine = _Exchange.apply(whole.unflatten(0, (sequence.size, part)), sequence.group)  # (s, t, H / s, D)
    return mine.transpose(0, 1).flatten(1, 2)[None]
