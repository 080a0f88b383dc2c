"""``verl profile --steps 2 3 key=value ...``: train for a few steps and trace the chosen ones."""

from __future__ import annotations

from verl.cli.arguments import Arguments


def main(argv: list[str]) -> int:
    """Train up to the last of the steps, without a checkpoint, and print what took longest in each."""
    parser = Arguments(
        prog="verl profile",
        description="Train as `verl train` does with the same arguments, up to the last of the given steps, and trace "
        "these with torch's profiler.",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="algorithm, and Hydra overrides")
    parser.add_argument("--config", metavar="FILE", help="YAML file below the overrides")
    parser.add_argument("--steps", type=int, nargs="+", default=[2], metavar="N", help="from 1; the default is 2")
    parser.add_argument("--output", metavar="DIR", help="folder of the traces (default: profile/ in the run's folder)")
    arguments = parser.parse_intermixed_args(argv)

    from verl.config import load_config
    from verl.config.overrides import with_algorithm
    from verl.errors import ConfigError

    if min(arguments.steps) < 1:
        raise ConfigError(f"--steps {min(arguments.steps)}: steps are counted from 1")
    config = load_config(with_algorithm(arguments.overrides), file=arguments.config)
    trainer = config.trainer
    trainer.profile_steps = sorted(set(arguments.steps))
    trainer.total_training_steps = max(arguments.steps)
    trainer.profile_dir = arguments.output or trainer.profile_dir
    trainer.save_final, trainer.save_freq, trainer.test_freq = False, -1, -1
    trainer.val_before_train, trainer.resume_mode = False, "disable"

    from verl.trainer.base import Trainer
    from verl.trainer.profiling import top_rows

    run = Trainer(config)
    run.fit()
    for step in trainer.profile_steps:
        table = run.profiler.folder / f"step_{step}.txt"
        print(f"\nStep {step}: {table.with_suffix('.json.gz')}\n{top_rows(table)}")
    return 0
