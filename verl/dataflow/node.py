"""What a node of the dataflow declares: keys, frames of rows, the relation between rows in and out, and state.

A **frame** is a set of rows with an identity: ``prompt`` (column ``uid``), ``sample`` (``uid`` and ``sample_id``),
``pair`` (``uid`` and ``pair_id``) and ``step``, which has one row: plain values that travel in ``meta_info``. A **key**
is a column of one frame and is written ``frame/name``; without the frame it belongs to the frame of the node.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

CONTROLLER = "controller"  # the pool of nodes that name none
ROW_ID = {"prompt": "uid", "sample": "sample_id", "pair": "pair_id"}  # frame -> the column that identifies a row
STEP = "step"
FRAMES = (*ROW_ID, STEP)
IDENTITY = frozenset(ROW_ID.values())  # delivered to every call, so listing them in ``needs`` changes nothing
GLOBAL_STEP = "global_step"  # identity of the one row of frame "step"; every call finds it in ``meta_info``


class Key(NamedTuple):
    """A column ``name`` of the frame ``frame``."""

    frame: str
    name: str

    def __str__(self) -> str:
        return f"{self.frame}/{self.name}"


def parse_key(text: str, frame: str) -> Key:
    """``"prompt/ids"`` or, in the given default frame, ``"ids"``."""
    head, slash, tail = text.partition("/")
    return Key(head, tail) if slash else Key(frame, text)


def parse_keys(texts: Iterable[str], frame: str) -> tuple[Key, ...]:
    """Parse keys; identity columns are left out because every call receives and every frame has them anyway."""
    keys = (parse_key(text, frame) for text in texts)
    return tuple(k for k in keys if k.name not in IDENTITY and k != Key(STEP, GLOBAL_STEP))


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` when something known is spelled like ``name``, else nothing."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


@dataclass(frozen=True)
class Relation:
    """How the rows a node gives relate to the rows it takes. ``n`` counts for ``expand`` only."""

    kind: str
    n: int = 1

    def __str__(self) -> str:
        return f"expand({self.n})" if self.kind == "expand" else self.kind


# relation -> (frame it takes by default, frame it gives by default; None: the frame that it takes)
_DEFAULT_FRAMES: dict[str, tuple[str, str | None]] = {
    "same": ("sample", None),
    "subset": ("sample", None),
    "expand": ("prompt", "sample"),
    "pair": ("sample", "pair"),
    "aggregate": ("sample", "prompt"),
}
same = Relation("same")
subset = Relation("subset")
pair = Relation("pair")
aggregate = Relation("aggregate")


def expand(n: int) -> Relation:
    """``n`` rows for every row taken, each with the ``uid`` of its origin and a new, unique id."""
    return Relation("expand", n)


@dataclass(frozen=True)
class Node:
    """One step of the dataflow.

    Args:
        name: unique in the flow.
        call: ``call(batch, **params)``. ``batch`` is a DataProto with the needed keys and the identity columns only;
            step keys and ``global_step`` are in its ``meta_info``. It returns a DataProto with the keys of ``gives``
            and the identity columns (optional for relation "same": the order of rows is then the one given), or a
            ``concurrent.futures.Future`` of one, or, with ``per_row``, an iterator of such pieces. A node that gives
            nothing may return ``Metrics`` or None. ``meta_info["metrics"]`` joins the metrics of the step.
        needs: keys it takes. A prompt key needed by a node of another frame is joined by ``uid``.
        gives: keys it makes, in frame ``out`` or in ``step/``. A key has one giver in a flow.
        frame: frame of the rows it takes. Default by relation: ``sample``; for expand ``prompt``.
        out: frame of the rows it gives. Default: ``frame``; expand ``sample``, pair ``pair``, aggregate ``prompt``.
        relation: ``same``, ``subset``, ``pair``, ``aggregate`` (or their names) or ``expand(n)``.
        reads, writes: names of state such as ``actor.weights``.
        pool: where it runs; nodes of one pool run one at a time, in order. Default: ``controller``.
        per_row: it treats every row alone, so it may be called with some rows as soon as they exist.
        when: None or True (on), False (left out), or a pure function of the global step.
        params: further keyword arguments of ``call``.
        rename: ``{name in the call: key in the graph}``, for needs and gives, so that one method serves twice.
        ahead: it may run while the step before is being finished, see :class:`verl.dataflow.ahead.OneStepOff`.
    """

    name: str
    call: Callable[..., Any]
    needs: Sequence[str] = ()
    gives: Sequence[str] = ()
    frame: str | None = None
    out: str | None = None
    relation: Relation | str = same
    reads: Sequence[str] = ()
    writes: Sequence[str] = ()
    pool: str | None = None
    per_row: bool = False
    when: bool | Callable[[int], bool] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    rename: Mapping[str, str] = field(default_factory=dict)
    ahead: bool = False

    def __post_init__(self) -> None:
        relation = Relation(self.relation) if isinstance(self.relation, str) else self.relation
        takes, gives = _DEFAULT_FRAMES.get(relation.kind, ("sample", None))
        frame = self.frame or takes
        settled = {"relation": relation, "frame": frame, "out": self.out or gives or frame}
        settled["pool"] = self.pool or CONTROLLER
        for name, value in settled.items():
            object.__setattr__(self, name, value)

    @property
    def needed(self) -> tuple[Key, ...]:
        """``needs`` with their frames, identity columns left out."""
        return parse_keys(self.needs, self.frame)

    @property
    def given(self) -> tuple[Key, ...]:
        """``gives`` with their frames, identity columns left out."""
        return parse_keys(self.gives, self.out)

    @property
    def pools(self) -> frozenset[str]:
        return frozenset((self.pool,))

    @property
    def makes(self) -> tuple[str, ...]:
        """Frames whose rows this node brings into being (aggregate does so only where the frame is not there yet)."""
        return (self.out,) if self.relation.kind in ("expand", "pair") else ()

    @property
    def gives_rows(self) -> bool:
        """Whether the result has rows: columns of ``out``, or a choice of rows."""
        return self.relation.kind != "same" or any(key.frame != STEP for key in self.given)

    def call_names(self, keys: Iterable[Key], frame: str) -> dict[str, Key]:
        """Name inside the call -> key in the graph, through ``rename``."""
        renamed = {parse_key(key, frame): name for name, key in self.rename.items()}
        return {renamed.get(key, key.name): key for key in keys}

    def is_on(self, step: int) -> bool:
        return bool(self.when(step)) if callable(self.when) else self.when is not False

    def problems(self) -> list[str]:
        """What is wrong with this declaration alone, one sentence each."""
        who = f"node {self.name!r}"
        found = [
            f"{who}: {what} must be a list of names, not the string {value!r}"
            for what in ("needs", "gives", "reads", "writes")
            if isinstance(value := getattr(self, what), str)
        ]
        if found:
            return found
        if not callable(self.call):
            found.append(f"{who}: call must be callable, not {self.call!r}")
        frames = {self.frame, self.out, *(key.frame for key in (*self.needed, *self.given))}
        found += [
            f"{who}: unknown frame {frame!r}; there are {', '.join(FRAMES)}" for frame in sorted(frames - {*FRAMES})
        ]
        found += self._relation_problems(who)
        strays = sorted({str(k) for k in self.given if k.frame not in (self.out, STEP)})
        if strays:
            found.append(
                f"{who} gives {', '.join(strays)}, but its rows are of frame {self.out!r}: set out= to that frame"
            )
        return found + self._name_problems(who)

    def _relation_problems(self, who: str) -> list[str]:
        kind, frame, out = self.relation.kind, self.frame, self.out
        if kind not in _DEFAULT_FRAMES:
            return [f"{who}: unknown relation {kind!r}; there are {', '.join(_DEFAULT_FRAMES)}"]
        found = []
        if kind in ("same", "subset") and out not in (frame, STEP):
            found.append(f"{who}: relation {kind!r} keeps the frame, but frame is {frame!r} and out is {out!r}")
        if kind in ("expand", "pair") and (out == frame or STEP in (frame, out)):
            found.append(f"{who}: relation {kind!r} makes rows of another frame, but goes from {frame!r} to {out!r}")
        if kind == "aggregate" and (out != "prompt" or frame not in ("sample", "pair")):
            found.append(f"{who}: aggregate goes from sample or pair to prompt, not from {frame!r} to {out!r}")
        if kind == "subset" and STEP in (frame, out):
            found.append(f"{who}: a subset filters the rows of a frame; frame 'step' has no rows to filter")
        if kind == "expand" and (not isinstance(self.relation.n, int) or self.relation.n < 1):
            found.append(f"{who}: expand(n) needs a whole number of at least 1, not {self.relation.n!r}")
        if self.per_row and kind in ("pair", "aggregate"):
            found.append(f"{who}: per_row=True treats every row alone, but relation {kind!r} needs whole groups")
        if self.per_row and STEP in (frame, out):
            found.append(f"{who}: per_row=True needs a frame with rows, not 'step'")
        return found

    def _name_problems(self, who: str) -> list[str]:
        found = []
        graph_keys = {*self.needed, *self.given}
        for name, key in self.rename.items():
            if not {parse_key(key, self.frame), parse_key(key, self.out)} & graph_keys:
                found.append(f"{who}: rename maps {name!r} to {key!r}, which it neither needs nor gives")
        for what, keys, frame in (("needs", self.needed, self.frame), ("gives", self.given, self.out)):
            if len(self.call_names(keys, frame)) < len(set(keys)):
                found.append(
                    f"{who} {what} two keys of one name ({', '.join(map(str, keys))}): tell them apart with rename="
                )
            if len(set(keys)) < len(keys):
                found.append(f"{who}: {what} lists a key twice ({', '.join(map(str, keys))})")
        return found
