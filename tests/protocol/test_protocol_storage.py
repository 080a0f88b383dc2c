"""DataProto between processes (pickle) and on disk (safetensors + JSON)."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from verl.errors import DataError
from verl.metrics import Metrics
from verl.protocol import DataProto, deserialize_single_tensor, deserialize_tensordict, serialize_tensordict
from verl.protocol.columns import same_value

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def rich() -> DataProto:
    metrics = Metrics()
    metrics.add("loss", 0.1, weight=3)
    metrics.add("most", 7, reduce="max")
    base = torch.arange(12).reshape(2, 6)
    tensors = {str(dtype): torch.tensor([[0, 1, 2], [3, 0, 1]]).to(dtype) for dtype in DTYPES}
    tensors |= {"prompts": base[:, :2], "responses": base[:, 2:], "input_ids": base, "empty": torch.zeros(2, 0)}
    cells = [None, True, 2**70, 1.5, float("nan"), float("-inf"), "text \u4e2d", [1, [2]], (1, "a"), {"k": {"n": 1}}]
    cells += [b"raw\x00", np.float32(0.1), np.int64(3), np.arange(5), np.zeros((2, 0)), np.array(["a", "bc"])]
    cells += [torch.ones(2, dtype=torch.bfloat16), {"$": "dict", "at": 1}, np.array([1, "x"], dtype=object)]
    columns = {"uid": ["a", "b"], "cells": [cells, cells[::-1]], "prompt_ids": [np.arange(3), np.arange(1)]}
    return DataProto.from_dict(tensors, columns, {"metrics": metrics, "step": 3, "nested": {"list": [1, 2.5]}})


def assert_same(left: DataProto, right: DataProto) -> None:
    assert left.tensor_keys() == right.tensor_keys()
    for key in left.tensor_keys():
        assert same_value(left.batch[key], right.batch[key]), key
    assert same_value(left.non_tensor_batch, right.non_tensor_batch)
    assert same_value(left.meta_info, right.meta_info)
    for mine, other in zip(left.non_tensor_batch["cells"][0], right.non_tensor_batch["cells"][0], strict=True):
        assert type(mine) is type(other)


def test_pickle_round_trip():
    data = rich()
    for protocol in (4, 5):
        assert_same(data, pickle.loads(pickle.dumps(data, protocol=protocol)))
    empty = pickle.loads(pickle.dumps(DataProto(meta_info={"k": 1})))
    assert len(empty) == 0 and empty.meta_info == {"k": 1}


def test_pickle_of_a_slice_carries_only_its_rows():
    big = DataProto.from_dict({"x": torch.zeros(10_000, 8)})
    assert len(pickle.dumps(big[3:4])) < 2_000


def test_pickle_moves_buffers_out_of_band_and_read_only_ones_are_copied():
    data = DataProto.from_dict({"x": torch.arange(1000.0)})
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    assert len(head) < 1_000 and sum(buffer.raw().nbytes for buffer in buffers) == 4_000
    again = pickle.loads(head, buffers=[bytes(buffer.raw()) for buffer in buffers])
    again.batch["x"][0] = 5.0
    assert again.batch["x"][:2].tolist() == [5, 1]


def test_unpickled_tensors_are_free_of_gradients_and_writable():
    data = DataProto.from_dict({"x": torch.ones(2, requires_grad=True)})
    again = pickle.loads(pickle.dumps(data))
    again.batch["x"] += 1
    assert not again.batch["x"].requires_grad and again.batch["x"].tolist() == [2, 2]


def test_encoded_tensordict_is_plain_numpy():
    batch_size, tensors = serialize_tensordict(rich().batch)
    assert batch_size == (2,) and all(isinstance(data, np.ndarray) for _, _, data in tensors.values())
    assert deserialize_tensordict((batch_size, tensors))["input_ids"].equal(rich().batch["input_ids"])
    name, shape, data = tensors["empty"]
    assert deserialize_single_tensor((name, shape, data)).shape == (2, 0)


def test_sparse_tensors_are_refused_when_pickled():
    data = DataProto.from_dict({"x": torch.eye(2).to_sparse()})
    with pytest.raises(DataError, match="only dense tensors"):
        pickle.dumps(data)


def test_disk_round_trip(tmp_path):
    path = tmp_path / "batch.safetensors"
    rich().save_to_disk(path)
    assert_same(rich(), DataProto.load_from_disk(path))
    assert [file.name for file in tmp_path.iterdir()] == ["batch.safetensors"]
    for data in (DataProto(meta_info={"k": 1}), rich()[:0], rich().select([])):
        data.save_to_disk(path)
        again = DataProto.load_from_disk(path)
        assert len(again) == len(data) and again.tensor_keys() == data.tensor_keys()
        assert same_value(again.meta_info, data.meta_info)


class Stranger:
    pass


@pytest.mark.parametrize("value", [Stranger(), {1: "int key"}, {1, 2}, lambda: 0, np.array(["2020"], "datetime64[Y]")])
def test_unknown_objects_are_refused_with_their_place(tmp_path, value):
    data = DataProto.from_dict(non_tensors={"info": [None, {"deep": [value]}]})
    with pytest.raises(DataError, match="object column 'info', row 1, h"):
        data.save_to_disk(tmp_path / "x")
    with pytest.raises(DataError, match="meta_info h"):
        DataProto(meta_info={"k": value}).save_to_disk(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_loading_never_unpickles(tmp_path):
    path = tmp_path / "evil"
    marker = tmp_path / "ran"
    path.write_bytes(pickle.dumps(Evil(marker)))
    with pytest.raises(DataError, match="not read, because unpickling runs code"):
        DataProto.load_from_disk(path)
    assert not marker.exists()
    pickle.loads(path.read_bytes())
    assert marker.exists(), "the file would have run its code"


def test_wrong_files_are_named(tmp_path):
    with pytest.raises(DataError, match="there is no file"):
        DataProto.load_from_disk(tmp_path / "absent")
    save_file({"x": torch.ones(1)}, tmp_path / "weights")
    with pytest.raises(DataError, match="not one that"):
        DataProto.load_from_disk(tmp_path / "weights")
    rich().save_to_disk(tmp_path / "cut")
    whole = (tmp_path / "cut").read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="damaged"):
        DataProto.load_from_disk(tmp_path / "cut")
