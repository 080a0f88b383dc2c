"""``verl plan key=value ...``: the configuration that ``verl train`` would use, without loading torch."""

from __future__ import annotations

import argparse
import sys

from verl.notices import add_sink


def main(argv: list[str]) -> int:
    """Print the resolved configuration as YAML on stdout; notices go to stderr.

    Raises:
        ConfigError: with all problems of the given values. Data and model need not be given.
    """
    parser = argparse.ArgumentParser(
        prog="verl plan", description="Show the configuration that `verl train` would use with the same arguments."
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides")
    parser.add_argument("--package", metavar="GROUP", help="show a part only, for example actor_rollout_ref.rollout")
    arguments = parser.parse_intermixed_args(argv)

    from verl.config import job, load_config, resolve, validate

    remove = add_sink(lambda text: print(f"[notice] {text}", file=sys.stderr))
    try:
        config = load_config(arguments.overrides)
        validate(config, need_data=False, need_model=False)
        print(job(resolve(config), arguments.package), end="")
    finally:
        remove()
    return 0
