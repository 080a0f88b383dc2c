"""``python -m verl.trainer.main_ppo key=value …`` and ``verl train key=value …``: train by the configuration."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from verl.cli.arguments import Arguments
from verl.cli.run import run_cli

if TYPE_CHECKING:
    from verl.trainer.base import Trainer

EPILOG = """At least data.train_files=FILE and actor_rollout_ref.model.path=MODEL are needed; docs/config.md lists the
keys. A name (verl train grpo, ppo, dapo, dpo, kto, sft, rm, ...) sets those of an algorithm at once, as algorithm.name=
does."""


def parse(argv: list[str]) -> argparse.Namespace:
    """The few options that are not Hydra overrides."""
    parser = Arguments(
        prog="verl train",
        description="Train with PPO, GRPO and their kin, from preferences, labels or answers.",
        epilog=EPILOG,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="algorithm, and Hydra overrides")
    parser.add_argument("--config", metavar="FILE", help="YAML file below the overrides")
    parser.add_argument("--cfg", choices=["job"], help="print the resolved configuration and stop")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str]) -> int:
    """Run the job that ``argv`` describes; the exit code."""
    arguments = parse(argv)
    from verl.config import job, load_config, resolve
    from verl.config.overrides import with_algorithm

    config = load_config(with_algorithm(arguments.overrides), file=arguments.config)
    if arguments.cfg:
        print(job(resolve(config)), end="")
        return 0
    from verl.trainer.restarts import fit_with_restarts

    _conclude(fit_with_restarts(config))
    return 0


def _conclude(trainer: Trainer) -> None:
    """Where to find what there is now."""
    from verl.checkpoint.layout import step_name

    folder = trainer.run_dir.path
    if trainer.saved_steps:
        print(f"Checkpoint {folder / step_name(trainer.saved_steps)}")
    print(f"Report     {folder / 'report.html'} (`verl` shows what can be done next)", flush=True)


if __name__ == "__main__":
    sys.exit(run_cli(main, sys.argv[1:]))
