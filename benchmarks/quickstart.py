"""The quick start over several seeds: accuracy on unseen problems before and after, and the seconds it took.

    python benchmarks/quickstart.py --seeds 0 1 2 --algorithm grpo

Each run is a process of its own, started as a user would. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def run(seed: int, algorithm: str, steps: int, overrides: list[str]) -> dict[str, float]:
    """One quick start; its headline numbers."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        command = [sys.executable, "-m", "verl", "quickstart", "--seed", str(seed), "--algorithm", algorithm]
        command += ["--steps", str(steps), "--output", str(output), "trainer.save_final=false", *overrides]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    scores = [value for row in rows for name, value in row.items() if name.startswith("val-core/") and "mean@" in name]
    seconds = [row["timing_s/step"] for row in rows if "timing_s/step" in row]
    testing = sum(row.get("timing_s/testing", 0.0) for row in rows)
    return {
        "before": scores[0],
        "after": scores[-1],
        "training seconds": sum(seconds),
        "validation seconds": testing,
        "median step": statistics.median(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--algorithm", default="grpo")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    columns = ["before", "after", "training seconds", "validation seconds", "median step"]
    print("| algorithm | seed | " + " | ".join(columns) + " |")
    print("|" + "---|" * (len(columns) + 2))
    for seed in arguments.seeds:
        found = run(seed, arguments.algorithm, arguments.steps, arguments.overrides)
        cells = [f"{found[name]:.2f}" for name in columns]
        print(f"| {arguments.algorithm} | {seed} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
