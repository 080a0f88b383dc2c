"""The predefined dispatch modes: split the arguments over ranks, collect the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from verl.errors import ConfigError, DataflowError
from verl.metrics import Metrics
from verl.protocol import DataProto, mark_padding_rows, pad_dataproto_to_divisor, padding_rows
from verl.single_controller.base.decorator import Dispatch, DispatchMode


class Sized(Protocol):
    """What a dispatch function needs of a worker group."""

    world_size: int


class SplittablePlan(Protocol):
    """What Dispatch.DP_PLAN needs of a plan."""

    def split(self, world_size: int) -> list[tuple[np.ndarray, Any]]:
        """For every rank the rows it gets (int64 indices into the batch) and its share of the plan."""
        ...


class Padding(NamedTuple):
    """Rows that dispatch added: how many, out of how many, and whether their ids say so."""

    rows: int
    total: int
    by_id: bool


class Split(NamedTuple):
    """Arguments by rank: ``args[i][rank]``, ``kwargs[name][rank]``. A dispatch function may return a plain
    ``(args, kwargs)`` tuple instead; with ``padding`` the group takes the added rows out of the collected value."""

    args: tuple[Sequence[Any], ...]
    kwargs: Mapping[str, Sequence[Any]]
    padding: Padding | None = None

    def of(self, rank: int) -> tuple[list[Any], dict[str, Any]]:
        return [values[rank] for values in self.args], {name: values[rank] for name, values in self.kwargs.items()}

    def check(self, world_size: int, method: str) -> Split:
        """Raise DataflowError unless every argument has one item per rank."""
        for name, values in [*enumerate(self.args), *self.kwargs.items()]:
            if not isinstance(values, (list, tuple)) or len(values) != world_size:
                size = len(values) if isinstance(values, (list, tuple)) else f"a {type(values).__name__}"
                raise DataflowError(
                    f"{method}: argument {name!r} must be a list with one item for each of the {world_size} ranks, "
                    f"got {size}"
                )
        return self


def _share(value: Any, world_size: int) -> list[Any]:
    """The same value for every rank; a DataProto gets a wrapper each, so that one rank's pop is not another's."""
    return [value.select() if isinstance(value, DataProto) else value for _ in range(world_size)]


def dispatch_one_to_all(group: Sized, *args: Any, **kwargs: Any) -> Split:
    """Everything to everybody."""
    return Split(
        tuple(_share(value, group.world_size) for value in args),
        {name: _share(value, group.world_size) for name, value in kwargs.items()},
    )


def dispatch_all_to_all(group: Sized, *args: Any, **kwargs: Any) -> Split:
    """The caller has split already: every argument is a list with one item per rank."""
    return Split(args, kwargs)


def dispatch_dp_proto(group: Sized, *args: Any, **kwargs: Any) -> Split:
    """Equal contiguous shares of every DataProto, padded as needed; anything else to everybody."""
    lengths = {len(value) for value in [*args, *kwargs.values()] if isinstance(value, DataProto)}
    if len(lengths) > 1:
        raise DataflowError(f"the DataProto arguments of one call have different row counts: {sorted(lengths)}")
    padding = None

    def split(value: Any) -> list[Any]:
        nonlocal padding
        if not isinstance(value, DataProto):
            return _share(value, group.world_size)
        padded, extra = pad_dataproto_to_divisor(value, group.world_size)
        padded = mark_padding_rows(padded, extra)
        if extra:
            by_id = bool(padding_rows(padded).any()) or (padding is not None and padding.by_id)
            padding = Padding(extra, len(padded), by_id)
        return padded.chunk(group.world_size)

    parts = tuple(split(value) for value in args)
    return Split(parts, {name: split(value) for name, value in kwargs.items()}, padding)


def dispatch_dp_plan(group: Sized, batch: DataProto, plan: SplittablePlan, *args: Any, **kwargs: Any) -> Split:
    """To each rank the rows and the share of the plan that the plan gives it. No padding: a plan balances itself."""
    shares = plan.split(group.world_size)
    if len(shares) != group.world_size:
        raise DataflowError(f"the plan was split into {len(shares)} shares for {group.world_size} ranks")
    everything = np.arange(len(batch))
    batches = [batch.select() if np.array_equal(rows, everything) else batch.select_idxs(rows) for rows, _ in shares]
    rest = dispatch_one_to_all(group, *args, **kwargs)
    return Split((batches, [plan for _, plan in shares], *rest.args), rest.kwargs)


def collect_all(group: Sized, outputs: list[Any]) -> list[Any]:
    """The list of results, rank by rank."""
    return outputs


def collect_rank_zero(group: Sized, outputs: list[Any]) -> Any:
    """The result of rank 0."""
    return outputs[0]


def collect_dp_proto(group: Sized, outputs: list[Any]) -> DataProto | None:
    """The concatenation; None if every rank returned None."""
    if all(output is None for output in outputs):
        return None
    _require_types(outputs, (DataProto,), "DP_COMPUTE_PROTO", "a DataProto (or all None)")
    return DataProto.concat(outputs)


def collect_dp_metric(group: Sized, outputs: list[Any]) -> Metrics:
    """All ranks' Metrics merged; a DataProto stands for its ``meta_info["metrics"]``.

    A rank must report its own share only: sums that were all-reduced before would count once per rank.
    """
    bags = [output.meta_info.get("metrics") if isinstance(output, DataProto) else output for output in outputs]
    _require_types(bags, (Metrics,), "DP_COMPUTE_METRIC", "Metrics, or a DataProto with them in its meta_info")
    return Metrics.merged(bags)


def collect_dp_plan(group: Sized, outputs: list[Any]) -> Metrics | DataProto | None:
    """Metrics merged, DataProtos concatenated, None if there is nothing."""
    if all(isinstance(output, Metrics) for output in outputs):
        return Metrics.merged(outputs)
    return collect_dp_proto(group, outputs)


def _require_types(values: list[Any], types: tuple[type, ...], mode: str, wanted: str) -> None:
    for rank, value in enumerate(values):
        if not isinstance(value, types):
            raise DataflowError(f"with Dispatch.{mode} a method must return {wanted}; rank {rank} gave {value!r:.80}")


def strip_padding(value: Any, padding: Padding | None) -> Any:
    """A collected value without the rows that dispatch added, of which nothing but a DataProto has any.

    Rows are known by their ids, where the input had any and the output kept them; otherwise by their place, the end,
    where each input row gives the same number of output rows.
    """
    if padding is None or not isinstance(value, DataProto) or not value.has_columns():
        return value
    if padding.by_id and {"uid", "sample_id"} & set(value.non_tensor_batch):
        added = padding_rows(value)
        return value.select_idxs(~added) if added.any() else value
    if len(value) % padding.total:
        raise DataflowError(
            f"{padding.rows} rows were added to make {padding.total}, and the ranks returned {len(value)} rows without "
            "uid or sample_id, so that the added ones cannot be told apart: keep the uid column in the result"
        )
    return value.slice(0, len(value) - padding.rows * (len(value) // padding.total))


_PREDEFINED: dict[DispatchMode, dict[str, Callable[..., Any]]] = {
    Dispatch.RANK_ZERO: {"dispatch_fn": dispatch_one_to_all, "collect_fn": collect_rank_zero},
    Dispatch.ONE_TO_ALL: {"dispatch_fn": dispatch_one_to_all, "collect_fn": collect_all},
    Dispatch.ALL_TO_ALL: {"dispatch_fn": dispatch_all_to_all, "collect_fn": collect_all},
    Dispatch.DP_COMPUTE: {"dispatch_fn": dispatch_all_to_all, "collect_fn": collect_all},
    Dispatch.DP_COMPUTE_PROTO: {"dispatch_fn": dispatch_dp_proto, "collect_fn": collect_dp_proto},
    Dispatch.DP_COMPUTE_METRIC: {"dispatch_fn": dispatch_dp_proto, "collect_fn": collect_dp_metric},
    Dispatch.DP_PLAN: {"dispatch_fn": dispatch_dp_plan, "collect_fn": collect_dp_plan},
}


def get_predefined_dispatch_fn(
    dispatch_mode: DispatchMode | Mapping[str, Callable[..., Any]],
) -> Mapping[str, Callable[..., Any]]:
    """``{"dispatch_fn", "collect_fn"}`` of a mode; a dict is returned as it is."""
    if not isinstance(dispatch_mode, DispatchMode):
        return dispatch_mode
    if dispatch_mode not in _PREDEFINED:
        raise ConfigError(f"there is no dispatch mode {dispatch_mode.name!r}: register_dispatch_mode adds one")
    return _PREDEFINED[dispatch_mode]


def register_dispatch_mode(name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]) -> DispatchMode:
    """Add ``Dispatch.<name>``."""
    if DispatchMode(name) in _PREDEFINED:
        raise ConfigError(f"dispatch mode {name!r} exists already: update_dispatch_mode replaces it")
    mode = DispatchMode(name)
    setattr(Dispatch, name, mode)
    _PREDEFINED[mode] = {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}
    return mode


def update_dispatch_mode(
    dispatch_mode: DispatchMode, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> None:
    """Replace the functions of an existing mode, for calls from now on."""
    if dispatch_mode not in _PREDEFINED:
        raise ConfigError(f"there is no dispatch mode {dispatch_mode!r} to update: register_dispatch_mode adds one")
    _PREDEFINED[dispatch_mode] = {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}
