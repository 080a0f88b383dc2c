"""Rollouts of which several ranks each hold a part of the model: tokens, log-probs, memory, and whole steps."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_pool import pool_of
from safetensors.torch import load_file
from tiny_models import save_tiny_model

sys.path.insert(0, str(Path(__file__).parents[1] / "train_engine"))

import fsdp_programs
import hybrid_programs
import split_programs as programs
from fsdp_programs import ALONE, Case

from verl.train_engine.parallel import ParallelSettings

torch.set_num_threads(1)
MODELS = {
    "llama": ("llama", {"vocab_size": 97}),
    "tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "biased": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True, "num_attention_heads": 8}),
    "gemma2": ("gemma2", {"tie_word_embeddings": True}),
    "opt": ("opt", {}),
}


pool = pool_of(4, "split_programs")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return {name: str(save_tiny_model(base / name, family, **changes)) for name, (family, changes) in MODELS.items()}


def assert_same(alone, ranks, tolerance: float) -> None:
    """Every row once, on one rank, with the tokens of one device."""
    names = [name for found in ranks for name in found]
    assert sorted(names) == sorted(alone) and len(set(names)) == len(names)
    for found in ranks:
        for name, (tokens, log_probs, reason) in found.items():
            wanted, wanted_log_probs, wanted_reason = alone[name]
            assert np.array_equal(tokens, wanted) and reason == wanted_reason, name
            np.testing.assert_allclose(log_probs, wanted_log_probs, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "world", "size", "dtype"),
    [
        ("llama", 2, 2, "float32"),
        ("llama", 4, 2, "float64"),
        ("tied", 2, 2, "float64"),
        ("biased", 2, 2, "float32"),
        ("qwen3", 4, 4, "float32"),
        ("gemma2", 2, 2, "float32"),
        ("adapters", 2, 2, "float32"),
    ],
)
def test_tokens_and_log_probs_are_those_of_one_device(pool, folders, name, world, size, dtype):
    case = Case(folders["tied" if name == "adapters" else name], dtype=dtype, lora=name == "adapters")
    alone = fsdp_programs.alone(programs.rollouts, dataclasses.replace(case, parallel=ALONE))
    ranks = pool.run(world, programs.rollouts, dataclasses.replace(case, tensor_size=size))
    assert_same(alone["texts"], [found["texts"] for found in ranks], 1e-5 if dtype == "float32" else 1e-6)
    reasons = {reason for _, _, reason in alone["texts"].values()}
    assert reasons == {"stop", "length"}, "some end early"
    for found in ranks:
        assert (found["engine"], found["addresses"], found["tied"]) == ("native", 1, alone["tied"])


def test_a_rank_holds_its_parts_and_no_more(pool, folders):
    """Bit for bit the rows and columns of the weights; heads of keys that several ranks share lie on each of them."""
    case = Case(folders["qwen3"], tensor_size=4)  # 8 heads, 2 of keys and values
    ranks = pool.run(4, programs.parts, case)
    whole = ranks[0]["whole"]
    layer = "model.layers.1."
    for rank, found in enumerate(ranks):
        slots = found["slots"]
        assert slots.keys() == whole.keys()
        for name, rows in (("self_attn.q_proj", 16), ("mlp.gate_proj", 16), ("mlp.up_proj", 16)):
            weight = whole[f"{layer}{name}.weight"]
            assert np.array_equal(slots[f"{layer}{name}.weight"], weight[rank * rows : (rank + 1) * rows])
        key = whole[f"{layer}self_attn.k_proj.weight"]
        assert np.array_equal(slots[f"{layer}self_attn.k_proj.weight"], key[rank // 2 * 8 : rank // 2 * 8 + 8])
        down = whole[f"{layer}mlp.down_proj.weight"]
        assert np.array_equal(slots[f"{layer}mlp.down_proj.weight"], down[:, rank * 16 : (rank + 1) * 16])
        assert np.array_equal(slots["model.norm.weight"], whole["model.norm.weight"])
        embedding = whole["model.embed_tokens.weight"]
        assert np.array_equal(slots["model.embed_tokens.weight"], embedding[rank * 24 : (rank + 1) * 24])


@pytest.mark.parametrize(("world", "size"), [(2, 2), (4, 2), (4, 4)])
def test_no_rank_ever_has_room_for_all_weights(pool, folders, world, size):
    for found in pool.run(world, programs.memory, Case(folders["biased"], tensor_size=size)):
        whole = found["whole"]
        assert found["slots"] < whole / size * 1.1, "its part, norms and biases"
        assert found["arena"] < found["slots"] + 40 * 512, "and what aligns them"
        assert found["sent"] <= found["unit"] / size * 1.1, "a layer's part at a time"
        assert found["largest"] <= found["tensor"] / size * 1.01, "no tensor is ever whole"
        assert found["made"] < whole / size * 1.2, "nothing else is made"


def test_rows_are_put_off_and_written_all_the_same(pool, folders):
    case = Case(folders["tied"])
    alone = fsdp_programs.alone(programs.preempted, dataclasses.replace(case, parallel=ALONE))
    ranks = pool.run(2, programs.preempted, dataclasses.replace(case, tensor_size=2))
    assert_same(alone["texts"], [found["texts"] for found in ranks], 1e-5)
    assert alone["told"] == 0
    assert ranks[0]["told"] > 0 and ranks[1]["told"] == 0, "the group's, once"


def test_one_rank_may_stop_early(pool, folders):
    case = Case(folders["tied"])
    wanted = fsdp_programs.alone(programs.rollouts, dataclasses.replace(case, parallel=ALONE))["texts"]
    first, second = pool.run(2, programs.closed_early, dataclasses.replace(case, tensor_size=2))
    assert first["pieces"] > 0 and len(second["texts"]) == 6
    for name, (tokens, _, reason) in [*second["texts"].items(), *first["again"].items(), *second["again"].items()]:
        assert np.array_equal(tokens, wanted[name][0]) and reason == wanted[name][2]


def test_whole_steps_equal_those_of_one_device(pool, folders):
    case = Case(folders["tied"], kind="adamw", lr=3e-3, cut=fsdp_programs.Cut(max_tokens=64))
    alone = fsdp_programs.alone(hybrid_programs.grpo_step, dataclasses.replace(case, parallel=ALONE), 4)
    for found in pool.run(2, hybrid_programs.grpo_step, dataclasses.replace(case, tensor_size=2), 4):
        assert found["rewards"] == pytest.approx(alone["rewards"], abs=1e-6)
        assert found["norms"] == pytest.approx(alone["norms"], rel=1e-3)
        assert len(found["reshard"]) == 4 and all(0 < seconds < 60 for seconds in found["reshard"])
        assert found["difference"] < 1e-4, "rollout and training compute the same log-probs"


def test_copies_of_the_weights_send_within_themselves(pool, folders):
    """Hybrid sharding: two copies over two ranks each, and a rollout of all four."""
    parallel = dataclasses.replace(fsdp_programs.FSDP, fsdp_size=2)
    case = Case(folders["biased"], parallel=parallel, tensor_size=4)
    alone = fsdp_programs.alone(programs.rollouts, dataclasses.replace(case, parallel=ALONE, tensor_size=1))
    ranks = pool.run(4, programs.rollouts, case)
    assert_same(alone["texts"], [found["texts"] for found in ranks], 1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "world", "words"),
    [
        ("llama", {"tensor_size": 3}, 3, "3 ranks do not divide its 4 attention heads"),
        ("llama", {"tensor_size": 2}, 3, "does not divide the 3 processes"),
        ("llama", {"tensor_size": 2, "parallel": ALONE}, 2, "needs weights that are spread over processes"),
        ("opt", {"tensor_size": 2}, 2, "no way to cut the attention of models of the type 'opt'"),
    ],
)
def test_what_cannot_be_split_is_one_sentence(pool, folders, name, changes, world, words):
    for text in pool.run(world, programs.refused, dataclasses.replace(Case(folders[name]), **changes)):
        assert words in text and "rollout.tensor_model_parallel_size=" in text and "\n" not in text


def test_the_exported_folder_is_that_of_one_device(pool, folders, tmp_path):
    case = Case(folders["tied"])
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    fsdp_programs.alone(programs.exported, dataclasses.replace(case, parallel=ALONE), str(tmp_path / "one"))
    pool.run(2, programs.exported, dataclasses.replace(case, tensor_size=2), str(tmp_path / "two"))
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, weight in one.items():
        assert (weight - two[name]).norm() <= 5e-6 * weight.norm().clamp_min(1e-3), name


def test_weights_that_megatron_cuts(pool, folders):
    pytest.importorskip("megatron.core", reason="megatron-core is not installed (pip install megatron-core)")
    parallel = ParallelSettings("megatron", tensor_size=2)
    case = Case(folders["llama"], parallel=parallel, tensor_size=2)
    alone = fsdp_programs.alone(programs.rollouts, dataclasses.replace(case, parallel=ALONE, tensor_size=1))
    ranks = pool.run(2, programs.rollouts, case)
    assert_same(alone["texts"], [found["texts"] for found in ranks], 1e-5)
