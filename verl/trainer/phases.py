"""Names of nodes in the dataflow and of phases in verl's metrics, and the seconds of each phase of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from verl.dataflow.executor import Span, StepResult, seconds_busy

PHASES = {
    "generate": "gen",
    "generate_greedy": "gen_greedy",
    "score": "reward",
    "score_greedy": "reward_greedy",
    "old_logp": "old_log_prob",
    "ref_logp": "ref",
    "advantage": "adv",
}


def phase_of(node: str) -> str:
    """``refill/generate`` → ``gen``: loops do not show, and nodes have their timing name."""
    name = node.rsplit("/", 1)[-1]
    return PHASES.get(name, name)


def phase_seconds(result: StepResult, *, loops: Sequence[str] = ()) -> dict[str, float]:
    """Seconds in which at least one call of each phase was running; a loop is told by what runs inside it."""
    spans: dict[str, list[Span]] = defaultdict(list)
    for span in result.spans:
        if span[0] not in loops:
            spans[phase_of(span[0])].append(span)
    return {phase: seconds_busy(found) for phase, found in spans.items()}
