"""What a node returned, read and checked: its keys, and its rows against the declared relation, by ids."""

from __future__ import annotations

from collections import Counter
from typing import Any

from verl.dataflow.node import IDENTITY, ROW_ID, STEP, Node
from verl.dataflow.rows import Part, RowSet, columns_of, natural, some, take
from verl.errors import DataflowError
from verl.metrics import Metrics
from verl.notices import notice
from verl.protocol import DataProto


def where(node: Node) -> str:
    """The node and its frame, for a message."""
    return f"node {node.name!r} (frame {node.frame!r}{'' if node.out == node.frame else f' → {node.out!r}'})"


def metrics_of(node: Node, result: Any) -> Metrics | None:
    """The metrics that came with a result, if any."""
    if isinstance(result, Metrics):
        return result
    metrics = result.meta_info.get("metrics") if isinstance(result, DataProto) else None
    if metrics is not None and not isinstance(metrics, Metrics):
        raise DataflowError(
            f"{where(node)} returned meta_info['metrics'] of type {type(metrics).__name__}; "
            "it must be a verl.metrics.Metrics, where every metric declares its reducer"
        )
    return metrics


def read_result(node: Node, result: Any, given: RowSet | None) -> tuple[Part | None, dict[str, Any]]:
    """Split one result of a call on the rows ``given`` into rows and step values.

    Raises DataflowError when it is of another type, or lacks a key, or has rows nobody can place.
    """
    if result is None or isinstance(result, Metrics):
        if node.given or node.gives_rows:
            got = "nothing" if result is None else "metrics only"
            raise DataflowError(f"{where(node)} returned {got}, but declares gives={[str(k) for k in node.given]}")
        return None, {}
    if not isinstance(result, DataProto):
        raise DataflowError(
            f"{where(node)} returned a {type(result).__name__}; a call returns a DataProto, a Future of one, or, with "
            "per_row=True, an iterator of DataProto pieces"
        )
    names = node.call_names(node.given, node.out)
    columns = columns_of(result)
    if not len(result) and node.relation.kind in ("subset", "pair"):  # without rows its columns may be unknown
        names = {n: k for n, k in names.items() if k.frame == STEP or n in columns}
    missing = [n for n, k in names.items() if n not in (result.meta_info if k.frame == STEP else columns)]
    if missing:
        raise DataflowError(
            f"{where(node)} did not return the key {missing[0]!r} that it gives; it returned "
            f"{', '.join(columns) or 'no columns'}; in meta_info: {', '.join(map(str, result.meta_info)) or 'nothing'}"
        )
    _notice_undeclared(node, columns, names)
    step_values = {key.name: result.meta_info[name] for name, key in names.items() if key.frame == STEP}
    if not node.gives_rows:
        return None, step_values
    rows = _rows_of(node, result, given)
    return Part(rows, {key.name: columns[name] for name, key in names.items() if key.frame != STEP}), step_values


def _notice_undeclared(node: Node, columns: dict[str, Any], names: dict[str, Any]) -> None:
    known = {*names, *node.call_names(node.needed, node.frame), *IDENTITY}
    extra = [name for name in columns if name not in known]
    if extra:
        notice(
            f"node {node.name!r} returned keys that its gives= lacks, they are dropped: {', '.join(extra)}",
            key=f"dataflow:{node.name}:undeclared",
        )


def _rows_of(node: Node, result: DataProto, given: RowSet) -> RowSet:
    """The identity of the rows in ``result``: its own columns, or for relation "same" the rows that were given."""
    id_column = ROW_ID[node.out]
    columns = result.non_tensor_batch
    if not len(result) and node.relation.kind in ("subset", "pair"):
        return RowSet((), ())
    if id_column not in columns:
        if node.relation.kind != "same":
            raise DataflowError(
                f"{where(node)} returned no {id_column!r} column, which relation {str(node.relation)!r} requires"
            )
        if len(result) != len(given):
            raise DataflowError(
                f"{where(node)} got {len(given)} rows ({some(given.ids)}) and returned {len(result)} without "
                f"{id_column!r}; relation 'same' gives every row back once"
            )
        return given
    ids = tuple(map(str, columns[id_column]))
    if node.relation.kind in ("same", "subset"):
        known = given.position
        strange = [row for row in ids if row not in known]
        if strange:
            raise DataflowError(f"{where(node)} returned rows that it was not given: {some(strange)}")
        return RowSet(ids, tuple(given.uids[known[row]] for row in ids))
    if "uid" not in columns:
        raise DataflowError(f"{where(node)} returned no 'uid' column, by which its rows join those of the prompt")
    uids = tuple(map(str, columns["uid"]))
    asked = set(given.uids)
    strange = [row for row, uid in zip(ids, uids, strict=True) if uid not in asked]
    if strange:
        raise DataflowError(f"{where(node)} returned rows of a uid that it was not given: {some(strange)}")
    return RowSet(ids, uids)


def settle(node: Node, part: Part, given: RowSet, expected: RowSet | None) -> Part:
    """Check all rows a node gave against its relation and put them in the order of the frame.

    ``given`` are the rows it took; ``expected`` are the rows that frame ``out`` has already, where it has any.
    """
    ids = part.rows.ids
    doubled = [row for row, count in Counter(ids).items() if count > 1]
    if doubled:
        raise DataflowError(f"{where(node)} returned rows twice: {some(doubled)}")
    kind = node.relation.kind
    if kind == "expand":
        _check_expand(node, part.rows, given)
    if kind in ("same", "aggregate"):
        wanted = given if kind == "same" else expected or _groups(given)
        lost = [row for row in wanted.ids if row not in part.rows.position]
        if lost:
            raise DataflowError(f"{where(node)} lost rows: {some(lost)}; relation {kind!r} gives every one of them")
        strange = [row for row in ids if row not in wanted.position]
        if strange:
            raise DataflowError(f"{where(node)} returned rows that its frame does not have: {some(strange)}")
        order = [part.rows.position[row] for row in wanted.ids]
    elif kind == "subset":
        order = sorted(range(len(ids)), key=lambda i: given.position[ids[i]])
    else:
        rank = {uid: i for i, uid in enumerate(dict.fromkeys(given.uids))}
        order = sorted(range(len(ids)), key=lambda i: (rank[part.rows.uids[i]], natural(ids[i], part.rows.uids[i])))
    return Part(part.rows.pick(order), {name: take(values, order) for name, values in part.columns.items()})


def _groups(rows: RowSet) -> RowSet:
    uids = tuple(dict.fromkeys(rows.uids))
    return RowSet(uids, uids)


def _check_expand(node: Node, rows: RowSet, given: RowSet) -> None:
    counts = Counter(rows.uids)
    wrong = [f"{uid} has {counts[uid]}" for uid in dict.fromkeys(given.uids) if counts[uid] != node.relation.n]
    if wrong:
        raise DataflowError(
            f"{where(node)} must return {node.relation.n} rows for each of the {len(given)} it took, but {some(wrong)}"
        )
