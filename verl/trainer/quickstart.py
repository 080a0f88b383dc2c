"""``verl quickstart``: a small real model learns to add, in minutes, on whatever this machine is."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from verl.cli.arguments import Arguments, count
from verl.config.presets import PRESETS
from verl.errors import ConfigError
from verl.language import language
from verl.trainer.quickstart_texts import TEXTS

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
    texts = TEXTS[language(argv, os.environ)]
    parser = Arguments(prog="verl quickstart", description=texts["description"], epilog=texts["epilog"])
    parser.add_argument("--model", metavar="PATH", help=texts["model"])
    parser.add_argument("--steps", type=count, default=STEPS, help=texts["steps"].format(steps=STEPS))
    parser.add_argument("--algorithm", choices=sorted(PRESETS), help=texts["algorithm"])
    parser.add_argument("--seed", type=int, default=42, help=texts["seed"])
    parser.add_argument("--output", metavar="DIR", help=texts["output"])
    parser.add_argument("--lang", metavar="LANGUAGE", help=texts["lang"])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=texts["overrides"])
    return parser.parse_intermixed_args(argv)


def main(argv: list[str]) -> int:
    """Run the quick start; the exit code."""
    arguments = parse(argv)
    from verl.config import load_config
    from verl.data import arithmetic_task
    from verl.trainer.smollm2 import model_folder

    algorithm = _algorithm(arguments)
    folder = Path(arguments.output) if arguments.output else _new_folder(algorithm)
    values = {
        **SETTINGS,
        "algorithm.name": algorithm,
        "actor_rollout_ref.model.path": arguments.model or str(model_folder()),
        "trainer.total_training_steps": arguments.steps,
        "trainer.seed": arguments.seed,
        "trainer.experiment_name": folder.name,
        "trainer.default_local_dir": str(folder),
    }
    config = load_config(arguments.overrides, values=values)

    from verl.trainer.base import Trainer

    texts = TEXTS[language(argv, os.environ)]
    print(texts["loading"].format(model=Path(config.actor_rollout_ref.model.path).name), flush=True)
    trainer = Trainer(
        config,
        train_rows=arithmetic_task("train", HIGHEST),
        validation_rows=arithmetic_task("validation", HIGHEST),
        style="live",
    )
    _introduce(trainer, folder, texts)
    started = time.perf_counter()
    before, after = trainer.fit_with_scores()
    _conclude(trainer, folder, (before, after), time.perf_counter() - started, texts)
    return 0


def _algorithm(arguments: argparse.Namespace) -> str:
    """The option, or an override that says the same.

    Raises:
        ConfigError: both are there and differ, or the override names what cannot learn this task.
    """
    from verl.config.overrides import algorithm_given

    key, name = algorithm_given(arguments.overrides) or ("--algorithm", arguments.algorithm or "grpo")
    if arguments.algorithm not in (None, name):
        raise ConfigError(f"--algorithm {arguments.algorithm} and {key}={name} name two algorithms: give one of them")
    if name not in PRESETS:
        raise ConfigError(f"{key}={name} cannot learn the quick start's sums; there are {', '.join(sorted(PRESETS))}")
    return name


def _new_folder(algorithm: str) -> Path:
    """``runs/quickstart-grpo-1``, or the first number that is free."""
    number = 1
    while (folder := Path("runs") / f"quickstart-{algorithm}-{number}").exists():
        number += 1
    return folder


def _introduce(trainer, folder: Path, texts: dict[str, str]) -> None:
    about = trainer.describe()
    train, held_out = len(trainer.plan.train), len(trainer.plan.validation)
    print(texts["intro_model"].format(**about, millions=about["parameters"] / 1e6))
    print(texts["intro_device"].format(device=trainer.plan.choice.device.described))
    print(texts["intro_task"].format(highest=HIGHEST, train=train, held_out=held_out))
    print(texts["intro_run"].format(folder=folder), flush=True)


def _conclude(
    trainer, folder: Path, scores: tuple[float | None, float | None], seconds: float, texts: dict[str, str]
) -> None:
    before, after = scores
    if before is not None and after is not None:
        print(texts["accuracy"].format(before=before, after=after, seconds=seconds))
    print(texts["checkpoint"].format(path=folder / "actor" / f"global_step_{trainer.global_steps}"))
    print(texts["report"].format(path=folder / "report.html"))
    print(texts["metrics"].format(metrics=folder / "metrics.jsonl", samples=folder / "samples.jsonl"))
