"""The named flows of a run, with one set of state versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from verl.dataflow.executor import OnEvent, StepResult
from verl.dataflow.flow import Batch, Dataflow
from verl.errors import DataflowError


class FlowSet:
    """The named flows of a run: ``train``, ``validate``, ``preview``. Of a list of flows, ``choose`` picks one a step.

    All share one set of versions. ``choose(step)`` is a pure function of the global step that gives an index.
    """

    READ_ONLY = ("validate", "preview")

    def __init__(
        self, flows: Mapping[str, Dataflow | Sequence[Dataflow]], choose: Callable[[int], int] | None = None
    ) -> None:
        self.flows = {name: (f,) if isinstance(f, Dataflow) else tuple(f) for name, f in flows.items()}
        self.choose = choose
        self.versions: dict[str, int] = {}
        for flow in self._each():
            self.versions |= {s: max(v, self.versions.get(s, 0)) for s, v in flow.versions.items()}
        for flow in self._each():
            flow.versions = self.versions

    def _each(self) -> Iterable[Dataflow]:
        return (flow for flows in self.flows.values() for flow in flows)

    def validate(self, steps: Iterable[int] = range(257)) -> FlowSet:
        """Check every flow, and that validation and preview write nothing; all problems in one DataflowError."""
        steps = list(steps)
        found = [
            f"flow {name!r}: {p}" for name, flows in self.flows.items() for f in flows for p in f.problems(steps=steps)
        ]
        for name in self.READ_ONLY:
            for node in (node for flow in self.flows.get(name, ()) for node in flow.nodes if node.writes):
                found.append(
                    f"flow {name!r}: node {node.name!r} writes {', '.join(node.writes)}; {name} changes nothing"
                )
        for name, flows in self.flows.items():
            if not flows:
                found.append(f"flow {name!r} is an empty list")
            elif len(flows) > 1 and self.choose is None:
                found.append(f"flow {name!r} is one of {len(flows)}: give choose=, a function of the global step")
            elif len(flows) > 1:
                wrong = [step for step in steps if self.choose(step) not in range(len(flows))]
                found += [
                    f"flow {name!r}: choose({s}) gives {self.choose(s)!r}, not 0 to {len(flows) - 1}" for s in wrong[:1]
                ]
        if found:
            raise DataflowError("\n  - ".join([f"{len(found)} problems in the flows:", *found]))
        for flow in self._each():
            flow.validate(steps)
        return self

    def flow(self, name: str, step: int) -> Dataflow:
        """The flow of this name at this step."""
        if name not in self.flows:
            raise DataflowError(f"there is no flow {name!r}; there are {', '.join(self.flows)}")
        flows = self.flows[name]
        return flows[0] if len(flows) == 1 or self.choose is None else flows[self.choose(step)]

    def run(
        self, name: str, batch: Batch, step: int, executor: str = "concurrent", on_event: OnEvent | None = None
    ) -> StepResult:
        return self.flow(name, step).run(batch, step, executor, on_event)
