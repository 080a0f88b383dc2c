"""Ranks that spread a model read their own rows of its files, and no more; what they hold is what loading it gives."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import fsdp_programs
import numpy as np
import pending_programs as programs
import pytest
import torch
from fsdp_programs import ALONE, Case
from rank_pool import pool_of
from safetensors.torch import load_file, save_file
from tiny_models import make_model, make_tokenizer, save_tiny_model

torch.set_num_threads(1)
NORMS = 5 * 32 * 4 * 2
"""Bytes of rows that do not divide, at most."""


pool = pool_of(3, "pending_programs")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    model = make_model("llama", vocab_size=97)
    model.generation_config.eos_token_id = [1, 4]
    model.save_pretrained(base / "untied", max_shard_size="20KB")
    make_tokenizer().save_pretrained(base / "untied")
    assert (base / "untied" / "model.safetensors.index.json").is_file(), "in several files"
    save_tiny_model(base / "tied", "qwen2", tie_word_embeddings=True)
    return {name: str(base / name) for name in ("untied", "tied")}


def file_bytes(folder: str) -> int:
    return sum(t.nbytes for path in Path(folder).glob("*.safetensors") for t in load_file(path).values())


@pytest.mark.parametrize(
    ("name", "world", "dtype"), [("untied", 3, "float32"), ("tied", 2, "float32"), ("tied", 2, "bfloat16")]
)
def test_each_rank_reads_its_rows_and_trains_what_one_device_trains(pool, folders, name, world, dtype):
    case = Case(folders[name], dtype=dtype)
    alone = fsdp_programs.alone(programs.loaded, dataclasses.replace(case, parallel=ALONE))
    total = file_bytes(folders[name])
    ranks = pool.run(world, programs.loaded, case)
    assert alone["read"] == [] and sum(found["read"][0] for found in ranks) == total
    for found in ranks:
        assert found["read"][0] <= total / world + NORMS and found["left"] == 0
        for key in ("attention", "eos", "parameters"):
            assert found[key] == alone[key]
        assert found["devices"] == {"cpu"} and found["notices"] == []
        for key, value in alone["start"].items():
            if key in found["start"]:
                assert np.array_equal(found["start"][key], value), key
        assert any(key.startswith(("live/", "master/")) for key in found["start"])
    if dtype == "float32":
        for key, value in alone["state"].items():
            if key.startswith("live/"):
                assert np.linalg.norm(ranks[0]["state"][key] - value) <= 5e-6 * max(np.linalg.norm(value), 1e-3), key


def test_a_frozen_reference_too(pool, folders):
    wanted = {name: p.to(torch.bfloat16).float() for name, p in make_model("llama", vocab_size=97).named_parameters()}
    for found in pool.run(2, programs.reference, Case(folders["untied"]), "bfloat16"):
        assert found["live"] == "torch.bfloat16" and len(found["read"]) == 1
        assert found["weights"].keys() == wanted.keys()
        assert all(np.array_equal(found["weights"][name], p.detach().numpy()) for name, p in wanted.items())


def test_what_cannot_be_read_by_rows_is_loaded_whole_and_told(pool, folders, tmp_path):
    found = pool.run(2, programs.loaded, Case(folders["tied"], lora=True))[0]
    assert found["read"] == [] and "adapters" in found["notices"][0]
    folder = save_tiny_model(tmp_path / "renamed", "llama")
    weights = load_file(folder / "model.safetensors")
    without = {name.removeprefix("model."): value for name, value in weights.items()}
    save_file(without, folder / "model.safetensors", metadata={"format": "pt"})
    found = pool.run(2, programs.loaded, Case(str(folder)))[1]
    assert found["read"] and found["read"][0] == 0 and "not named and shaped as the model" in found["notices"][-1]
    assert np.array_equal(found["start"]["live/model.norm.weight"], weights["model.norm.weight"].numpy())


def test_missing_and_damaged_weights_are_one_sentence_on_every_rank(pool, tmp_path):
    folder = save_tiny_model(tmp_path / "lacking", "llama")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for text in pool.run(2, programs.refused, Case(str(folder))):
        assert "lack 1 of those" in text and "model.layers.1.mlp.up_proj.weight" in text
    torn = save_tiny_model(tmp_path / "torn", "llama")
    data = (torn / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(data[: len(data) // 2])
    for text in pool.run(2, programs.refused, Case(str(torn))):
        assert str(torn) in text and "cannot be loaded" in text
    index = {"weight_map": {"a": "there-is-no-such-file.safetensors"}}
    (torn / "model.safetensors.index.json").write_text(json.dumps(index))
    for text in pool.run(2, programs.refused, Case(str(torn))):
        assert text
