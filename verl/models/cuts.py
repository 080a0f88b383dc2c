"""How the matrices of a Hugging Face model are cut over ranks that compute it together (tensor parallelism).

Shoeybi et al. 2019, arXiv:1909.08053. Matrices that widen (queries, keys, values, the first half of an MLP) are cut by
rows, so that a rank computes some of the heads; those that narrow again by columns, and their outputs are summed over
ranks. Which is which is said by the model's own config (``base_model_tp_plan`` of transformers). Embedding and output
layer are cut by rows of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from verl.errors import ModelError

ROWS, COLUMNS = "colwise", "rowwise"  # transformers names them by the transposed matrix
WHOLE = "replicated_with_grad_allreduce"
KEYS_AND_VALUES = ("k_proj", "v_proj")
NEEDED = ("q_proj", *KEYS_AND_VALUES)


class Region(NamedTuple):
    """Rows ``row`` to ``row + rows`` and columns ``column`` to ``column + columns`` of a matrix. A vector has one
    column; dimensions behind the second count as columns."""

    row: int
    rows: int
    column: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    def overlap(self, other: Region) -> Region:
        row, column = max(self.row, other.row), max(self.column, other.column)
        rows = min(self.row + self.rows, other.row + other.rows) - row
        columns = min(self.column + self.columns, other.column + other.columns) - column
        return Region(row, rows, column, columns) if rows > 0 and columns > 0 else Region(row, 0, column, 0)


def whole_region(shape: tuple[int, ...]) -> Region:
    columns = 1
    for size in shape[1:]:
        columns *= size
    return Region(0, shape[0], 0, columns)


def why_not_cut(config: Any, size: int) -> str | None:
    """Why a model with this Hugging Face config cannot be cut over ``size`` ranks; None if it can."""
    config = config.get_text_config()
    plan = getattr(config, "base_model_tp_plan", None) or {}
    kind = config.model_type
    strange = sorted(set(plan.values()) - {ROWS, COLUMNS, WHOLE})
    if strange:
        return f"models of the type '{kind}' are cut in ways that are not known here ({', '.join(strange)})"
    if not all(any(name.endswith(f".{wanted}") for name in plan) for wanted in NEEDED):
        return f"transformers knows no way to cut the attention of models of the type '{kind}'"
    heads = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    if heads % size:
        return f"{size} ranks do not divide its {heads} attention heads"
    if keys % size and size % keys:
        return f"{size} ranks and its {keys} key-value heads do not divide one another"
    inner = getattr(config, "intermediate_size", None) or size
    if inner % size:
        return f"{size} ranks do not divide its intermediate size {inner}"
    if -(-config.vocab_size // size) * (size - 1) >= config.vocab_size:
        return f"{size} ranks are too many for its {config.vocab_size} tokens"
    return None


@dataclass(frozen=True)
class _Cut:
    """How one weight is cut.

    Attributes:
        dim: the dimension that is cut; None: every rank has the whole.
        parts: different parts that there are; with fewer than ranks, neighbours have the same one.
        first_only: only the first rank has it, and it is 0 elsewhere (a bias that must be added once).
    """

    dim: int | None
    parts: int = 1
    first_only: bool = False


class Cuts:
    """The cut of ``model`` over ``size`` ranks.

    Attributes:
        rows, columns: names of the modules that are cut by output rows, and by input columns.
        embedding, head: names of the modules that are cut by vocabulary; ``head`` is None without an output layer.

    Raises:
        ModelError: the model cannot be cut, and why.
    """

    def __init__(self, model: PreTrainedModel, size: int):
        reason = why_not_cut(model.config, size)
        if reason is not None:
            raise ModelError(f"{type(model).__name__} cannot be cut over {size} ranks: {reason}")
        self.size = size
        config = model.config.get_text_config()
        self.heads: int = config.num_attention_heads
        self.keys: int = getattr(config, "num_key_value_heads", None) or self.heads
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        modules = {id(module): name for name, module in model.named_modules()}
        self.embedding = modules[id(model.get_input_embeddings())]
        head = model.get_output_embeddings()
        self.head = None if head is None else modules[id(head)]
        styles = dict(_planned(model, config.base_model_tp_plan))
        self.rows = [name for name, style in styles.items() if style == ROWS]
        self.columns = [name for name, style in styles.items() if style == COLUMNS]
        self._cuts = {name: self._cut_of(name) for name in self.shapes}
        self._check()

    def _cut_of(self, name: str) -> _Cut:
        owner, kind = name.rsplit(".", 1)
        if owner in (self.embedding, self.head):
            return _Cut(0, self.size)
        for module in self.rows:
            if owner == module or owner.startswith(f"{module}."):
                if ".lora_A" in owner:
                    return _Cut(None)
                few = module.rsplit(".", 1)[-1] in KEYS_AND_VALUES
                return _Cut(0, min(self.size, self.keys) if few else self.size)
        for module in self.columns:
            if owner == module or owner.startswith(f"{module}."):
                if ".lora_B" in owner:
                    return _Cut(None)
                return _Cut(None, first_only=True) if kind == "bias" else _Cut(1, self.size)
        return _Cut(None)

    def _check(self) -> None:
        for name, cut in self._cuts.items():
            shape = self.shapes[name]
            vocabulary = name.rsplit(".", 1)[0] in (self.embedding, self.head)
            if cut.dim is not None and not vocabulary and shape[cut.dim] % cut.parts:
                raise ModelError(f"The weight {name} {shape} cannot be cut into {cut.parts} equal parts.")

    def slot_shape(self, name: str) -> tuple[int, ...]:
        """What every rank needs for its part, padding of the last ranks' vocabulary included."""
        cut, shape = self._cuts[name], list(self.shapes[name])
        if cut.dim is not None:
            shape[cut.dim] = -(-shape[cut.dim] // cut.parts)
        return tuple(shape)

    def wanted(self, name: str, rank: int) -> Region:
        """The part of a weight that ``rank`` of ``size`` computes with; empty: it computes with zeros."""
        cut, whole = self._cuts[name], whole_region(self.shapes[name])
        if cut.first_only and rank:
            return whole._replace(rows=0)
        if cut.dim is None:
            return whole
        step, part = self.slot_shape(name)[cut.dim], rank * cut.parts // self.size
        if cut.dim == 1:
            return whole._replace(column=part * step, columns=step)
        first = min(part * step, whole.rows)
        return whole._replace(row=first, rows=min(step, whole.rows - first))


def _planned(model: PreTrainedModel, plan: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(name, style) of every module that the plan names, in the model's own names."""
    prefix = model.base_model_prefix
    base = f"{prefix}." if model.base_model is not model else ""
    for name, module in model.named_modules():
        if not name.startswith(base) or not isinstance(module, nn.Module):
            continue
        pattern = ".".join("*" if part.isdigit() else part for part in name.removeprefix(base).split("."))
        if pattern in plan:
            yield name, plan[pattern]
