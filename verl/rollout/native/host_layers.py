"""Decoder layers of the twin on a CPU, in fewer operations.

At the width of a decode step many operations on a CPU cost about as much as their start. Layers of Llama's kind (two
RMS norms, rotary attention, a gated MLP) make fewer here: queries and keys are rotated together, each norm is one call,
and there is no module between a product and the next. Values are rounded where the plain layer rounds them.

Whether a layer is of that kind is found by trying: both ways must give the same queries, keys, values and output.

Dimension key: T tokens, E hidden size, H query heads, G key-value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from verl.rollout.native.attention import Layout, Options
from verl.rollout.native.linears import HostLinears

PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


class HostLayers:
    """The decoder layers of ``model`` that are of Llama's kind; their forwards are taken over.

    Args:
        layers: the decoder layers. linears: their products.
    """

    def __init__(self, model: nn.Module, layers: list[nn.Module], linears: HostLinears):
        self.count = 0
        self.rotation = _Rotation()
        rotary = getattr(getattr(model, "model", None), "rotary_emb", None)
        if rotary is None:
            return
        for layer in layers:
            if not _has_parts(layer, linears):
                continue
            taken = _Layer(layer, linears, self.rotation)
            if taken.agrees(rotary):
                layer.forward = taken  # type: ignore[method-assign, assignment]
                self.count += 1
        self.rotation.drop()

    def drop(self) -> None:
        """Forget the last forward."""
        self.rotation.drop()


class _Rotation:
    """Rotary positions of one forward, in the form that all layers use."""

    def __init__(self) -> None:
        self.drop()

    def drop(self) -> None:
        self._of: torch.Tensor | None = None
        self._cos = self._sin = torch.empty(0)

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """(T, heads, D) rotated by (1, T, D) tables."""
        half = x.shape[-1] // 2
        if self._of is not sin:
            self._of, self._cos = sin, cos[0][:, None]
            self._sin = torch.cat([-sin[0][:, None, :half], sin[0][:, None, half:]], -1)
        return (x * self._cos).add_(x.roll(half, -1).mul_(self._sin))


class _Layer:
    """The forward of one decoder layer."""

    def __init__(self, layer: Any, linears: HostLinears, rotation: _Rotation):
        attention, mlp = layer.self_attn, layer.mlp
        taken_before = isinstance(layer.forward, _Layer)  # by an earlier runner of the same twin
        self.plain = layer.forward.plain if taken_before else layer.forward
        self.rotation = rotation
        self.index: int = attention.layer_idx
        self.size: int = attention.head_dim
        self.norms = [_Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)]
        self.head_norms = [_Norm(n) for n in (getattr(attention, name, None) for name in ("q_norm", "k_norm")) if n]
        self.qkv, self.o = linears.of(attention.q_proj), linears.of(attention.o_proj)
        self.gate_up, self.down = linears.of(mlp.gate_proj), linears.of(mlp.down_proj)
        self.options: Options | None = None

    def __call__(self, hidden_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        layout = kwargs.get("verl_layout")
        if layout is None or self.options is None:
            return self.plain(hidden_states, *args, **kwargs)
        x = hidden_states[0]
        x = self.o.joined(self._attend(self.norms[0](x), kwargs["position_embeddings"], layout)).add_(x)
        gate, up = self.gate_up.joined(self.norms[1](x)).chunk(2, -1)
        return self.down.joined(F.silu(gate).mul_(up)).add_(x)[None]

    def _attend(self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], layout: Layout) -> torch.Tensor:
        """(T, H * D) outputs of the attention to (T, E)."""
        queries, keys, _ = self.qkv.sizes
        h, g = queries // self.size, keys // self.size
        heads = self.qkv.joined(x).view(len(x), h + 2 * g, self.size)
        turned, value = heads[:, : h + g], heads[:, h + g :]
        if self.head_norms:
            of_query, of_key = self.head_norms
            turned = torch.cat([of_query(turned[:, :h]), of_key(turned[:, h:])], 1)
        turned = self.rotation(turned, *tables)
        assert self.options is not None
        return layout.attend(self.index, turned[:, :h], turned[:, h:], value, self.options).reshape(len(x), queries)

    @torch.inference_mode()
    def agrees(self, rotary: nn.Module) -> bool:
        """Compare with the plain forward on a sample, and learn the attention's options from that."""
        weight = self.qkv.modules[0].weight
        if weight.dtype not in TOLERANCE:
            return False
        generator = torch.Generator().manual_seed(self.index)
        x = torch.randn(1, 3, weight.shape[1], generator=generator).to(weight.dtype)
        positions = torch.tensor([[5, 0, 9]])
        tables = rotary(x, positions)
        if not isinstance(tables, tuple) or tables[0].shape[-1] != self.size:
            return False
        plain, taken = _Sample(), _Sample()
        wanted = self.plain(x, position_embeddings=tables, position_ids=positions, verl_layout=plain)
        if not torch.is_tensor(wanted) or len(plain.seen) != 1:
            return False
        self.options = plain.seen[0][0]
        found = self(x, position_embeddings=tables, verl_layout=taken)
        pairs = zip((*plain.seen[0][1:], wanted - x), (*taken.seen[0][1:], found - x), strict=True)
        if all(_near(a, b, TOLERANCE[weight.dtype]) for a, b in pairs):
            return True
        self.options = None
        return False


class _Norm:
    """An RMS norm in one call."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.eps = getattr(module, "variance_epsilon", getattr(module, "eps", 0.0))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.module.weight
        if weight.dtype == torch.float32:
            return F.rms_norm(x, weight.shape, weight, self.eps)  # type: ignore[arg-type]
        return F.rms_norm(x, weight.shape, None, self.eps).mul_(weight)  # type: ignore[arg-type]


class _Sample(Layout):
    """An attention that only mixes what it is given, and keeps it."""

    def __init__(self) -> None:
        self.seen: list[tuple[Options, torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def attend(self, layer, query, key, value, options):
        self.seen.append((options, query, key, value))
        return query + value.repeat_interleave(query.shape[1] // value.shape[1], 1)


def _near(wanted: torch.Tensor, found: torch.Tensor, tolerance: float) -> bool:
    scale = float(wanted.float().abs().max())
    return wanted.shape == found.shape and float((wanted - found).float().abs().max()) <= tolerance * max(scale, 1e-6)


def _has_parts(layer: nn.Module, linears: HostLinears) -> bool:
    """The modules that are used here, and none other that has weights; linear layers in the products expected."""
    children = dict(layer.named_children())
    if set(children) != set(PARTS):
        return False
    attention, mlp = (dict(children[name].named_children()) for name in ("self_attn", "mlp"))
    groups = [[attention.get(name) for name in ("q_proj", "k_proj", "v_proj")], [attention.get("o_proj")]]
    groups += [[mlp.get(name) for name in ("gate_proj", "up_proj")], [mlp.get("down_proj")]]
    if not all(all(m is not None for m in group) and linears.together(group) for group in groups):  # type: ignore[arg-type]
        return False
    used = {m for group in groups for m in group}
    norms = [m for m in (*attention.values(), *mlp.values()) if m not in used and any(True for _ in m.parameters())]
    head_norms = [attention.get(name) for name in ("q_norm", "k_norm")]
    if norms and norms != head_norms:
        return False
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in layer.modules())
    numbers = all(hasattr(children["self_attn"], name) for name in ("layer_idx", "head_dim"))
    return numbers and not hooked and all(getattr(n, "weight", None) is not None for n in (*norms, *_norms(children)))


def _norms(children: dict[str, nn.Module]) -> list[nn.Module]:
    return [children["input_layernorm"], children["post_attention_layernorm"]]
