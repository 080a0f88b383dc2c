"""``python -m verl.trainer.main_ppo key=value …`` and ``verl train key=value …``: train by the configuration."""

from __future__ import annotations

import argparse
import sys

from verl.cli.run import run_cli

EPILOG = """At least data.train_files=FILE and actor_rollout_ref.model.path=MODEL are needed; docs/config.md lists the
keys. algorithm.name=grpo (or ppo, dapo, rloo, ...) sets those of an algorithm at once."""


def parse(argv: list[str]) -> argparse.Namespace:
    """The few options that are not Hydra overrides."""
    parser = argparse.ArgumentParser(
        prog="verl train", description="Train with PPO, GRPO and their kin.", epilog=EPILOG
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides")
    parser.add_argument("--config", metavar="FILE", help="YAML file below the overrides")
    parser.add_argument("--cfg", choices=["job"], help="print the resolved configuration and stop")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str]) -> int:
    """Run the job that ``argv`` describes; the exit code."""
    arguments = parse(argv)
    from verl.config import job, load_config, resolve

    config = load_config(arguments.overrides, file=arguments.config)
    if arguments.cfg:
        print(job(resolve(config)), end="")
        return 0
    from verl.trainer.base import Trainer

    Trainer(config).fit()
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main, sys.argv[1:]))
