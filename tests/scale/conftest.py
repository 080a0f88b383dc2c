"""One small Ray cluster for a module, and the helpers of the trainer's tests."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in (HERE.parent / "trainer", HERE.parent / "single_controller"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


@pytest.fixture(scope="module")
def ray_cluster():
    """Runs of this module join it, so that each need not start its own."""
    import ray_groups

    yield ray_groups.cluster()
    ray_groups.close()
