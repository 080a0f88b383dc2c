"""A node that runs a whole flow again and again on further draws, until it has what it wants: refill, turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verl.dataflow.node import CONTROLLER, ROW_ID, STEP, Key, Relation, parse_keys, same
from verl.dataflow.rows import columns_of, identity_of, some
from verl.errors import DataflowError
from verl.metrics import Metrics
from verl.notices import notice
from verl.protocol import DataProto

if TYPE_CHECKING:
    from verl.dataflow.executor import StepResult, StepRun, Task
    from verl.dataflow.flow import Dataflow

Frames = dict[str, DataProto]


def _bare(batch: DataProto) -> DataProto:
    return DataProto(batch=batch.batch, non_tensor_batch=dict(batch.non_tensor_batch), meta_info={})


def _uids(batch: DataProto) -> list[str]:
    return [str(uid) for uid in batch.non_tensor_batch["uid"]]


def _with_uids(frames: Frames, uids: set[str]) -> Frames:
    return {f: b.select_idxs([i for i, uid in enumerate(_uids(b)) if uid in uids]) for f, b in frames.items()}


@dataclass
class _Pile:
    """What was gathered: frames in draw order, and for each group the versions of the state it was made with."""

    frames: Frames = field(default_factory=dict)
    versions: dict[str, dict[str, int]] = field(default_factory=dict)  # uid -> state -> version; in draw order

    def add(self, frames: Frames, versions: Mapping[str, int], who: str) -> None:
        uids = _uids(frames["prompt"])
        again = [uid for uid in uids if uid in self.versions]
        if again:
            raise DataflowError(f"{who}: the source drew prompts whose uid is there already: {some(again)}")
        self.versions.update({uid: dict(versions) for uid in uids})
        for frame, batch in frames.items():
            mine = self.frames.get(frame)
            self.frames[frame] = _bare(batch) if mine is None else DataProto.concat([mine, _bare(batch)])

    def part(self, uids: Sequence[str]) -> _Pile:
        return _Pile(_with_uids(self.frames, set(uids)), {uid: self.versions[uid] for uid in uids})


class Loop:
    """Runs ``body`` on draws of prompts until ``until``, then hands on ``take`` groups in draw order.

    A group is a prompt with the rows that the body's filters left of it; a prompt with none is no group.

    Args:
        name: unique in the flow.
        body: a Dataflow whose row input is frame ``prompt``. Its step inputs are needed from the flow around.
        source: ``source(k)`` gives the prompts of the k-th draw of this step (from 0), or None when there are no more.
            If the flow around has frame ``prompt`` among its inputs, the batch of the step is draw 0 and always used.
        until: ``until(frames)`` says whether what was gathered is enough (default: ``take`` groups are).
        limit: the most draws in one step.
        gives: keys of the body (``prompt/…``, or of frame sample) that the flow around sees.
        carry: what becomes of surplus groups. ``"save"``: used first in the next step, and part of ``state_dict()``;
            ``"drop"``: dropped and counted. Saved rows were made with older weights, so the flow must declare the
            staleness it bears; saved groups that grew older are dropped and counted.
        take: how many groups are wanted; None takes all.
        on_limit: when the limit or the end of the source comes first: ``"error"``, or ``"smaller"``: go on with
            fewer groups and a notice.
        remedy: what the error tells the user to do, in the words of the options that they have.
        when, ahead: as for a Node.
    """

    per_row = False
    frame = "prompt"
    out = "prompt"
    relation: Relation = same

    def __init__(
        self,
        name: str,
        body: Dataflow,
        source: Callable[[int], DataProto | None],
        until: Callable[[Frames], bool] | None = None,
        limit: int = 10,
        gives: Sequence[str] = (),
        carry: str = "drop",
        take: int | None = None,
        on_limit: str = "error",
        when: bool | Callable[[int], bool] | None = None,
        ahead: bool = False,
        remedy: str = "raise limit, draw larger batches, filter less, or set on_limit='smaller' to go on with fewer",
    ) -> None:
        self.name, self.body, self.source, self.until, self.limit = name, body, source, until, limit
        self.gives, self.carry, self.take, self.on_limit, self.when = tuple(gives), carry, take, on_limit, when
        self.ahead, self.remedy = ahead, remedy
        self._saved = _Pile()
        self._left = self._saved  # what is saved once the step is committed

    # ---- what the graph asks -----------------------------------------------------------------------------------

    @property
    def needed(self) -> tuple[Key, ...]:
        return tuple(key for key in self.body.input_keys if key.frame == STEP)

    @property
    def given(self) -> tuple[Key, ...]:
        return parse_keys(self.gives, "sample")

    @property
    def makes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(["prompt", *(key.frame for key in self.given)]))

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(state for node in self.body.nodes for state in node.reads))

    @property
    def writes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(state for node in self.body.nodes for state in node.writes))

    @property
    def pools(self) -> frozenset[str]:
        return frozenset((CONTROLLER, *(pool for node in self.body.nodes for pool in node.pools)))

    def is_on(self, step: int) -> bool:
        return bool(self.when(step)) if callable(self.when) else self.when is not False

    def problems(self) -> list[str]:
        who = f"loop {self.name!r}"
        found = [f"{who}: {p}" for p in self.body.problems(outputs=self.given)]
        if {*self.body.inputs} - {STEP} != {"prompt"}:
            found.append(f"{who}: its body must have frame 'prompt', and no other rows, as its input")
        if self.take is None and self.until is None:
            found.append(f"{who} would never know when to stop: give take= (groups) or until=")
        for what, value in (("limit", self.limit), ("take", self.take)):
            if not (what == "take" and value is None) and (not isinstance(value, int) or value < 1):
                found.append(f"{who}: {what} must be a whole number of at least 1, not {value!r}")
        for what, value, allowed in (
            ("carry", self.carry, ("save", "drop")),
            ("on_limit", self.on_limit, ("error", "smaller")),
        ):
            if value not in allowed:
                found.append(f"{who}: {what} is {value!r}; it is one of {', '.join(map(repr, allowed))}")
        strays = sorted({str(key) for key in self.given if key.frame not in ROW_ID})
        if strays:
            found.append(f"{who} gives {', '.join(strays)}; a loop gives rows of {', '.join(ROW_ID)}")
        return found

    def carry_problems(self, flow: Dataflow) -> list[str]:
        """Saved rows are one step old at least: a flow that trains the state they were made with must allow it."""
        if self.carry != "save":
            return []
        written = {state for node in flow.nodes for state in node.writes}
        return [
            f"loop {self.name!r} saves rows that were made with an older {state!r}: declare staleness={{{state!r}: 1}} "
            "for the flow (and correct for it), or carry='drop'"
            for state in self.reads
            if state in written and flow.staleness.get(state, 0) < 1
        ]

    # ---- running -------------------------------------------------------------------------------------------------

    def run(self, run: StepRun, task: Task) -> None:
        """Gather the groups of this step and store their rows. Called by the executor."""
        start = time.perf_counter()
        metrics = Metrics()
        pile = self._fresh(run, metrics)
        drawn = self._gather(pile, run, task, metrics)
        uids = list(pile.versions)
        wanted = len(uids) if self.take is None else self.take
        kept, surplus = pile.part(uids[:wanted]), pile.part(uids[wanted:])
        self._left = surplus if self.carry == "save" else _Pile()
        label = "groups_saved" if self.carry == "save" else "groups_dropped"
        for what, number in (("draws", drawn), ("groups", len(kept.versions)), (label, len(surplus.versions))):
            metrics.add(f"{self.name}/{what}", number, reduce="sum")
        self._store(kept.frames, run)
        task.metrics = metrics
        task.emitted = [(uid, uid) for uid in kept.versions]
        task.spans.append((run.prefix + self.name, start, time.perf_counter()))

    def commit(self) -> None:
        """The step has succeeded: what it left is what the next one starts from."""
        self._saved = self._left

    def _fresh(self, run: StepRun, metrics: Metrics) -> _Pile:
        """Saved groups that are not too old for this step."""
        versions = self._saved.versions
        good = [u for u, made in versions.items() if all(v >= run.floor.get(state, v) for state, v in made.items())]
        if len(good) < len(versions):
            metrics.add(f"{self.name}/groups_too_old", len(versions) - len(good), reduce="sum")
        return self._saved.part(good)

    def _enough(self, pile: _Pile) -> bool:
        if self.take is not None and len(pile.versions) < self.take:
            return False
        return bool(pile.versions) and (self.until is None or bool(self.until(dict(pile.frames))))

    def _gather(self, pile: _Pile, run: StepRun, task: Task, metrics: Metrics) -> int:
        drawn = 0
        fed = run.feed.get("prompt")
        while fed is not None or not self._enough(pile):
            draw, fed = (fed, None) if fed is not None else (self._draw(drawn), None)
            if draw is None:
                self._fall_short(pile, run, drawn)
                break
            drawn += 1
            made_with = {state: run.versions[state] for state in self.reads}
            result = self._run_body(draw, run, task)
            metrics.merge(result.metrics)
            self._check_gives(result)
            if len(result.frames["prompt"]):
                pile.add(result.frames, made_with, f"loop {self.name!r}")
        return drawn

    def _draw(self, number: int) -> DataProto | None:
        return self.source(number) if number < self.limit else None

    def _run_body(self, draw: DataProto, run: StepRun, task: Task) -> StepResult:
        with run.cond:
            values = {key.name: run.store.values[key.name] for key in self.needed}
        body = self.body.start(
            {"prompt": draw},
            run.store.step,
            run.executor,
            values=values,
            versions=run.versions,
            floor=run.floor,
            on_event=run.on_event,
            allow_empty=True,
            cancel=run.cancel,
            prefix=f"{run.prefix}{self.name}/",
        )
        task.spans += body.spans
        return body

    def _check_gives(self, result: StepResult) -> None:
        for key in self.given:
            there = columns_of(result.frames[key.frame]) if key.frame in result.frames else {}
            if key.name not in there and len(result.frames.get(key.frame, ())):
                raise DataflowError(f"loop {self.name!r} gives {key}, which its body did not make")

    def _fall_short(self, pile: _Pile, run: StepRun, drawn: int) -> None:
        ended = f"when its source ended after {drawn} draws"
        reason = f"after its limit of {self.limit} draws" if drawn >= self.limit else ended
        have = f"{len(pile.versions)} groups" + (f" of {self.take}" if self.take is not None else "")
        if self.on_limit == "error" or not pile.versions:
            raise DataflowError(
                f"loop {self.name!r} (frame 'prompt') has {have} {reason} in step {run.store.step}: "
                + (self.remedy if self.on_limit == "error" else "no group is left to go on with; filter less")
            )
        notice(f"step {run.store.step}: loop {self.name!r} has {have} {reason}; going on with a smaller batch")

    def _store(self, frames: Frames, run: StepRun) -> None:
        epoch = run.plan.epoch[self.name]
        with run.cond:
            for frame in self.makes:
                run.store.make_frame(frame, identity_of(frames[frame], frame, f"loop {self.name!r}"), epoch)
            for key in self.given:
                run.store.put(key, columns_of(frames[key.frame])[key.name], epoch)

    # ---- resume --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The saved groups: frames of rows, and uid -> state -> version."""
        return {"frames": dict(self._saved.frames), "versions": {u: dict(v) for u, v in self._saved.versions.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._saved = _Pile(dict(state["frames"]), {u: dict(v) for u, v in state["versions"].items()})
        self._left = self._saved
