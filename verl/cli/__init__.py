"""The ``verl`` command."""

from verl.cli.main import main
from verl.cli.run import run_cli

__all__ = ["main", "run_cli"]
