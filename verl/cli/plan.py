"""``verl plan key=value ...``: the configuration that ``verl train`` would use, and the memory that it would need."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from verl.cli.arguments import Arguments
from verl.notices import add_sink

if TYPE_CHECKING:
    from verl.config import Config


def main(argv: list[str]) -> int:
    """Print the resolved configuration as YAML on stdout; notices go to stderr.

    If a model is given, the memory plan follows as YAML comments. Only then torch is imported; no weight is loaded.

    Raises:
        ConfigError: with all problems of the given values. Data and model need not be given.
    """
    parser = Arguments(
        prog="verl plan", description="Show the configuration that `verl train` would use with the same arguments."
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides")
    parser.add_argument("--package", metavar="GROUP", help="show a part only, for example actor_rollout_ref.rollout")
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help='plan the memory for this GPU ("Tesla P40", "RTX 3090", H200) instead of this machine',
    )
    arguments = parser.parse_intermixed_args(argv)

    from verl.config import job, load_config, resolve, validate
    from verl.config.overrides import with_algorithm

    remove = add_sink(lambda text: print(f"[notice] {text}", file=sys.stderr))
    try:
        config = load_config(with_algorithm(arguments.overrides))
        validate(config, need_data=False, need_model=False)
        config = resolve(config)
        print(job(config, arguments.package), end="")
        if config.actor_rollout_ref.model.path is not None and arguments.package is None:
            _print_memory(config, arguments.gpu)
    finally:
        remove()
    return 0


def _print_memory(config: Config, gpu: str | None) -> None:
    from verl.trainer.planning import card, card_of, imagined, plan_lines
    from verl.trainer.settings import hardware_for

    found = card(gpu) if gpu else None
    choice = hardware_for(config, imagined(found) if found else None)
    for line in plan_lines(config, choice, found or card_of(choice)):
        print(f"# {line}")
