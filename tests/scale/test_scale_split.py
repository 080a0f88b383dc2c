"""A run under Ray whose processes generate together, each with its part of the policy, is the run with one process."""

from __future__ import annotations

import pytest
from test_scale_trainer import run, same

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_two_processes_that_share_the_rollout(tiny_model_dir, tmp_path):
    """Rows do not divide; rewards are computed while others are being written; the second step is resumed."""
    split = {
        "actor_rollout_ref__actor__strategy": "fsdp",
        "actor_rollout_ref__rollout__tensor_model_parallel_size": 2,
        "actor_rollout_ref__actor__use_kl_loss": True,
    }
    one = run(tiny_model_dir, tmp_path / "one", 1, actor_rollout_ref__actor__use_kl_loss=True)
    first = run(tiny_model_dir, tmp_path / "two", 2, steps=1, **split)
    second = run(tiny_model_dir, tmp_path / "two", 2, steps=2, **split)
    assert second.metrics["timing_s/reshard"] > 0
    second.samples = [*first.samples, *second.samples]
    same(one, second)
