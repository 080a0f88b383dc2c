"""Training with Megatron-Core equals training on one device (DESIGN 5): gradients, five updates, forward passes."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_pool import pool_of
from safetensors.torch import load_file
from tiny_models import make_tokenizer, save_tiny_model
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, MixtralConfig

from verl.config.names import RECOMPUTED_MODULES
from verl.train_engine.parallel import ParallelSettings, Recompute

pytest.importorskip("megatron.core", reason="megatron-core is not installed (pip install megatron-core)")
sys.path.insert(0, str(Path(__file__).parents[1] / "hybrid"))

import fsdp_programs
import hybrid_programs
import megatron_programs as programs
from fsdp_programs import Case
from megatron_programs import TWO

torch.set_num_threads(1)
COPIES = ParallelSettings("megatron", tensor_size=1)


def split(**sizes) -> ParallelSettings:
    return ParallelSettings("megatron", **sizes)


def save_mixtral(folder: Path) -> str:
    """Four experts, two a token, and a router that is sure of itself: else rounding chooses."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 96}
    torch.manual_seed(0)
    config = MixtralConfig(**sizes, initializer_range=0.2, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


STAGES = split(pipeline_size=2)
SHARED = split(distributed_optimizer=True)


pool = pool_of(4, "fsdp_programs", "megatron_programs", "hybrid_programs")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    long_positions = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
    long_positions |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    return {
        "llama": str(save_tiny_model(base / "llama", "llama")),
        # 97 tokens do not divide: the last rank's part of the vocabulary is shorter, and padded
        "qwen2": str(save_tiny_model(base / "qwen2", "qwen2", tie_word_embeddings=True, vocab_size=97)),
        "untied qwen2": str(save_tiny_model(base / "untied", "qwen2", vocab_size=97)),
        "tied llama": str(save_tiny_model(base / "tied", "llama", tie_word_embeddings=True)),
        "wide heads": str(save_tiny_model(base / "wide", "llama", head_dim=16)),
        "llama 3": str(save_tiny_model(base / "llama3", "llama", rope_parameters=long_positions)),
        "deep": str(save_tiny_model(base / "deep", "llama", num_hidden_layers=5)),
        "four heads": str(save_tiny_model(base / "four", "llama", num_attention_heads=4, num_key_value_heads=2)),
        "three heads": str(save_tiny_model(base / "three", "llama", num_attention_heads=4, num_key_value_heads=1)),
        "gpt2": str(save_tiny_model(base / "gpt2", "gpt2")),
        "mixtral": save_mixtral(base / "mixtral"),
    }


def one_device(case: Case) -> Case:
    return dataclasses.replace(case, parallel=ParallelSettings("torch"))


def differences(one: dict, two: dict) -> dict[str, float]:
    """Of each tensor, relative to its norm."""
    assert set(one) == set(two)
    found = {}
    for name, value in one.items():
        assert value.shape == two[name].shape, name
        scale = np.linalg.norm(value.astype(np.float64)) or 1.0
        found[name] = float(np.linalg.norm(value.astype(np.float64) - two[name]) / scale)
    return found


def weights(state: dict) -> dict:
    return {k: v for k, v in state.items() if k.startswith(("live/", "master/"))}


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize(("world", "rows", "temperature"), [(2, 96, 1.0), (2, 97, 0.7), (3, 50, 1.3)])
def test_log_probs_of_a_vocabulary_in_parts(pool, world, rows, temperature, entropy):
    for found in pool.run(world, programs.log_prob_of_parts, rows, temperature, entropy):
        for name, (got, expected) in found.items():
            np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("name", ["llama", "qwen2", "untied qwen2", "llama 3", "wide heads"])
def test_gradients_equal_those_of_one_device(pool, folders, name):
    case = Case(folders[name], parallel=TWO)
    expected = fsdp_programs.alone(fsdp_programs.gradient, one_device(case))
    got = pool.run(2, fsdp_programs.gradient, case)[0]
    assert max(differences(expected, got).values()) < 5e-6


CASES = {
    "llama": lambda f: (2, Case(f["llama"], parallel=TWO)),
    "qwen2": lambda f: (2, Case(f["qwen2"], parallel=TWO)),
    "two copies": lambda f: (2, Case(f["qwen2"], parallel=COPIES)),
    "two copies over two ranks each": lambda f: (4, Case(f["llama"], parallel=TWO)),
    "AdamW": lambda f: (2, Case(f["tied llama"], parallel=TWO, kind="adamw", lr=1e-3)),
    "checkpointing": lambda f: (2, Case(f["qwen2"], parallel=TWO, checkpointing=True)),
    "critic": lambda f: (2, Case(f["llama"], parallel=TWO, role="critic")),
    "moments in host memory": lambda f: (2, Case(f["llama"], parallel=TWO, offload=True)),
    "bfloat16": lambda f: (2, Case(f["llama"], parallel=TWO, dtype="bfloat16")),
    "scattered tokens": lambda f: (2, Case(f["qwen2"], parallel=split(tensor_size=2, sequence_parallel=True))),
    "pipeline": lambda f: (2, Case(f["llama"], parallel=split(pipeline_size=2))),
    "pipeline, tied": lambda f: (2, Case(f["tied llama"], parallel=split(pipeline_size=2), kind="adamw", lr=1e-3)),
    "pipeline, critic": lambda f: (2, Case(f["llama"], parallel=split(pipeline_size=2), role="critic")),
    "interleaved": lambda f: (2, Case(f["deep"], parallel=split(pipeline_size=2, virtual_size=2))),
    "pipeline over cut matrices": lambda f: (
        4,
        Case(f["qwen2"], parallel=split(tensor_size=2, pipeline_size=2, sequence_parallel=True)),
    ),
    "pipeline, two copies": lambda f: (
        4,
        Case(f["tied llama"], parallel=split(pipeline_size=2, distributed_optimizer=True), kind="adamw", lr=1e-3),
    ),
    "context": lambda f: (2, Case(f["qwen2"], parallel=split(context_size=2))),
    "context, critic": lambda f: (2, Case(f["qwen2"], parallel=split(context_size=2), role="critic")),
    "context over cut matrices": lambda f: (
        4,
        Case(f["four heads"], parallel=split(tensor_size=2, context_size=2, sequence_parallel=True)),
    ),
    "shared moments": lambda f: (
        2,
        Case(f["llama"], parallel=split(distributed_optimizer=True), kind="adamw", lr=1e-3),
    ),
    "shared moments, bfloat16": lambda f: (
        2,
        Case(f["llama"], parallel=split(distributed_optimizer=True), dtype="bfloat16", kind="adamw", lr=1e-3),
    ),
    "experts": lambda f: (2, Case(f["mixtral"], parallel=TWO)),
    "experts, scattered tokens": lambda f: (
        2,
        Case(f["mixtral"], parallel=split(tensor_size=2, sequence_parallel=True)),
    ),
    "experts on stages": lambda f: (
        4,
        Case(f["mixtral"], parallel=split(tensor_size=2, pipeline_size=2), kind="adamw", lr=1e-3),
    ),
    "whole layers again": lambda f: (
        2,
        Case(f["llama"], parallel=split(tensor_size=2, recompute=Recompute("full", "uniform", 2))),
    ),
    "modules again": lambda f: (
        2,
        Case(f["llama"], parallel=split(tensor_size=2, recompute=Recompute("selective", modules=RECOMPUTED_MODULES))),
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_five_updates_equal_those_of_one_device(pool, folders, name):
    world, case = CASES[name](folders)
    expected = fsdp_programs.alone(fsdp_programs.trained, one_device(case))
    found = pool.run(world, fsdp_programs.trained, case)
    assert {f["kind"] for f in found} == {"MegatronEngine"} and expected["kind"] == "TorchEngine"
    assert len({f["tokens"] for f in found}) > 1, "the ranks should have unequal work"
    assert len({f["norm"] for f in found}) == 1, "all ranks see the same norm, to the bit"
    assert {f["version"] for f in found} == {expected["version"]}
    tolerance = 2e-2 if case.dtype == "bfloat16" else 5e-6
    assert found[0]["norm"] == pytest.approx(expected["norm"], rel=tolerance)
    worst = differences(weights(expected["state"]), weights(found[0]["state"]))
    assert max(worst.values()) < tolerance, sorted(worst.items(), key=lambda w: -w[1])[:3]


@pytest.mark.parametrize(
    ("role", "parallel"),
    [
        ("actor", TWO),
        ("critic", TWO),
        ("actor", STAGES),
        ("critic", STAGES),
        ("actor", split(pipeline_size=2, virtual_size=2)),
        ("actor", split(context_size=2)),
    ],
)
def test_forward_passes_equal_those_of_one_device(pool, folders, role, parallel):
    case = Case(folders["deep" if parallel.virtual_size > 1 else "qwen2"], role=role, parallel=parallel)
    _, expected = fsdp_programs.alone(fsdp_programs.forwards, one_device(case))
    seen = 0
    for rows, values in pool.run(2, fsdp_programs.forwards, case):
        if len(rows):
            seen += len(rows)
            np.testing.assert_allclose(values, expected[rows], rtol=0, atol=2e-6)
    assert seen >= 5


@pytest.mark.parametrize("parallel", [TWO, STAGES])
def test_a_frozen_reference(pool, folders, parallel):
    case = Case(folders["untied qwen2"], parallel=parallel)
    _, expected = programs.alone(programs.reference, one_device(case))
    for rows, values in pool.run(2, programs.reference, case):
        np.testing.assert_allclose(values, expected[rows], rtol=0, atol=2e-6)


@pytest.mark.parametrize("parallel", [TWO, STAGES])
def test_a_reward_model(pool, folders, parallel):
    """Scores, and after an update."""
    case = Case(folders["qwen2"], parallel=parallel)
    expected = programs.alone(programs.scores, one_device(case))
    assert np.abs(expected[1] - expected[0]).max() > 1e-3
    for found in pool.run(2, programs.scores, case):
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=5e-6)


@pytest.mark.parametrize(("name", "dtype"), [("qwen2", "float32"), ("llama", "bfloat16")])
def test_a_rank_holds_its_part_and_the_rollout_gets_all(pool, folders, name, dtype):
    one, two = pool.run(2, programs.inside, Case(folders[name], dtype=dtype, parallel=TWO))
    for found in (one, two):
        assert found["share"] == pytest.approx(0.5, abs=0.02)
        assert found["read"] and found["left"] <= 4 * len(found["names"]), "the Hugging Face weights are given up"
        assert found["moved"] == [], "storages never move"
        assert found["moments"] == {"torch.float32"}
        assert found["rollout"], "the arena holds the bits of the live weights"
        assert "strategy=fsdp" in found["refused"]
    for parameter, values in one["everywhere"].items():
        assert np.array_equal(values, two["everywhere"][parameter]), f"{parameter} drifts apart"


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_stage_holds_its_layers_and_the_rollout_gets_all(pool, folders, role):
    found = pool.run(2, programs.inside, Case(folders["llama"], role=role, parallel=STAGES))
    head = 0.01 if role == "critic" else 0.0
    assert sum(f["share"] for f in found) == pytest.approx(1, abs=head), "no stage has what another has"
    assert all(f["share"] < 0.6 and f["moved"] == [] for f in found)
    if role == "actor":
        assert all(f["read"] for f in found), "the Hugging Face weights are given up"
        assert all(f["rollout"] for f in found), "the arena holds the bits of the live weights"


@pytest.mark.parametrize(
    ("role", "name", "parallel"),
    [
        ("actor", "llama", TWO),
        ("actor", "qwen2", TWO),
        ("critic", "qwen2", TWO),
        ("actor", "qwen2", STAGES),
        ("actor", "mixtral", TWO),
        ("critic", "llama", STAGES),
    ],
)
def test_exports_are_equal(pool, folders, tmp_path, role, name, parallel):
    case = Case(folders[name], role=role, parallel=parallel)
    pool.run(2, programs.exported, case, str(tmp_path / "two"))
    programs.alone(programs.exported, one_device(case), str(tmp_path / "one"))
    one, two = (load_file(tmp_path / folder / "model.safetensors") for folder in ("one", "two"))
    assert set(one) == set(two)
    assert max(differences(*({k: v.numpy() for k, v in t.items()} for t in (one, two))).values()) < 5e-6
    kind = AutoModelForTokenClassification if role == "critic" else AutoModelForCausalLM
    loaded, info = kind.from_pretrained(tmp_path / "two", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert type(loaded).__name__.lower().startswith(name)


@pytest.mark.parametrize(("name", "dtype"), [("tied llama", "float32"), ("llama", "bfloat16")])
def test_a_state_goes_on_with_another_split_and_another_engine(pool, folders, name, dtype):
    """TP 2, then two copies, one device, FSDP, PP 2 with two copies, and TP 2 again; as one device by itself."""
    case = Case(folders[name], dtype=dtype, parallel=TWO)
    expected = programs.alone(programs.resumed, one_device(case), None, 6)
    state = pool.run(2, programs.resumed, case, None, 1)[0]
    state = pool.run(2, programs.resumed, dataclasses.replace(case, parallel=COPIES), state, 1)[0]
    state = programs.alone(programs.resumed, one_device(case), state, 1)
    state = pool.run(2, programs.resumed, dataclasses.replace(case, parallel=fsdp_programs.FSDP), state, 1)[0]
    shared = split(pipeline_size=2, distributed_optimizer=True)
    state = pool.run(4, programs.resumed, dataclasses.replace(case, parallel=shared), state, 1)[0]
    state = pool.run(2, programs.resumed, case, state, 1)[0]
    assert {k for k in expected if k.startswith("optimizer/")} == {k for k in state if k.startswith("optimizer/")}
    assert state["counters"][1] == expected["counters"][1] == 6
    # in bfloat16 other micro-batches alone change moments by a quarter
    tolerance, kinds = (2e-2, ("live/", "master/")) if dtype == "bfloat16" else (2e-5, ("live/", "optimizer/exp"))
    keys = [k for k in expected if k.startswith(kinds)]
    worst = differences({k: expected[k] for k in keys}, {k: state[k] for k in keys})
    assert max(worst.values()) < tolerance, sorted(worst.items(), key=lambda w: -w[1])[:3]


@pytest.mark.parametrize("parallel", [TWO, STAGES, SHARED])
def test_a_load_gives_back_what_was_saved(pool, folders, parallel):
    case = Case(folders["qwen2"], parallel=parallel)
    state = pool.run(2, programs.resumed, case, None, 2)[0]
    again = pool.run(2, programs.resumed, case, state, 0)[0]
    assert set(state) == set(again)
    assert all(np.array_equal(state[k], again[k]) for k in state if k != "counters")


def test_pieces_of_a_state_cover_every_row_once(pool, folders):
    found = pool.run(4, programs.pieces, Case(folders["qwen2"], parallel=TWO, kind="adamw"))
    assert not any("live/" in name for rank in found[2:] for name in rank), "a second copy writes nothing"
    for name in found[0]:
        if not name.startswith(("live/", "optimizer/exp")):
            continue
        spans = sorted(rank[name] for rank in found if name in rank)
        assert len(spans) == 2 and spans[0][0] == 0 and spans[0][1] == spans[1][0] > 0, name


def test_pieces_of_shared_moments_on_two_stages_cover_every_row_once(pool, folders):
    parallel = split(pipeline_size=2, distributed_optimizer=True)
    found = pool.run(4, programs.pieces, Case(folders["qwen2"], parallel=parallel, kind="adamw"))
    names = set().union(*found)
    assert {sum(name in rank for rank in found) for name in names} == {1}, "one copy, one stage and one owner"
    kept = [sum(name.startswith("optimizer/exp_avg/") for name in rank) for rank in found]
    assert min(kept) > 0 and sum(kept) == sum(name.startswith("live/") for name in names)


@pytest.mark.parametrize("parallel", [TWO, STAGES])
def test_whole_steps_on_two_ranks_equal_those_of_one_device(pool, folders, parallel):
    """Rollout by the native engine, advantages and update, three times: the same rewards and norms.

    The pad token is among what is sampled; its input embedding gets no gradient.
    """
    case = Case(folders["untied qwen2"], parallel=parallel)
    expected = programs.alone(hybrid_programs.grpo_step, one_device(case), 3)
    for found in pool.run(2, hybrid_programs.grpo_step, case, 3):
        assert found["rewards"] == pytest.approx(expected["rewards"], abs=1e-6)
        assert found["norms"] == pytest.approx(expected["norms"], rel=5e-5)
        assert found["difference"] < 1e-4, "rollout and training compute the same log-probs"
        assert len(found["reshard"]) == 3 and found["version"] == 3


@pytest.mark.parametrize("parallel", [TWO, STAGES, SHARED])
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(pool, folders, parallel):
    for found in pool.run(2, fsdp_programs.nonfinite, Case(folders["llama"], parallel=parallel)):
        assert found["skipped"] and found["version"] == 0 and found["unchanged"]
        assert found["next"] == 1, "and the next step is taken"


def test_float16_lowers_the_loss_scale_on_all_ranks_together(pool, folders):
    found = pool.run(2, fsdp_programs.scaled, Case(folders["llama"], parallel=TWO, dtype="float16"))
    assert len({f["scale"] for f in found}) == 1
    assert all(f["scale"] < 2.0**24 and not f["skipped"] for f in found)


def test_running_out_of_memory_says_what_to_do(pool, folders):
    for text in pool.run(2, programs.out_of_memory, Case(folders["llama"], parallel=TWO)):
        assert "ppo_max_token_len_per_gpu" in text and "megatron" in text


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("three heads", {}, "2 ranks do not divide its 1 key-value heads"),
        ("gpt2", {}, "'gpt2' have no mapping"),
        ("llama", {"kind": "adafactor"}, "adafactor does not treat every weight by itself"),
        ("llama", {"lora": True}, "it has adapters"),
        ("llama", {"parallel": split(tensor_size=4)}, "tensor_model_parallel_size=4 does not"),
        ("llama", {"parallel": split(pipeline_size=2, virtual_size=2)}, "2 layers are fewer than the 4 stages"),
        ("three heads", {"parallel": split(context_size=2), "lora": True}, "it has adapters"),
    ],
)
def test_what_cannot_be_is_refused_at_building(pool, folders, name, changes, words):
    case = Case(folders[name], **{"parallel": TWO, **changes})
    assert all(words in text for text in pool.run(2, programs.refused, case))


def test_one_process_or_threads_are_refused(folders):
    assert "processes" in programs.alone(programs.refused, Case(folders["llama"], parallel=COPIES))
