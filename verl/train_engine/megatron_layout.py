"""Where the weights of a Hugging Face model lie in the parameters of a Megatron model, whose matrices are cut.

Megatron joins the projections of queries, keys and values, head group by head group, and the two matrices in front of
the activation. Every rank holds the same share of each; so a rank's part of a Hugging Face matrix is a block of its
rows (or columns, where Megatron cuts the input side), and one parameter of Megatron's holds the parts of up to three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig

from verl.train_engine.megatron_grid import Grid, Stages
from verl.train_engine.spread import rows_per_rank

Part = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Place:
    """Where a rank's part of one Hugging Face weight lies.

    Attributes:
        parameter: name of the Megatron parameter.
        part: its view of a tensor of that parameter's shape (the parameter, its gradient, a moment); its elements are
            those of the part in order.
        cut: the dimension of the Hugging Face weight that is cut; None: every rank has the whole.
        stage: the stage of the pipeline that holds it; None: all do.
    """

    parameter: str
    part: Part
    cut: int | None
    stage: int | None = 0


def _all_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _half(number: int) -> Part:
    return lambda tensor: tensor.chunk(2)[number]


def _heads(per_group: int, head_size: int, start: int, stop: int) -> Part:
    """Of each group of heads (queries, then a key and a value head) those from ``start`` to ``stop``."""
    return lambda tensor: tensor.view(-1, per_group + 2, head_size, *tensor.shape[1:])[:, start:stop]


def places_of(
    module: nn.Module, head: nn.Module | None, config: PretrainedConfig, rank: int, size: int, stages: Stages
) -> dict[str, Place]:
    """The place of every weight of a Llama or Qwen2 model, by name, for ``rank`` of ``size``.

    Args:
        head: the head of a value model, of which every rank has all.
    """
    config = config.get_text_config()
    per_group = config.num_attention_heads // config.num_key_value_heads
    head_size = head_size_of(config)
    vocabulary = _vocabulary(config, rank, size)
    head_names = {id(p): f"head.{name}" for name, p in head.named_parameters()} if head is not None else {}
    last, end = stages.ranks - 1, f"chunks.{stages.chunks - 1}."
    found: dict[str, Place] = {}
    for name, p in module.named_parameters():
        plain = name[name.index("layers.") :] if "layers." in name else name.rsplit("model.", 1)[-1]
        if id(p) in head_names:
            found[name] = Place(head_names[id(p)], _all_of, None, None)
        elif plain == "embed_tokens.weight":
            found[name] = Place("chunks.0.embedding.word_embeddings.weight", vocabulary, 0)
        elif plain == "lm_head.weight":
            found[name] = Place(f"{end}output_layer.weight", vocabulary, 0, last)
        elif plain == "norm.weight":
            found[name] = Place(f"{end}decoder.final_layernorm.weight", _all_of, None, last)
        elif plain.startswith("layers."):
            _, number, inner = plain.split(".", 2)
            kind = inner.rsplit(".", 1)[1]
            heads = {"q": (0, per_group), "k": (per_group, per_group + 1), "v": (per_group + 1, per_group + 2)}
            short = inner.removeprefix("self_attn.").removeprefix("mlp.").rsplit(".", 1)[0]
            stage, chunk, place = stages.place(int(number))
            layer = f"chunks.{chunk}.decoder.layers.{place}."
            found[name] = replace(_in_layer(layer, short, kind, heads, per_group, head_size), stage=stage)
        else:
            raise KeyError(name)
    return found


def tied_output(places: Mapping[str, Place], stages: Stages) -> dict[str, Place]:
    """The input embedding again, on the last stage of a pipeline, whose output layer it is as well."""
    [name] = [name for name, place in places.items() if place.parameter.endswith("word_embeddings.weight")]
    place = replace(places[name], parameter=f"chunks.{stages.chunks - 1}.output_layer.weight", stage=stages.ranks - 1)
    return {name: place}


def _vocabulary(config: PretrainedConfig, rank: int, size: int) -> Part:
    step = rows_per_rank(config.vocab_size, size)
    rows = max(0, min(step, config.vocab_size - rank * step))
    return lambda tensor: tensor[:rows]


def _in_layer(
    layer: str, short: str, kind: str, heads: Mapping[str, tuple[int, int]], per_group: int, head_size: int
) -> Place:
    if short in ("q_proj", "k_proj", "v_proj"):
        start, stop = heads[short[0]]
        return Place(f"{layer}self_attention.linear_qkv.{kind}", _heads(per_group, head_size, start, stop), 0)
    return {
        "o_proj": Place(f"{layer}self_attention.linear_proj.{kind}", _all_of, 1),
        "gate_proj": Place(f"{layer}mlp.linear_fc1.{kind}", _half(0), 0),
        "up_proj": Place(f"{layer}mlp.linear_fc1.{kind}", _half(1), 0),
        "down_proj": Place(f"{layer}mlp.linear_fc2.{kind}", _all_of, 1),
        # of a mixture: every rank has all rows of its experts
        "gate": Place(f"{layer}mlp.router", _all_of, None),
        "experts": Place(f"{layer}mlp.{'fc1' if kind == 'gate_up_proj' else 'fc2'}", _all_of, 0),
        "input_layernorm": Place(f"{layer}input_layernorm.{kind}", _all_of, None),
        "post_attention_layernorm": Place(f"{layer}pre_mlp_layernorm.{kind}", _all_of, None),
    }[short]


def head_size_of(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


@dataclass(frozen=True)
class Layout:
    """How the weights of one model are cut over the ranks of a grid.

    Attributes:
        places: by the Hugging Face model's names.
        tied: further places of some.
        shapes: of the whole weights.
    """

    places: Mapping[str, Place]
    tied: Mapping[str, Place]
    shapes: Mapping[str, tuple[int, ...]]
    grid: Grid

    @property
    def rank(self) -> int:
        return self.grid.tensor.rank

    @property
    def size(self) -> int:
        return self.grid.tensor.world_size

    def here(self, place: Place) -> bool:
        """Whether this rank's stage holds it."""
        return place.stage in (None, self.grid.pipeline.rank)

    def held(self) -> Iterator[tuple[str, Place]]:
        """What this rank holds a part of; tied weights may come twice."""
        for places in (self.places, self.tied):
            yield from ((name, place) for name, place in places.items() if self.here(place))

    def block(self, name: str) -> tuple[int, int, int]:
        """(dimension, first, number) of this rank's rows or columns of a weight."""
        cut, shape = self.places[name].cut, self.shapes[name]
        if cut is None:
            return 0, 0, shape[0]
        step = rows_per_rank(shape[cut], self.size)
        first = min(self.rank * step, shape[cut])
        return cut, first, min(step, shape[cut] - first)

    def slot_rows(self, name: str) -> int:
        rows = self.shapes[name][0]
        return rows_per_rank(rows, self.size) * self.size if self.places[name].cut == 0 else rows

    def gather(self, name: str, tensor: torch.Tensor | None, slot: torch.Tensor) -> dist.Work | None:
        """Put the parts of all ranks of a copy together in ``slot``, of :meth:`slot_rows` rows.

        Args:
            tensor: of the shape of this rank's Megatron parameter, on any device; None if another stage holds it.
        """
        place, pipeline = self.places[name], self.grid.pipeline
        work = None
        if self.here(place):
            assert tensor is not None
            work = self.gather_stage(name, tensor, slot)
        if place.stage is None or pipeline.world_size == 1:
            return work
        if work is not None:
            work.wait()
        source = dist.get_global_rank(pipeline.group, place.stage)
        return dist.broadcast(slot, source, group=pipeline.group, async_op=True)

    def gather_stage(self, name: str, tensor: torch.Tensor, slot: torch.Tensor) -> dist.Work | None:
        """:meth:`gather` among the ranks of the stage that holds the weight."""
        place, shape = self.places[name], self.shapes[name]
        part, group = place.part(tensor), self.grid.tensor.group
        cut, first, number = self.block(name)
        if cut == 1:
            columns = torch.empty(self.size * shape[0], number, dtype=slot.dtype, device=slot.device)
            own = columns.narrow(0, self.rank * shape[0], shape[0])
            own.copy_(part)
            if self.size > 1:
                dist.all_gather_into_tensor(columns, own, group=group)
            slot.view(shape[0], self.size, number).copy_(columns.view(self.size, shape[0], number).transpose(0, 1))
            return None
        own = slot.narrow(0, first, number)
        own.view(part.shape).copy_(part, non_blocking=True)
        if place.cut is None or self.size == 1:
            return None
        step = len(slot) // self.size
        whole_own = slot.narrow(0, self.rank * step, step)
        return dist.all_gather_into_tensor(slot, whole_own, group=group, async_op=True)


def scatter(place: Place, value: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write this rank's block of a weight into a tensor of the shape of its Megatron parameter."""
    part = place.part(tensor)
    part.copy_(value.reshape(part.shape))
