"""A run under Ray whose models Megatron-Core computes is the run with one process."""

from __future__ import annotations

import pytest
from test_scale_trainer import run, same

pytest.importorskip("megatron.core", reason="megatron-core is not installed (pip install megatron-core)")
pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_policy_critic_and_reference_over_two_processes(tiny_model_dir, tmp_path):
    """The second step goes on from a checkpoint of the first."""
    changes = {"algorithm": "ppo", "actor_rollout_ref__actor__use_kl_loss": True}
    split = {
        "actor_rollout_ref__actor__strategy": "megatron",
        "actor_rollout_ref__actor__megatron__tensor_model_parallel_size": 2,
    }
    one = run(tiny_model_dir, tmp_path / "one", 1, **changes)
    first = run(tiny_model_dir, tmp_path / "two", 2, steps=1, **changes, **split)
    second = run(tiny_model_dir, tmp_path / "two", 2, steps=2, **changes, **split)
    second.samples = [*first.samples, *second.samples]
    assert "critic" in second.weights
    same(one, second)
