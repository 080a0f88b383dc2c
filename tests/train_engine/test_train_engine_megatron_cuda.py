"""Megatron-Core on GPUs through nccl: as on one device, and the rollout's pages come and go."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from rank_pool import pool_of
from tiny_models import save_tiny_model

pytest.importorskip("megatron.core", reason="megatron-core is not installed (pip install megatron-core)")
sys.path.insert(0, str(Path(__file__).parents[1] / "hybrid"))

import fsdp_programs as programs
import hybrid_programs
from fsdp_programs import ALONE, Case
from megatron_programs import TWO
from test_train_engine_megatron import SHARED, STAGES, differences, split, weights

COUNT = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(COUNT < 2, reason="needs two CUDA devices")


pool = pool_of(2, "fsdp_programs", "hybrid_programs", device="cuda")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # of a size that the flash kernels take
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    return str(save_tiny_model(tmp_path_factory.mktemp("m") / "m", "llama", tie_word_embeddings=True, **sizes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "bfloat16"},
        {"checkpointing": True},
        {"offload": True},
        {"parallel": split(tensor_size=2, sequence_parallel=True)},
        {"parallel": STAGES},
        {"parallel": STAGES, "dtype": "bfloat16"},
        {"parallel": split(context_size=2)},
        {"parallel": SHARED, "dtype": "bfloat16"},
    ],
)
def test_five_updates_equal_those_of_one_device(pool, folder, changes):
    case = Case(folder, device="cuda", **{"parallel": TWO, **changes})
    expected = pool.run(1, programs.trained, dataclasses.replace(case, parallel=ALONE))[0]
    found = pool.run(2, programs.trained, case)
    assert len({f["norm"] for f in found}) == 1
    tolerance = 2e-2 if case.dtype == "bfloat16" else 5e-5
    worst = differences(weights(expected["state"]), weights(found[0]["state"]))
    assert max(worst.values()) < tolerance, sorted(worst.items(), key=lambda w: -w[1])[:3]


@pytest.mark.parametrize("parallel", [TWO, STAGES])
def test_whole_steps_on_two_gpus(pool, folder, parallel):
    """Rollout with the native engine out of the arena, scores and update."""
    for found in pool.run(2, hybrid_programs.grpo_step, Case(folder, device="cuda", parallel=parallel), 3):
        assert found["version"] == 3 and len(found["reshard"]) == 3
        assert found["difference"] < 1e-3, "rollout and training compute the same log-probs"
