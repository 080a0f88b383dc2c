"""Predicts the time of a training step on up to 1,024 GPUs, by placement, from measured phases and link speeds.

    python benchmarks/scale_model.py benchmarks/scale_model.json                      # weak scaling, a table
    python benchmarks/scale_model.py FILE --gpus 64 256 --sequences 8192 --json       # strong scaling

The file (see ``scale_model.json``):

- ``phases``: for gen, old_logp, ref, values, reward, update_actor and update_critic a list of points ``[sequences a
  GPU, seconds]``, measured on one GPU without communication. Between points a line, below the first one its time,
  beyond the last one in proportion to it. Leave out what a run does not have.
- ``model``: ``parameters``, ``live_bytes`` (a weight while computing), ``micro_batches`` and ``optimizer_steps`` of an
  update at the measured load, ``overlap`` (share of communication that hides behind computing; 0 is the worst case).
- ``links``: ``gpus_per_node``, ``inside`` and ``between`` (bytes a second and GPU, inside a node and between nodes),
  ``latency`` (s a hop), ``sent`` (bytes a second from the learners to the makers of one_step_off, through the
  controller: benchmarks/send_weights.py; left out: in a ring).
- ``controller``: ``seconds_a_sequence`` (benchmarks/controller_overhead.py), one process for all GPUs.

What it knows: rows split evenly; FSDP gathers the weights forward and backward in every micro-batch and scatters fp32
gradient sums once an optimizer step; entering the rollout gathers them once; a ring moves (k-1)/k of the bytes over the
slowest link it crosses. What it does not: stragglers, uneven lengths, congestion, failures.

Placements: ``colocated`` (all phases one after the other on all GPUs), ``separate`` (reference and critic have a share
of the GPUs each, so that their forward passes run beside the policy's, and the critic's update beside the policy's),
``one_step_off`` (``trainer.schedule=one_step_off``: a share of the GPUs, ``makers``, samples and scores the next batch
while the others train; weights are sent between two steps, and old log-probs are always computed: where ``old_logp``
was not measured, ``ref`` stands for it). The table takes the best of seven shares.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLACEMENTS = ("colocated", "separate", "one_step_off")
GRADIENT_BYTES = 4
GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Links:
    """Bytes a second for one GPU inside a node and between nodes, and seconds a hop."""

    gpus_per_node: int
    inside: float
    between: float
    latency: float = 0.0
    sent: float = 0.0

    def ring(self, total_bytes: float, gpus: int) -> float:
        """Seconds until every one of ``gpus`` has given or got its part of ``total_bytes`` in a ring."""
        if gpus == 1:
            return 0.0
        speed = self.inside if gpus <= self.gpus_per_node else self.between
        return total_bytes * (gpus - 1) / gpus / speed + (gpus - 1) * self.latency


@dataclass(frozen=True)
class Model:
    """What is moved: see the module."""

    parameters: float
    live_bytes: int = 2
    micro_batches: int = 1
    optimizer_steps: int = 1
    overlap: float = 0.0


@dataclass(frozen=True)
class Case:
    """Everything measured."""

    phases: dict[str, list[tuple[float, float]]]
    model: Model
    links: Links
    seconds_a_sequence: float = 0.0

    @staticmethod
    def load(path: str | Path) -> Case:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        phases = {name: [(float(x), float(y)) for x, y in points] for name, points in data["phases"].items()}
        controller = data.get("controller", {}).get("seconds_a_sequence", 0.0)
        return Case(phases, Model(**data["model"]), Links(**data["links"]), controller)

    def compute(self, phase: str, sequences: float) -> float:
        """Seconds of a phase with so many sequences on each GPU; 0 if the run has no such phase."""
        points = sorted(self.phases.get(phase, []))
        if not points or sequences == 0:
            return 0.0
        if sequences <= points[0][0]:
            return points[0][1]
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            if sequences <= x1:
                return y0 + (y1 - y0) * (sequences - x0) / (x1 - x0)
        return points[-1][1] * sequences / points[-1][0]

    def gather(self, gpus: int) -> float:
        """Every GPU gets all live weights once."""
        return self.links.ring(self.model.parameters * self.model.live_bytes, gpus)

    def forward(self, phase: str, sequences: float, gpus: int) -> float:
        """A pass without gradients over ``sequences`` in all."""
        return self._exposed(self.compute(phase, sequences / gpus), self.model.micro_batches * self.gather(gpus))

    def update(self, phase: str, sequences: float, gpus: int) -> float:
        """All optimizer steps of an update."""
        if phase not in self.phases:
            return 0.0
        model = self.model
        scatter = self.links.ring(model.parameters * GRADIENT_BYTES, gpus)
        moved = 2 * model.micro_batches * self.gather(gpus) + model.optimizer_steps * scatter
        return self._exposed(self.compute(phase, sequences / gpus), moved)

    def send(self, learners: int, gpus: int) -> float:
        """The learners' weights get to GPUs that only generate."""
        size = self.model.parameters * self.model.live_bytes
        if self.links.sent:
            return self.gather(learners) + size / self.links.sent
        return self.links.ring(size, gpus)

    def generate(self, sequences: float, gpus: int) -> float:
        return self.compute("gen", sequences / gpus)

    def _exposed(self, computing: float, moving: float) -> float:
        """Computing, and what of the communication does not hide behind it."""
        if computing == 0:
            return 0.0
        return computing + moving - min(moving * self.model.overlap, computing)


def predict(
    case: Case, gpus: int, sequences: float, placement: str = "colocated", share: float = 0.5
) -> dict[str, Any]:
    """Seconds of a step and of its phases.

    Args:
        sequences: of the whole step.
        share: of the GPUs that generate (one_step_off), or that reference and critic have together (separate).
    """
    controller = case.seconds_a_sequence * sequences
    if placement == "colocated":
        phases = _phases(case, sequences, gpus, gpus, gpus)
        step = sum(phases.values())
    elif placement == "separate":
        others = [name for name in ("ref", "values") if name in case.phases]
        own = max(1, math.floor(gpus * min(share, 0.5) / max(1, len(others)))) if others else 0
        main = gpus - own * len(others)
        if main < 1:
            raise ValueError(f"{gpus} GPUs are too few for {len(others)} pools beside the policy's")
        phases = _phases(case, sequences, main, own or main, own or main)
        before = max(phases["old_logp"], phases["ref"], phases["values"], phases["reward"])
        step = phases["reshard"] + phases["gen"] + before + max(phases["update_actor"], phases["update_critic"])
    elif placement == "one_step_off":
        makers = max(1, math.floor(gpus * share))
        learners = gpus - makers
        if learners < 1:
            raise ValueError("one_step_off needs two GPUs")
        phases = _phases(case, sequences, learners, learners, learners)
        phases["gen"] = case.generate(sequences, makers)
        if "old_logp" not in case.phases:
            phases["old_logp"] = case.forward("ref", sequences, learners)
        phases["reshard"] = case.send(learners, gpus)
        learn = sum(seconds for name, seconds in phases.items() if name not in ("gen", "reward", "reshard"))
        step = max(phases["gen"] + phases["reward"], learn) + phases["reshard"]
        phases["makers"] = makers
    else:
        raise ValueError(f"placement {placement!r}: there are {', '.join(PLACEMENTS)}")
    return {"gpus": gpus, "sequences": sequences, "placement": placement, "step": step + controller,
            "controller": controller, **phases}  # fmt: skip


def _phases(case: Case, sequences: float, main: int, reference: int, critic: int) -> dict[str, float]:
    return {
        "reshard": case.gather(main),
        "gen": case.generate(sequences, main),
        "old_logp": case.forward("old_logp", sequences, main),
        "ref": case.forward("ref", sequences, reference),
        "values": case.forward("values", sequences, critic),
        "reward": case.compute("reward", sequences / main),
        "update_critic": case.update("update_critic", sequences, critic),
        "update_actor": case.update("update_actor", sequences, main),
    }


def table(case: Case, gpus: tuple[int, ...], sequences: float | None, per_gpu: float) -> list[dict[str, Any]]:
    """A row for each number of GPUs and placement that it allows; ``efficiency`` is against one GPU."""
    alone = predict(case, 1, per_gpu if sequences is None else sequences)
    rows = []
    for count in gpus:
        for placement in PLACEMENTS:
            total = per_gpu * count if sequences is None else sequences
            shares = [i / 8 for i in range(1, 8)] if placement == "one_step_off" else [0.5]
            found = []
            for share in shares:
                with contextlib.suppress(ValueError):  # too few GPUs for it
                    found.append(predict(case, count, total, placement, share))
            if not found:
                continue
            row = min(found, key=lambda row: row["step"])
            ideal = alone["step"] * total / alone["sequences"] / count
            rows.append({**row, "efficiency": ideal / row["step"]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", help="measured phases and link speeds")
    parser.add_argument("--gpus", type=int, nargs="+", default=GPUS)
    parser.add_argument("--sequences", type=float, help="of a step, however many GPUs (default: --per-gpu)")
    parser.add_argument("--per-gpu", type=float, default=256, help="sequences a GPU and step")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = table(Case.load(arguments.file), tuple(arguments.gpus), arguments.sequences, arguments.per_gpu)
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    names = ("step s", "gen", "makers", "update", "reshard", "control", "eff.")
    print(f"{'GPUs':>5} {'placement':<13} {'sequences':>9} " + " ".join(f"{name:>8}" for name in names))
    for row in rows:
        makers, update = row.get("makers", row["gpus"]), row["update_actor"]
        print(
            f"{row['gpus']:>5} {row['placement']:<13} {row['sequences']:>9.0f} {row['step']:>8.2f} {row['gen']:>8.2f} "
            f"{makers:>8} {update:>8.2f} {row['reshard']:>8.3f} {row['controller']:>8.2f} {row['efficiency']:>8.0%}"
        )


if __name__ == "__main__":
    main()
