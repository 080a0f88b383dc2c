"""Tests against the real SGLang on a CPU: `make test-sglang` builds the environment that has it, and runs them.

The Engine, its scheduler, its cache, its sampler and its models are SGLang's own, in torch; only its compiled kernels
are missing, see ``cpu_site``.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from verl.hardware.device import installed_packages

SITE = Path(__file__).parent / "cpu_site"
HERE = bool(installed_packages(("sglang",)))  # by distribution: as a module, this very folder may be found
if HERE:
    sys.path.insert(0, str(SITE))  # the engine's process searches where this one does
    runpy.run_path(str(SITE / "sitecustomize.py"))  # which this one has not read


def pytest_collection_modifyitems(config, items):
    if not HERE:
        skip = pytest.mark.skip(reason="SGLang is not installed in this environment: make test-sglang")
        for item in items:
            if "tests/sglang/" in item.nodeid:
                item.add_marker(skip)
