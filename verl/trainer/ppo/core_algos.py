"""The name under which public verl scripts import the algorithms."""

from verl.algorithms.core_algos import *  # noqa: F403
from verl.algorithms.core_algos import __all__ as __all__
