"""Attention over packed segments, registered with transformers under the name ``verl_packed``.

Everything else of a layer (projections, MLP, norms) is per token and needs no padding. Here queries and keys of the
segments are gathered into small padded blocks, one scaled-dot-product call handles each block, and the outputs go
back to their packed places. This works on every device; faster kernels are other functions with the same layout.

Dimension key: T packed tokens, S segments of a block, Q/K padded query and key length, H heads, G key-value heads,
D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AttentionInterface

from verl.errors import ModelError
from verl.models.packing import PackedBatch, Segment
from verl.models.sdpa import attend

NAME = "verl_packed"


@dataclass
class Block:
    """Segments of like kind, padded to one size.

    Attributes:
        query, key: (S, Q) and (S, K) indices into the packed tokens (padding repeats index 0 of the segment).
        valid: (S, Q) bool, the real queries.
        distance: (S, Q, K) int, position of the query minus position of the key; -1 where the key must not be seen.
        causal: True if there is no prefix and the query and key blocks coincide (the fast path needs no mask).
    """

    query: torch.Tensor
    key: torch.Tensor
    valid: torch.Tensor
    distance: torch.Tensor
    causal: bool


@dataclass
class Layout:
    blocks: list[Block]
    inverse: torch.Tensor  # (T,) place of each packed token among the blocks' padded queries, one block after another


def _block(segments: list[Segment], device: torch.device) -> Block:
    prefix = max(s.prefix_length for s in segments)
    longest = max(s.length for s in segments)

    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(s, name) for s in segments], device=device)[:, None]

    start, length = column("start"), column("length")
    prefix_start, prefix_length = column("prefix_start"), column("prefix_length")
    own = torch.arange(longest, device=device)[None]
    before = torch.arange(prefix, device=device)[None]
    valid = own < length
    query = start + own * valid
    key = torch.cat([prefix_start + before * (before < prefix_length), query], dim=1)
    query_position = prefix_length + own
    key_position = torch.cat([before.expand(len(segments), -1), query_position], dim=1)
    seen = torch.cat([before < prefix_length, valid], dim=1)
    distance = query_position[:, :, None] - key_position[:, None, :]
    distance = distance.masked_fill(~seen[:, None, :] | (distance < 0), -1)
    # a padded query sees itself, so that its softmax is defined; its output is thrown away
    itself = torch.arange(longest, device=device)
    distance[:, itself, prefix + itself] = 0
    return Block(query, key, valid, distance, causal=prefix == 0)


def make_layout(packed: PackedBatch) -> Layout:
    """Group the segments into blocks: those without a prefix, and those with one."""
    device = packed.input_ids.device
    kinds = [[s for s in packed.segments if not s.prefix_length], [s for s in packed.segments if s.prefix_length]]
    blocks = [_block(kind, device) for kind in kinds if kind]
    token = torch.cat([b.query.flatten() for b in blocks])
    place = torch.cat([b.valid.flatten() for b in blocks]).nonzero()[:, 0]
    inverse = torch.empty(packed.num_tokens, dtype=torch.long, device=device)
    inverse[token[place]] = place
    return Layout(blocks, inverse)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.count = rows.shape[0]
        return rows.index_select(0, index.flatten()).view(*index.shape, *rows.shape[1:])

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        (index,) = ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros((ctx.count, *grad.shape[index.dim() :]), dtype=wide, device=grad.device)
        total.index_add_(0, index.flatten(), grad.to(wide).flatten(0, index.dim() - 1))
        return total.to(grad.dtype), None


def gather_rows(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``rows[index]``; the gradients of a row that was taken several times are summed in fp32."""
    return _GatherRows.apply(rows, index)


REFUSED_KEYWORDS = ("s_aux", "position_bias")


def packed_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    verl_layout: Layout | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls: (1, H, T, D) queries, (1, G, T, D) keys and values.

    ``verl_layout`` is given to the model's forward as a keyword and handed down by it. A keyword, not a global: it is
    then still right when a checkpointed layer is recomputed on one of autograd's own threads.

    Returns:
        (1, T, H, D) outputs, and no attention weights.
    """
    if verl_layout is None:
        raise ModelError(
            f"{type(module).__name__} does not hand keywords down to its attention, so it cannot run packed."
        )
    for name in REFUSED_KEYWORDS:
        if kwargs.get(name) is not None:
            raise ModelError(
                f"packed attention does not know the keyword '{name}' that {type(module).__name__} passes."
            )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, H|G, D)
    outputs = []
    for block in verl_layout.blocks:
        bq, bk, bv = (gather_rows(x, i).transpose(1, 2) for x, i in ((q, block.query), (k, block.key), (v, block.key)))
        out = _attend(bq, bk, bv, block, scaling, sliding_window, softcap, dropout if module.training else 0.0)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return gather_rows(torch.cat(outputs), verl_layout.inverse)[None], None


def _attend(q, k, v, block: Block, scale, window, softcap, dropout) -> torch.Tensor:
    """(S, H, Q, D) attention of one block."""
    if softcap is None and block.causal and (window is None or window >= block.query.shape[1]):
        return attend(q, k, v, scale=scale, dropout=dropout)
    mask = block.distance >= 0
    if window is not None:
        mask = mask & (block.distance < window)
    return attend(q, k, v, mask[:, None], scale=scale, softcap=softcap, dropout=dropout)


AttentionInterface.register(NAME, packed_attention_forward)
