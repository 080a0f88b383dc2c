"""Sharded training on GPUs through nccl: as on one device; and the rollout's pages come and go."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from rank_pool import pool_of
from tiny_models import save_tiny_model
from torch.distributed.fsdp import FSDPModule

sys.path.insert(0, str(Path(__file__).parents[1] / "hybrid"))

import fsdp_programs as programs
import hybrid_programs
from fsdp_programs import ALONE, Case
from test_train_engine_fsdp import differences, floats

COUNT = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(not COUNT, reason="needs a CUDA device")
WORLDS = [world for world in (1, 2, 4) if world <= max(COUNT, 1)]


pool = pool_of(min(COUNT, 4), "fsdp_programs", "hybrid_programs", device="cuda")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # of a size that the flash kernels take
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    return str(save_tiny_model(tmp_path_factory.mktemp("m") / "m", "llama", tie_word_embeddings=True, **sizes))


CASES = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "checkpointing": {"checkpointing": True},
    "compiled": {"dtype": "bfloat16", "compiled": True},
    "adapters": {"lora": True},
    "offload": {"parallel": dataclasses.replace(programs.FSDP, offload=True)},
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", list(CASES))
def test_five_updates_equal_those_of_one_device(pool, folder, name, world):
    case = Case(folder, device="cuda", **CASES[name])
    expected = pool.run(1, programs.trained, dataclasses.replace(case, parallel=ALONE))[0]
    found = pool.run(world, programs.trained, case)
    assert len({f["norm"] for f in found}) == 1
    tolerance = 2e-2 if case.dtype == "bfloat16" else 5e-5
    worst = differences(floats(expected["state"]), floats(found[0]["state"], expected["state"]))
    assert max(worst.values()) < tolerance, sorted(worst.items(), key=lambda w: -w[1])[:3]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="this torch cannot begin a pass again")
def test_running_out_of_memory_is_survived_together(pool, folder, world):
    case = Case(folder, device="cuda", cut=programs.Cut(max_tokens=64))
    expected = pool.run(1, programs.gradient, dataclasses.replace(case, parallel=ALONE))[0]
    for where in ("after", "backward", "another layer"):
        found = pool.run(world, programs.short_of_memory, case, where)
        assert 0 < found[0]["learned"] < 64
        assert max(differences(expected, found[0]["gradient"]).values()) < 5e-5


@pytest.mark.parametrize("world", WORLDS)
def test_the_arena_holds_the_bits_that_fsdp_gathers(pool, folder, world):
    for found in pool.run(world, hybrid_programs.arena, Case(folder, device="cuda", dtype="bfloat16")):
        assert found["equal"] == [True, True] and found["tied"] and found["engine"] == "native"


@pytest.mark.parametrize("world", WORLDS)
def test_pages_come_and_go_and_addresses_stay(pool, folder, world):
    for found in pool.run(world, hybrid_programs.pages, Case(folder, device="cuda", dtype="bfloat16")):
        assert found["addresses"] == 1 and found["gives_back"]
        assert found["freed"] == [True] * 5, "the device has the memory back outside rollouts"
        assert max(found["free"]) - min(found["free"]) < 64 << 20, "memory is flat"


@pytest.mark.parametrize("world", WORLDS)
def test_whole_steps(pool, folder, world):
    case = Case(folder, device="cuda", dtype="bfloat16", kind="adamw", lr=1e-3, cut=programs.Cut(max_tokens=64))
    for found in pool.run(world, hybrid_programs.grpo_step, case, 4):
        assert found["version"] == 4 and found["difference"] < 0.2 and len(found["reshard"]) == 4
