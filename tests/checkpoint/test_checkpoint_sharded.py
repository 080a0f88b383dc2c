"""States that any number of ranks writes and any other number reads; the export of a sharded model; damaged bytes."""

from __future__ import annotations

import dataclasses
import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_pool import pool_of
from safetensors.torch import load_file
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

sys.path.insert(0, str(Path(__file__).parents[1] / "train_engine"))

import fsdp_programs
import sharded_programs as programs
from fsdp_programs import Case

from verl.checkpoint import read_protos, read_state, write_protos, write_state
from verl.checkpoint.pieces import PieceWriter, SavedPieces
from verl.comm import SoloComm
from verl.errors import CheckpointError
from verl.protocol import DataProto
from verl.train_engine.saved import StatePiece

torch.set_num_threads(1)


pool = pool_of(3, "sharded_programs")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return {
        "untied": str(save_tiny_model(base / "untied", "llama")),
        "tied": str(save_tiny_model(base / "tied", "llama", tie_word_embeddings=True)),
    }


def on(pool, world: int, program, case: Case, *args):
    """One device is a plain engine in this process; more ranks are sharded."""
    if world == 1:
        return fsdp_programs.alone(program, dataclasses.replace(case, parallel=fsdp_programs.ALONE), *args)
    return pool.run(world, program, case, *args)[0]


def assert_equal(one: dict, two: dict, tolerance: float) -> None:
    for name in two:
        if name.startswith("optimizer/step"):
            assert (one[name] == two[name]).all(), name
        elif name == "counters":
            assert (one[name][1:] == two[name][1:]).all(), "all but the version, which counts loads"
        elif name in one:
            scale = np.linalg.norm(one[name]) or 1.0
            assert np.linalg.norm(one[name] - two[name]) / scale < tolerance, name


@pytest.mark.parametrize("name", ["untied", "bfloat16", "adapters", "critic"])
def test_one_two_three_one_ranks_go_on_as_one_device(pool, folders, tmp_path, name):
    """1 -> 2 -> 3 -> 1 ranks, two updates on each, equal eight updates on one device."""
    case = Case(
        folders["untied" if name == "untied" else "tied"],
        kind="adamw",
        lr=1e-3,
        dtype="bfloat16" if name == "bfloat16" else "float32",
        lora=name == "adapters",
        role="critic" if name == "critic" else "actor",
    )
    places = [str(tmp_path / str(i)) for i in range(3)]
    norms = []
    for world, source, target in zip((1, 2, 3, 1), (None, *places), (*places, None), strict=True):
        last = on(pool, world, programs.go_on, case, source, target)
        norms += last["norms"]
    whole = on(pool, 1, programs.go_on, case, None, None, 8)
    tolerance = 2e-2 if name == "bfloat16" else 5e-6
    if name != "bfloat16":  # where other micro-batches alone change the norm by a tenth
        assert norms == pytest.approx(whole["norms"], rel=1e-5)
    assert last["scheduled"] == whole["scheduled"] == 8
    assert set(last["state"]) == set(whole["state"])
    if name == "bfloat16":  # and moments even more
        whole["state"] = {k: v for k, v in whole["state"].items() if not k.startswith("optimizer/exp_avg")}
    assert_equal(whole["state"], last["state"], tolerance)


def test_the_state_of_the_same_ranks_comes_back_to_the_bit(pool, folders, tmp_path):
    case = Case(folders["tied"], kind="adamw", lr=1e-3)
    first = on(pool, 2, programs.go_on, case, None, str(tmp_path))
    again = on(pool, 2, programs.go_on, case, str(tmp_path), None, 0)
    for key, value in first["state"].items():
        if key != "counters":
            assert (again["state"][key] == value).all(), key
    counters = first["state"]["counters"].copy()
    counters[0] += 1  # a load is a write
    assert (again["state"]["counters"] == counters).all()


def test_a_state_that_was_never_written_goes_on_in_any_type(pool, folders):
    """Two bf16 ranks give masters and no live weights; one device in bf16 takes them, and one in fp32 loses no bit."""
    case = Case(folders["tied"], kind="adamw", lr=1e-3, dtype="bfloat16")
    sharded = {
        key: torch.from_numpy(value) for key, value in on(pool, 2, programs.go_on, case, None, None)["state"].items()
    }
    masters = {key.removeprefix("master/"): value for key, value in sharded.items() if key.startswith("master/")}
    assert masters and not any(key.startswith("live/") for key in sharded)
    one = dataclasses.replace(case, parallel=fsdp_programs.ALONE)
    narrow = fsdp_programs.make_worker(one, SoloComm())
    wide = fsdp_programs.make_worker(dataclasses.replace(one, dtype="float32"), SoloComm())
    narrow.load_state_dict(sharded)
    for name, p in narrow.engine.module.named_parameters():
        assert torch.equal(narrow.engine.weights.masters[name], masters[name]), name
        assert p.dtype == torch.bfloat16 and torch.equal(p, masters[name].bfloat16()), name
    wide.load_state_dict(narrow.engine.state_dict())
    for name, p in wide.engine.module.named_parameters():
        assert torch.equal(p, masters[name]), name
    moment = next(key for key in sharded if key.startswith("optimizer/exp_avg/"))
    assert torch.equal(wide.engine.state_dict()[moment], sharded[moment])


def test_each_rank_writes_its_share(pool, folders, tmp_path):
    on(pool, 3, programs.go_on, Case(folders["untied"]), None, str(tmp_path), 1)
    sizes = [sum(f.stat().st_size for f in tmp_path.glob(f"pieces-{r:05d}-of-00003-*.safetensors")) for r in range(3)]
    assert max(sizes) < 1.3 * min(sizes)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3, "files have a limited size"
    saved = SavedPieces(tmp_path)
    assert pickle.loads(pickle.dumps(saved)).folder == tmp_path
    name = "live/model.embed_tokens.weight"
    whole = saved[name]
    assert whole.shape == (96, 32) and saved.shape(name) == (96, 32)
    for low, high in ((0, 96), (31, 33), (32, 32), (90, 96), (0, 1)):
        assert torch.equal(saved.rows(name, low, high), whole[low:high])


# the Hugging Face folder


def test_a_reward_model_with_adapters_is_exported_with_its_head(pool, folders, tmp_path):
    case = Case(folders["untied"])
    one, two = tmp_path / "one", tmp_path / "two"
    for place in (one, two):
        place.mkdir()
    alone = dataclasses.replace(case, parallel=fsdp_programs.ALONE)
    state = programs.export_score(SoloComm(), alone, None, str(one))
    pool.run(2, programs.export_score, case, state, str(two))
    for name in ("model.safetensors", "lora_adapter/adapter_model.safetensors"):
        expected, found = load_file(one / name), load_file(two / name)
        assert set(found) == set(expected)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, msg=key)
    assert "base_model.model.score.weight" in found
    configs = [json.loads((place / "lora_adapter/adapter_config.json").read_text()) for place in (one, two)]
    for config in configs:
        config["target_modules"] = sorted(config["target_modules"])  # a set
    assert configs[0] == configs[1] and configs[0]["modules_to_save"] == ["score"]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ["untied", "tied", "adapters", "critic", "bfloat16"])
def test_the_export_is_that_of_one_device(pool, folders, tmp_path, name, world):
    case = Case(
        folders["untied" if name in ("untied", "critic") else "tied"],
        dtype="bfloat16" if name == "bfloat16" else "float32",
        lora=name == "adapters",
        role="critic" if name == "critic" else "actor",
        cut=fsdp_programs.WHOLE if name == "bfloat16" else Case.cut,
        lr=0.0 if name == "bfloat16" else Case.lr,
    )
    one, several = tmp_path / "one", tmp_path / "several"
    one.mkdir()
    several.mkdir()
    on(pool, 1, programs.export, case, str(one), 1 << 30)
    limit = 40_000
    most = pool.run(world, programs.export, case, str(several), limit)[0]["most"]
    files = sorted(several.glob("*.safetensors"))
    assert len(files) > 1 and not list(several.glob(".part*"))
    expected, found = load_file(one / "model.safetensors"), {k: v for f in files for k, v in load_file(f).items()}
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert torch.linalg.vector_norm((found[key] - value).double()) < 5e-6 * (1 + value.double().norm()), key
    layer = max(sum(v.nbytes for k, v in expected.items() if f"layers.{i}." in k) for i in range(2))
    root = sum(v.nbytes for k, v in expected.items() if "layers." not in k)
    assert most <= limit + max(layer, root) < sum(v.nbytes for v in expected.values()) * 2
    configs = [json.loads((place / "config.json").read_text()) for place in (one, several)]
    assert configs[0] == configs[1]
    kind = AutoModelForTokenClassification if name == "critic" else AutoModelForCausalLM
    loaded = [kind.from_pretrained(place) for place in (one, several)]
    ids = torch.arange(5, 25)[None]
    torch.testing.assert_close(loaded[0](ids).logits, loaded[1](ids).logits, rtol=1e-5, atol=1e-5)
    if name != "critic":
        assert {f.name for f in one.iterdir()} - {"model.safetensors"} <= {f.name for f in several.iterdir()}
    if name == "adapters":
        adapters = [load_file(place / "lora_adapter" / "adapter_model.safetensors") for place in (one, several)]
        assert set(adapters[0]) == set(adapters[1])
        for key, value in adapters[0].items():
            torch.testing.assert_close(adapters[1][key], value, rtol=1e-4, atol=1e-6)


def test_the_export_never_holds_the_model(pool, tmp_path):
    """With more layers the host holds no more: peak bytes do not grow with the model."""
    peaks, totals = [], []
    for layers in (4, 12):
        folder = str(save_tiny_model(tmp_path / f"m{layers}", "llama", num_hidden_layers=layers))
        target = tmp_path / f"out{layers}"
        target.mkdir()
        peaks.append(pool.run(2, programs.export, Case(folder), str(target), 50_000)[0]["most"])
        totals.append(sum(f.stat().st_size for f in target.glob("*.safetensors")))
    assert peaks[0] == peaks[1] and totals[1] > 2 * totals[0] and peaks[1] < totals[1] / 4


# damage


def pieces_of_two(folder: Path) -> dict[str, torch.Tensor]:
    """Written by two ranks, by hand."""
    whole = {"live/a": torch.randn(5, 3), "live/b": torch.randn(1, 2)}
    for rank in range(2):
        pieces = {
            n: StatePiece(t[rank * 3 : rank * 3 + 3], tuple(t.shape), min(rank * 3, len(t))) for n, t in whole.items()
        }
        if rank == 0:
            pieces["counters"] = StatePiece.whole(torch.tensor([1, 2]))
            pieces["optimizer/step/a"] = StatePiece.whole(torch.tensor(7.0))
        PieceWriter(folder)(rank, 2, pieces)
    return whole | {"counters": torch.tensor([1, 2]), "optimizer/step/a": torch.tensor(7.0)}


def test_pieces_come_back_whole(tmp_path):
    whole = pieces_of_two(tmp_path)
    saved = SavedPieces(tmp_path)
    assert set(saved) == set(whole) and all(torch.equal(saved[name], whole[name]) for name in whole)
    assert "live/c" not in saved
    with pytest.raises(KeyError):
        saved["live/c"]


def test_a_master_serves_as_live_weight(tmp_path):
    PieceWriter(tmp_path)(0, 1, {"master/a": StatePiece.whole(torch.ones(2))})
    saved = SavedPieces(tmp_path)
    assert "live/a" in saved and torch.equal(saved["live/a"], torch.ones(2)) and list(saved) == ["master/a"]


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(bytes(data))


def test_a_flipped_bit_in_a_tensor_is_found_when_it_is_read(tmp_path):
    pieces_of_two(tmp_path)
    path = tmp_path / "pieces-00001-of-00002-00001.safetensors"
    size = path.stat().st_size
    flip(path, -3)
    assert path.stat().st_size == size
    saved = SavedPieces(tmp_path)
    with pytest.raises(CheckpointError, match=r"the bytes of 'live/a' in pieces-00001.* checksum differs"):
        saved["live/a"]
    assert saved["counters"].tolist() == [1, 2], "what lies elsewhere can be read"


def test_a_flipped_bit_in_the_state_of_the_run_is_found(tmp_path):
    write_state(tmp_path, {"w": torch.arange(100)}, {"a": np.arange(300), "step": 12})
    write_protos(tmp_path, {"left": DataProto.from_dict(tensors={"x": torch.arange(50)})})
    kept = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert len(kept) == 5
    for path, data in kept.items():
        flip(path, len(data) // 2 if path.suffix == ".json" else -3)
        with pytest.raises(CheckpointError, match=r"damaged|changed|checksum"):
            read_state(tmp_path)
            read_protos(tmp_path)
        path.write_bytes(data)
    assert read_state(tmp_path)[1]["step"] == 12 and set(read_protos(tmp_path)) == {"left"}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("rank gone", "part of rank 1 is missing"),
        ("another run", "is of another run"),
        ("file gone", "is missing"),
        ("hole", "not all there|do not fit"),
        ("outside", "names the file"),
        ("format", "format"),
        ("nothing", "no saved state"),
    ],
)
def test_damaged_pieces_are_clear_errors(tmp_path, damage, words):
    pieces_of_two(tmp_path)
    index = tmp_path / "pieces-00001-of-00002.json"
    document = json.loads(index.read_text())
    del document["crc32"]
    if damage == "rank gone":
        index.unlink()
    elif damage == "another run":
        PieceWriter(tmp_path)(0, 3, {})
    elif damage == "file gone":
        (tmp_path / "pieces-00001-of-00002-00001.safetensors").unlink()
    elif damage == "nothing":
        for path in tmp_path.iterdir():
            path.unlink()
    else:
        place = document["tensors"]["live/a"]
        if damage == "hole":
            place["start"] = 4
        elif damage == "outside":
            place["file"] = "../x.safetensors"
        else:
            document["format"] = "verl.pieces/9"
        index.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=words):
        SavedPieces(tmp_path)["live/a"]
