"""Tensors, plain values, batches, random states and runtime facts: what is read is what was written."""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.checkpoint import (
    environment_differences,
    read_protos,
    read_state,
    rng,
    runtime_facts,
    write_protos,
    write_state,
)
from verl.errors import CheckpointError
from verl.protocol import DataProto

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the last bit, NaN payloads included."""
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


@st.composite
def tensor(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size()
    data = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype == torch.bool:
        data = bytearray(byte % 2 for byte in data)
    value = torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
    return value.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else value


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name != "__metadata__")


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(names, tensor(), max_size=6), st.dictionaries(st.text(max_size=5), plain, max_size=4))
def test_round_trip_of_any_state(tensors, extra):
    with tempfile.TemporaryDirectory() as folder:
        write_state(folder, tensors, extra, shard_bytes=64)
        found, found_extra = read_state(folder)
        assert list(found) == list(tensors) and found_extra == extra
        assert all(same(found[key], tensors[key]) for key in tensors)


def test_every_type_and_odd_memory_layouts(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {f"dtype/{dtype}": torch.ones(3).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(3), "empty": torch.empty(0, 5), "slice": base[1:3, ::2], "view": base.T}
    tensors |= {"conjugate": torch.tensor([1 + 2j]).conj(), "parameter": torch.nn.Parameter(base)}
    tensors |= {"tied": base, "tied_again": base, "half_of_tied": base[:2]}
    write_state(tmp_path / "made" / "here", tensors, {})
    found, extra = read_state(tmp_path / "made" / "here")
    assert extra == {}
    for key, value in tensors.items():
        assert same(found[key], value.detach().resolve_conj()), key
    found["tied"][0, 0] = 99.0  # a private copy: neither its twin nor the file changes
    assert found["tied_again"][0, 0] == 0.0
    assert read_state(tmp_path / "made" / "here")[0]["tied"][0, 0] == 0.0


def test_arrays_and_metrics_among_the_plain_values(tmp_path):
    from verl.metrics import Metrics

    metrics = Metrics()
    metrics.add("loss", 0.5, weight=3)
    extra = {
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "number": np.float32(0.1),
        "tensor": torch.tensor([1, 2], dtype=torch.bfloat16),
        "nested": {"tuple": (1, [2.5, float("inf")]), "none": None},
        "metrics": metrics,
    }
    write_state(tmp_path, {}, extra)
    found = read_state(tmp_path)[1]
    assert found["array"].dtype == np.uint32 and (found["array"] == extra["array"]).all()
    assert found["number"] == np.float32(0.1) and same(found["tensor"], extra["tensor"])
    assert found["nested"] == extra["nested"] and found["metrics"].results() == {"loss": 0.5}


def test_shards_keep_to_their_size(tmp_path):
    tensors = {f"w{i}": torch.full((100,), float(i)) for i in range(10)} | {"huge": torch.zeros(1000)}
    write_state(tmp_path, tensors, {}, shard_bytes=1000)
    files = sorted(tmp_path.glob("tensors-*.safetensors"))
    assert len(files) == 6  # two of 400 bytes each, and the huge one alone
    assert all(same(read_state(tmp_path)[0][key], value) for key, value in tensors.items())


def test_reading_maps_the_file_instead_of_loading_it(tmp_path):
    size = 200_000_000
    write_state(tmp_path, {"w": torch.ones(size // 4)}, {})
    before = psutil.Process().memory_info().rss
    tensors, _ = read_state(tmp_path)
    assert psutil.Process().memory_info().rss - before < size / 10
    assert tensors["w"][-1] == 1.0


def test_writing_holds_one_shard(tmp_path):
    """Tensors made on demand (as from another device) are let go shard by shard."""
    import weakref
    from collections.abc import Mapping

    alive: list[weakref.ref] = []
    most = 0

    class OnDemand(Mapping):
        def __getitem__(self, key):
            nonlocal most
            memory = np.zeros(100, dtype=np.float32)  # lives as long as the tensor's storage
            alive.append(weakref.ref(memory))
            most = max(most, sum(ref() is not None for ref in alive))
            return torch.from_numpy(memory)

        def __iter__(self):
            return iter([f"w{i}" for i in range(20)])

        def __len__(self):
            return 20

    write_state(tmp_path, OnDemand(), {}, shard_bytes=1600)
    assert len(read_state(tmp_path)[0]) == 20
    assert most <= 5  # four of a shard, and the next


def test_what_cannot_be_saved(tmp_path):
    with pytest.raises(CheckpointError, match=r"the state 'loader' holds a builtins\.object"):
        write_state(tmp_path, {}, {"loader": {"a": [object()]}})
    with pytest.raises(CheckpointError, match=r"'w' is a Tensor with layout torch\.sparse_coo"):
        write_state(tmp_path, {"w": torch.eye(2).to_sparse()}, {})
    with pytest.raises(CheckpointError, match="__metadata__"):
        write_state(tmp_path, {"__metadata__": torch.eye(2)}, {})


def test_damaged_states_are_clear_errors(tmp_path):
    with pytest.raises(CheckpointError, match="no saved state"):
        read_state(tmp_path)
    write_state(tmp_path, {"w": torch.arange(100)}, {"a": np.arange(3)})
    index, shard = tmp_path / "state.json", tmp_path / "tensors-00001.safetensors"
    text, data = index.read_text(), shard.read_bytes()

    def broken(words: str) -> None:
        with pytest.raises(CheckpointError, match=words):
            read_state(tmp_path)
        index.write_text(text)
        shard.write_bytes(data)

    shard.write_bytes(data[:-10])
    broken("is damaged")
    shard.unlink()
    broken("missing")
    index.write_text(text[:-5])
    broken("not JSON")
    index.write_text("[]")
    broken("format")
    for key, value, words in [
        ("file", "../outside.safetensors", "names the file"),
        ("dtype", "float32", "instead of torch.float32"),
        ("dtype", "load", "unknown tensor type"),
        ("shape", [7], "instead of"),
    ]:
        document = json.loads(text)
        del document["crc32"]  # somebody who changes a file on purpose can leave the checksum out
        document["tensors"]["w"][key] = value
        index.write_text(json.dumps(document))
        broken(words)
    assert (read_state(tmp_path)[0]["w"] == torch.arange(100)).all()


def test_nothing_is_ever_unpickled(tmp_path):
    import os
    import pickle

    folder, caught = tmp_path / "state", tmp_path / "caught"

    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(caught),)

    trap = pickle.dumps(Trap())
    pickle.loads(trap)
    caught.rmdir()  # the trap works
    write_state(folder, {"w": torch.zeros(1)}, {"a": np.zeros(1)})
    write_protos(folder, {"p": DataProto.from_dict(tensors={"x": torch.zeros(1, 1)})})
    for path in [p for p in folder.rglob("*") if p.is_file()]:
        original = path.read_bytes()
        path.write_bytes(trap)
        for read in (read_state, read_protos):
            with contextlib.suppress(CheckpointError):
                read(folder)
        path.write_bytes(original)
    assert not caught.exists() and read_state(folder)[0].keys() == {"w"}


def test_batches(tmp_path):
    rows = DataProto.from_dict(
        tensors={"responses": torch.arange(6).reshape(2, 3)},
        non_tensors={"uid": np.array(["a", "b"], dtype=object)},
        meta_info={"step": 3},
    )
    protos = {"refill.prompt": rows, "a/b \u4e2d..%": rows[:1]}
    assert read_protos(tmp_path) == {}
    write_protos(tmp_path, protos)
    found = read_protos(tmp_path)
    assert set(found) == set(protos)
    for name, proto in protos.items():
        assert torch.equal(found[name].batch["responses"], proto.batch["responses"])
        assert list(found[name].non_tensor_batch["uid"]) == list(proto.non_tensor_batch["uid"])
        assert found[name].meta_info == {"step": 3}
    next((tmp_path / "protos").iterdir()).write_bytes(b"short")
    with pytest.raises(CheckpointError, match="damaged"):
        read_protos(tmp_path)


# ---- the trained state -----------------------------------------------------------------------------------------------


def test_a_training_engine_goes_on_as_if_never_stopped(tmp_path):
    from verl.metrics import Metrics
    from verl.train_engine.torch_engine import OptimizerSettings, TorchEngine

    def engine() -> TorchEngine:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        return TorchEngine(module.to(torch.bfloat16), OptimizerSettings(lr=0.01))

    def train(one: TorchEngine, seeds: range) -> None:
        for seed in seeds:
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed)).bfloat16()
            one.train_step([x], lambda micro: (one.module(micro).float().pow(2).mean(), Metrics()))
            one.schedule_step()

    whole, first, resumed = engine(), engine(), engine()
    train(whole, range(6))
    train(first, range(3))
    write_state(tmp_path, first.state_dict(), {})
    resumed.load_state_dict(read_state(tmp_path)[0])
    train(resumed, range(3, 6))
    left, right = whole.state_dict(), resumed.state_dict()
    assert left.keys() == right.keys()
    assert all(same(left[key], right[key]) for key in left if key != "counters")  # a load counts as a write


# ---- random states ---------------------------------------------------------------------------------------------------


def draws() -> tuple:
    values = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.randn(()))]
    return (*values, *torch.rand(5).tolist())


@pytest.mark.parametrize("odd", [False, True])
def test_random_states_survive_a_file(tmp_path, odd):
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    if odd:  # half of a pair of normal numbers is kept back by Python's and NumPy's generators
        random.gauss(0, 1), np.random.randn(), torch.randn(3)
    tensors, values = rng.capture()
    write_state(tmp_path, tensors, {"rng": values})
    expected = draws()
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    assert draws() != expected
    tensors, extra = read_state(tmp_path)
    rng.restore(tensors, extra["rng"])
    assert draws() == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_random_states_of_gpus():
    torch.cuda.manual_seed_all(5)
    torch.randn(3, device="cuda")
    tensors, values = rng.capture()
    assert len(tensors) == 1 + torch.cuda.device_count()
    expected = torch.randn(4, device="cuda").tolist()
    torch.cuda.manual_seed_all(6)
    rng.restore(tensors, values)
    assert torch.randn(4, device="cuda").tolist() == expected


def test_states_of_gpus_that_are_not_here_are_a_notice():
    from verl import notices

    tensors, values = rng.capture()
    more = torch.cuda.device_count() + 1
    tensors |= {f"torch_cuda_{i}": torch.zeros(16, dtype=torch.uint8) for i in range(len(tensors) - 1, more)}
    rng.restore(tensors, values)
    assert f"{more} GPUs" in notices.seen()[0]


# ---- what must be equal ----------------------------------------------------------------------------------------------


def test_runtime_facts_are_plain_and_compared(tmp_path):
    facts = runtime_facts("cpu")
    assert json.loads(json.dumps(facts)) == facts
    assert facts["torch"] == str(torch.__version__) and facts["threads"] == torch.get_num_threads()
    assert facts["device"]
    assert environment_differences(facts, runtime_facts("cpu")) == []
    changed = {**facts, "torch": "1.0", "threads": 64}
    assert environment_differences(changed, facts) == [
        f"torch 1.0 -> {facts['torch']}",
        f"CPU threads of torch 64 -> {facts['threads']}",
    ]
    assert environment_differences({}, {"cuda": "12.6"}) == ["CUDA none -> 12.6"]
    assert environment_differences({"cuda": None}, {}) == []


def test_a_number_of_threads_shows():
    threads = torch.get_num_threads()
    before = runtime_facts("cpu")
    try:
        torch.set_num_threads(threads + 1)
        assert environment_differences(before, runtime_facts("cpu")) == [
            f"CPU threads of torch {threads} -> {threads + 1}"
        ]
    finally:
        torch.set_num_threads(threads)


def test_the_folder_may_be_a_string(tmp_path):
    write_state(str(tmp_path), {"w": torch.zeros(1)}, {})
    assert Path(tmp_path, "state.json").exists() and set(read_state(str(tmp_path))[0]) == {"w"}
