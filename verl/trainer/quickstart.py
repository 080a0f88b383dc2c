"""``verl quickstart``: a small real model learns to add, in minutes, on whatever this machine is."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from verl.config.presets import PRESETS

HIGHEST = 10  # sums of two numbers from 1 to this; a quarter of the pairs is held out
STEPS = 40
SETTINGS: dict[str, Any] = {
    "data.train_batch_size": 8,
    "data.max_prompt_length": 64,
    "data.max_response_length": 4,
    "actor_rollout_ref.rollout.n": 8,
    "actor_rollout_ref.rollout.stop": ["\n"],
    "actor_rollout_ref.actor.optim.lr": 2e-5,
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "linear",
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    "critic.optim.lr": 2e-5,
    "trainer.project_name": "quickstart",
    "trainer.test_freq": 10,
    "trainer.log_val_generations": 4,
}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="verl quickstart",
        description="Watch a small language model learn arithmetic by reinforcement learning. Needs no data.",
        epilog="Any configuration override works too, for example actor_rollout_ref.actor.optim.lr=1e-5",
    )
    parser.add_argument("--model", metavar="PATH", help="folder or hub name (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps (default: {STEPS})")
    parser.add_argument("--algorithm", default="grpo", choices=sorted(PRESETS), help="default: grpo")
    parser.add_argument("--seed", type=int, default=42, help="of sampling and data order (default: 42)")
    parser.add_argument("--output", metavar="DIR", help="run folder (default: a new one under runs/)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="configuration overrides")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str]) -> int:
    """Run the quick start; the exit code."""
    arguments = parse(argv)
    from verl.config import load_config
    from verl.data import arithmetic_task
    from verl.trainer.smollm2 import model_folder

    folder = Path(arguments.output) if arguments.output else _new_folder(arguments.algorithm)
    values = {
        **SETTINGS,
        "algorithm.name": arguments.algorithm,
        "actor_rollout_ref.model.path": arguments.model or str(model_folder()),
        "trainer.total_training_steps": arguments.steps,
        "trainer.seed": arguments.seed,
        "trainer.experiment_name": folder.name,
        "trainer.default_local_dir": str(folder),
    }
    config = load_config(arguments.overrides, values=values)

    from verl.trainer.base import Trainer

    trainer = Trainer(
        config,
        train_rows=arithmetic_task("train", HIGHEST),
        validation_rows=arithmetic_task("validation", HIGHEST),
        style="live",
    )
    _introduce(trainer, folder)
    started = time.perf_counter()
    before, after = trainer.fit_with_scores()
    _conclude(trainer, folder, before, after, time.perf_counter() - started)
    return 0


def _new_folder(algorithm: str) -> Path:
    """``runs/quickstart-grpo-1``, or the first number that is free."""
    number = 1
    while (folder := Path("runs") / f"quickstart-{algorithm}-{number}").exists():
        number += 1
    return folder


def _introduce(trainer, folder: Path) -> None:
    about = trainer.describe()
    sizes = f"{len(trainer.plan.train)} problems to train on, {len(trainer.plan.validation)} held out"
    print(f"Model      {about['model']}, {about['parameters'] / 1e6:.0f}M parameters, {about['dtype']}")
    print(f"Device     {trainer.plan.choice.device.described}")
    print(f"Task       sums of two numbers up to {HIGHEST}: {sizes}")
    print(f"Run        {folder}", flush=True)


def _conclude(trainer, folder: Path, before: float | None, after: float | None, seconds: float) -> None:
    if before is not None and after is not None:
        print(f"Accuracy on the held-out problems: {before:.2f} before, {after:.2f} after ({seconds:.0f} s).")
    print(f"Checkpoint {folder / 'actor' / f'global_step_{trainer.global_steps}'}")
    print(f"Report     {folder / 'report.html'}")
    print(f"Metrics    {folder / 'metrics.jsonl'}, samples in {folder / 'samples.jsonl'}")
