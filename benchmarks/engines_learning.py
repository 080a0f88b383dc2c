"""The same training run with each rollout engine, over several seeds: do they learn alike?

    python benchmarks/engines_learning.py --engines native vllm hf --seeds 0 1 2 --folder runs/engines

The quick start's task (sums of two numbers, SmolLM2-135M, GRPO, 8 prompts x 8 responses a step), each run a process of
its own, one after the other. Engines share every setting, the prompts and the seeds of requests; native and hf also
share the noise that those seeds give, vLLM has its own. A run whose metrics lie in ``--folder`` already is not made
again, so an interrupted table can be finished. Prints Markdown:

* for every engine and seed: accuracy on unseen sums before and after, the mean score of the last five steps, the
  largest difference of a token's probability between engine and trainer, seconds of generation and of the whole step
  (medians);
* the learning curves: mean score over blocks of steps, mean and standard deviation over seeds;
* how far the engines' means over seeds are from the first engine's, in standard errors of that difference.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

SCORE = "critic/score/mean"


def run(engine: str, seed: int, args: argparse.Namespace) -> list[dict[str, float]]:
    """The metrics of one run, a row a step."""
    output = args.folder / f"{engine}-{seed}-{args.steps}"
    metrics, done = output / "metrics.jsonl", output / "done"
    if not done.exists():
        command = [sys.executable, "-m", "verl", "quickstart", "--seed", str(seed), "--steps", str(args.steps)]
        command += ["--output", str(output), "trainer.save_final=false"]
        command += [f"actor_rollout_ref.rollout.name={engine}", "actor_rollout_ref.rollout.strict=true"]
        shutil.rmtree(output, ignore_errors=True)  # of a run that was stopped
        started = time.perf_counter()
        subprocess.run([*command, *args.overrides], check=True, stdout=subprocess.DEVNULL)
        print(f"{engine}, seed {seed}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        done.touch()
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def numbers(rows: list[dict[str, float]]) -> dict[str, float]:
    scores = [value for row in rows for name, value in row.items() if name.startswith("val-core/") and "mean@" in name]
    trained = [row for row in rows if SCORE in row]
    return {
        "before": scores[0],
        "after": scores[-1],
        "last score": statistics.mean(row[SCORE] for row in trained[-5:]),
        "probability gap": max(row.get("training/rollout_probs_diff_max", 0.0) for row in trained),
        "generation s": statistics.median(row["timing_s/gen"] for row in trained),
        "step s": statistics.median(row["timing_s/step"] for row in trained),
    }


def curve(rows: list[dict[str, float]], block: int) -> list[float]:
    scores = [row[SCORE] for row in rows if SCORE in row]
    return [statistics.mean(scores[i : i + block]) for i in range(0, len(scores), block)]


def spread(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def table(columns: list[str], rows: list[list[str]]) -> None:
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print(flush=True)


def report(found: dict[str, list[list[dict[str, float]]]], args: argparse.Namespace) -> None:
    each = {engine: [numbers(rows) for rows in runs] for engine, runs in found.items()}
    columns = list(next(iter(each.values()))[0])
    table(
        ["engine", "seed", *columns],
        [
            [engine, str(seed), *(f"{one[name]:.2g}" if "gap" in name else f"{one[name]:.2f}" for name in columns)]
            for engine, runs in each.items()
            for seed, one in zip(args.seeds, runs, strict=True)
        ],
    )
    blocks = range(0, args.steps, args.block)
    curves = {engine: [curve(rows, args.block) for rows in runs] for engine, runs in found.items()}
    table(
        ["engine", *(f"steps {i + 1}-{min(i + args.block, args.steps)}" for i in blocks), "accuracy after"],
        [
            [
                engine,
                *(_mean_and_spread([one[k] for one in runs]) for k in range(len(blocks))),
                _mean_and_spread([one["after"] for one in each[engine]]),
            ]
            for engine, runs in curves.items()
        ],
    )
    first, *others = found
    table(
        [f"against {first}", "score of all steps", "accuracy after"],
        [
            [
                engine,
                _apart(_overall(curves[engine]), _overall(curves[first])),
                _apart([one["after"] for one in each[engine]], [one["after"] for one in each[first]]),
            ]
            for engine in others
        ],
    )


def _overall(runs: list[list[float]]) -> list[float]:
    return [statistics.mean(one) for one in runs]


def _mean_and_spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f} ± {spread(values):.3f}"


def _apart(here: list[float], there: list[float]) -> str:
    """The difference of two means over seeds, and how many standard errors of it that is."""
    gap = statistics.mean(here) - statistics.mean(there)
    error = math.sqrt(spread(here) ** 2 / len(here) + spread(there) ** 2 / len(there))
    return f"{gap:+.3f} ({abs(gap) / error:.1f} standard errors)" if error else f"{gap:+.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["native", "vllm", "hf"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--block", type=int, default=5, help="steps in a column of the curves")
    parser.add_argument("--folder", type=Path, default=Path("runs/engines"), help="where the runs are kept")
    parser.add_argument("overrides", nargs="*", help="key=value, for every run")
    args = parser.parse_intermixed_args()
    # seeds outside: what there is when it is stopped has every engine
    found: dict[str, list[list[dict[str, float]]]] = {engine: [] for engine in args.engines}
    for seed in args.seeds:
        for engine in args.engines:
            found[engine].append(run(engine, seed, args))
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {args.steps} steps\n")
    report(found, args)


if __name__ == "__main__":
    main()
