"""What machine is this, and what will run on it: the only place that decides dtype, attention, engine and kernels.

Nothing here imports torch until :func:`probe` is called. Usual use::

    choice = hardware.decide(config.trainer.device)        # look at the machine, choose, give reasons
    choice = check_explicit(choice, dtype="float32")       # what the user asked for wins, or an error says why not
"""

from verl.hardware.choice import CATALOGUE, Catalogue, Choice, choose, decide
from verl.hardware.device import (
    Device,
    cpu_maker,
    installed_packages,
    machine_memory_bytes,
    probe,
    torch_dtype,
    torch_threads,
)
from verl.hardware.explicit import check_explicit, environment_dtype, parse_dtype

__all__ = [
    "CATALOGUE",
    "Catalogue",
    "Choice",
    "Device",
    "check_explicit",
    "choose",
    "cpu_maker",
    "decide",
    "environment_dtype",
    "installed_packages",
    "machine_memory_bytes",
    "parse_dtype",
    "probe",
    "torch_dtype",
    "torch_threads",
]
