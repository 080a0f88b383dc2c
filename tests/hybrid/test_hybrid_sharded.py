"""The rollout of a sharded model: the arena, its addresses and memory, and whole steps on several ranks."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_pool import pool_of
from tiny_models import save_tiny_model

sys.path.insert(0, str(Path(__file__).parents[1] / "train_engine"))

import fsdp_programs
import hybrid_programs as programs
from fsdp_programs import Case

torch.set_num_threads(1)


pool = pool_of(3, "hybrid_programs")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return {
        "untied": str(save_tiny_model(base / "untied", "llama")),
        "tied": str(save_tiny_model(base / "tied", "qwen2", tie_word_embeddings=True)),
    }


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", ["untied", "tied", "adapters"])
def test_the_arena_holds_the_bits_that_fsdp_gathers(pool, folders, name, world):
    folder = folders["untied" if name == "untied" else "tied"]
    case = Case(folder, dtype="bfloat16", lora=name == "adapters")
    for found in pool.run(world, programs.arena, case):
        assert found["equal"] == [True, True]
        assert found["tied"] == (name != "untied")
        assert found["engine"] == "native"
        assert found["parameters"] > 20


def test_ten_cycles_keep_addresses_and_memory(pool, folders):
    """And generate what one device generates, which sees each update."""
    case = Case(folders["tied"])
    found = pool.run(2, programs.cycles, case)
    alone = fsdp_programs.alone(texts_of_one_device, dataclasses.replace(case, parallel=fsdp_programs.ALONE))
    for rank in found:
        assert rank["addresses"] == 1
        assert rank["gathers"] == 10, "one gathering for each version of the weights"
        assert len(set(rank["sizes"][1:])) == 1, "memory is flat"
        for cycle, texts in enumerate(rank["texts"]):
            assert texts and all((alone[cycle][name] == text).all() for name, text in texts.items())
    assert len({tuple(np.concatenate(list(texts.values()))) for texts in found[0]["texts"]}) == 10


def texts_of_one_device(comm, case: Case):
    worker = fsdp_programs.make_worker(case, comm)
    texts = []
    for cycle in range(10):
        texts.append(programs.generate(worker, comm, f"{cycle}"))
        programs.update(worker, comm)
    return texts


def test_new_weights_make_the_engine_forget_and_old_ones_do_not(pool, folders):
    for counts in pool.run(2, programs.version_drops_prefix_pages, Case(folders["tied"])):
        assert counts == [1, 1, 2, 2]


def test_whole_steps_on_two_ranks_equal_those_of_one_device(pool, folders):
    """Rollout with the native engine out of the arena, scores, update: the same rewards and norms at every step."""
    case = Case(folders["untied"], kind="adamw", lr=3e-3, cut=fsdp_programs.Cut(max_tokens=64))
    alone = fsdp_programs.alone(programs.grpo_step, dataclasses.replace(case, parallel=fsdp_programs.ALONE), 6)
    for world in (2, 3):
        for found in pool.run(world, programs.grpo_step, case, 6):
            assert found["rewards"] == pytest.approx(alone["rewards"], abs=1e-6)
            assert found["norms"] == pytest.approx(alone["norms"], rel=1e-3)
            assert found["version"] == 6
            assert len(found["reshard"]) == 6 and all(0 < seconds < 60 for seconds in found["reshard"])
            assert found["difference"] < 1e-4, "rollout and training compute the same log-probs"
    assert alone["rewards"][-1] > alone["rewards"][0]
