"""Variable-length flash attention over packed segments, registered with transformers as further packed attentions.

Queries stay where they are: the segments lie behind one another. The keys of a segment are its prompt's and its own,
gathered in that order, so that a segment's queries are the last of its keys (causal, aligned at the bottom right).

Dimension key: T packed tokens, K gathered keys, H heads, G key-value heads, D head size.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from verl.errors import ModelError
from verl.models.attention import REFUSED_KEYWORDS, gather_rows
from verl.models.packing import PackedBatch

VARLEN, FLASH = "verl_packed_varlen", "verl_packed_flash"
HALF = (torch.bfloat16, torch.float16)
MAX_HEAD_SIZE = 256


@dataclass
class VarlenLayout:
    """Where each segment's queries and keys lie.

    Attributes:
        key: (K,) indices into the packed tokens; None if every segment sees only itself, so that keys need no gather.
        start_q, start_k: (S + 1,) int32 bounds of the segments among queries and keys.
        max_q, max_k: the longest segment's queries and keys.
    """

    key: torch.Tensor | None
    start_q: torch.Tensor
    start_k: torch.Tensor
    max_q: int
    max_k: int


def make_varlen_layout(packed: PackedBatch) -> VarlenLayout:
    """The layout of a packed batch, whose segments must lie behind one another without gaps."""
    device = packed.input_ids.device
    parts, bounds_q, bounds_k = [], [0], [0]
    for s in packed.segments:
        assert s.start == bounds_q[-1], "segments must be packed without gaps"
        parts += [torch.arange(s.prefix_start, s.prefix_start + s.prefix_length)] if s.prefix_length else []
        parts.append(torch.arange(s.start, s.start + s.length))
        bounds_q.append(bounds_q[-1] + s.length)
        bounds_k.append(bounds_k[-1] + s.prefix_length + s.length)
    shared = any(s.prefix_length for s in packed.segments)
    return VarlenLayout(
        key=torch.cat(parts).to(device) if shared else None,
        start_q=torch.tensor(bounds_q, dtype=torch.int32, device=device),
        start_k=torch.tensor(bounds_k, dtype=torch.int32, device=device),
        max_q=max(s.length for s in packed.segments),
        max_k=max(s.prefix_length + s.length for s in packed.segments),
    )


def gather_keys(rows: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    return rows if index is None else gather_rows(rows, index)


def _torch_kernel() -> Callable:
    """torch's own ``varlen_attn`` (torch 2.10 and newer), whose keywords changed from version to version."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        raise ModelError(f"torch {torch.__version__} has no variable-length attention")
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters

    def call(q, k, v, layout: VarlenLayout, scale: float | None, window: int | None) -> torch.Tensor:
        extra: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]} if "enable_gqa" in known else {}
        if "scale" in known:
            extra["scale"] = scale
        elif scale is not None and abs(scale * q.shape[-1] ** 0.5 - 1) > 1e-6:
            raise ModelError(f"torch {torch.__version__}'s variable-length attention knows no scale of its own")
        if "window_size" in known:
            extra["window_size"] = (-1 if window is None else window - 1, 0)
        elif window is None:
            extra["is_causal"] = True
        else:
            raise ModelError(f"torch {torch.__version__}'s variable-length attention has no sliding window")
        return varlen_attn(q, k, v, layout.start_q, layout.start_k, layout.max_q, layout.max_k, **extra)

    return call


def _flash_kernel() -> Callable:
    if importlib.util.find_spec("flash_attn") is None:
        raise ModelError("the package flash-attn is not installed")
    from flash_attn import flash_attn_varlen_func

    def call(q, k, v, layout: VarlenLayout, scale: float | None, window: int | None) -> torch.Tensor:
        return flash_attn_varlen_func(
            q, k, v, layout.start_q, layout.start_k, layout.max_q, layout.max_k,
            softmax_scale=scale, causal=True, window_size=(-1 if window is None else window - 1, 0),
        )  # fmt: skip

    return call


@functools.cache
def _kernel(name: str) -> Callable:
    return {VARLEN: _torch_kernel, FLASH: _flash_kernel}[name]()


# opaque to torch.compile: a compiled layer calls it between two graphs, and does not recompile for each layout
@torch.compiler.disable
def _attend(name, module, query, key, value, scaling, dropout, window, softcap, layout, others) -> torch.Tensor:
    problem = None
    if layout is None:
        problem = "its layers do not hand keywords down to their attention"
    elif softcap is not None:
        problem = "it soft-caps its attention scores"
    elif dropout and module.training:
        problem = "it has attention dropout"
    elif query.dtype not in HALF:
        problem = f"it computes in {query.dtype}"
    elif query.shape[-1] > MAX_HEAD_SIZE or query.shape[-1] % 8 or query.shape[-1] != value.shape[-1]:
        problem = f"its head size is {query.shape[-1]}"
    else:
        refused = [keyword for keyword in REFUSED_KEYWORDS if others.get(keyword) is not None]
        problem = f"it passes the keyword '{refused[0]}'" if refused else None
    if problem is not None:
        raise ModelError(f"flash attention does not serve {type(module).__name__}: {problem}")
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))  # (T, H|G, D)
    k, v = gather_keys(k, layout.key), gather_keys(v, layout.key)
    return _kernel(name)(q, k, v, layout, scaling, window)[None]


def _register(name: str) -> None:
    def forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        verl_layout: VarlenLayout | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, None]:
        """(1, H, T, D) queries, (1, G, T, D) keys and values to (1, T, H, D) outputs."""
        out = _attend(name, module, query, key, value, scaling, dropout, sliding_window, softcap, verl_layout, kwargs)
        return out, None

    AttentionInterface.register(name, forward)


_register(VARLEN)
_register(FLASH)
