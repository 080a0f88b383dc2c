"""Properties of DataProto's row algebra, on batches of every shape."""

import copy
import pickle

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.protocol import DataProto, fold_batch_dim, pad_dataproto_to_divisor, unfold_batch_dim, unpad_dataproto
from verl.protocol.columns import same_array, same_tensor

CELLS = st.one_of(st.none(), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=3))


@st.composite
def batches(draw: st.DrawFn, min_rows: int = 0) -> DataProto:
    rows = draw(st.integers(min_rows, 9))
    width = draw(st.integers(0, 3))
    values = draw(st.lists(st.floats(width=32), min_size=rows * width, max_size=rows * width))
    tensors = {"f": torch.tensor(values, dtype=torch.float32).reshape(rows, width), "row": torch.arange(rows)}
    columns = {"cell": draw(st.lists(CELLS, min_size=rows, max_size=rows)), "uid": [f"u{row}" for row in range(rows)]}
    kind = draw(st.sampled_from(["both", "tensors", "objects"]))
    return DataProto.from_dict(
        None if kind == "objects" else tensors, None if kind == "tensors" else columns, {"step": draw(st.integers())}
    )


def same(left: DataProto, right: DataProto) -> bool:
    return (
        len(left) == len(right)
        and left.tensor_keys() == right.tensor_keys()
        and all(same_tensor(left.batch[key], right.batch[key]) for key in left.tensor_keys())
        and left.non_tensor_batch.keys() == right.non_tensor_batch.keys()
        and all(same_array(value, right.non_tensor_batch[key]) for key, value in left.non_tensor_batch.items())
        and left.meta_info == right.meta_info
    )


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 5), st.integers(1, 4))
def test_chunk_and_split_then_concat_is_the_identity(data, chunks, size):
    data.meta_info["_verl_auto_padding"] = True
    parts = data.chunk(chunks)
    assert len(parts) == chunks and max(map(len, parts)) - min(map(len, parts)) <= 1
    assert same(DataProto.concat(parts), data)
    if len(data):
        assert same(DataProto.concat(data.split(size)), data)


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 8))
def test_pad_then_unpad_is_the_identity(data, divisor):
    padded, extra = pad_dataproto_to_divisor(data, divisor)
    assert len(padded) % divisor == 0 and 0 <= extra < divisor
    assert same(unpad_dataproto(padded, extra), data)
    if extra:
        assert same(padded[len(data) :], data.select_idxs(np.arange(extra) % len(data)))


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 3), st.booleans())
def test_repeat_is_selection(data, times, interleave):
    rows = list(range(len(data)))
    order = [row for row in rows for _ in range(times)] if interleave else rows * times
    assert same(data.repeat(times, interleave), data.select_idxs(order))
    assert same(data.sample_level_repeat([times] * len(data)), data.repeat(times, interleave=True))


@settings(max_examples=60, deadline=None)
@given(batches(), st.randoms(use_true_random=False))
def test_reorder_by_a_permutation_and_its_inverse(data, random):
    order = list(range(len(data)))
    random.shuffle(order)
    moved = data.select()
    moved.reorder(order)
    assert same(moved, data.select_idxs(order))
    moved.reorder(np.argsort(order))
    assert same(moved, data)


@settings(max_examples=60, deadline=None)
@given(batches(min_rows=1), st.randoms(use_true_random=False))
def test_union_with_a_copy_of_itself_passes_and_join_undoes_shuffling(data, random):
    twin = copy.deepcopy(data)
    assert same(data.select().union(twin), data)
    if "uid" in data.non_tensor_batch:
        order = list(range(len(data)))
        random.shuffle(order)
        assert same(
            data.select(["row"] if data.batch is not None else None, ["uid"]).join(data.select_idxs(order)),
            reorder_keys(data),
        )


def reorder_keys(data: DataProto) -> DataProto:
    """``data`` with "row" and "uid" first, the order in which the join above makes its columns."""
    keys = sorted(data.tensor_keys(), key=lambda key: key != "row")
    return data.select(keys if data.batch is not None else None)


@settings(max_examples=40, deadline=None)
@given(batches())
def test_pickle_and_deepcopy_are_the_identity(data):
    assert same(pickle.loads(pickle.dumps(data)), data)
    assert same(copy.deepcopy(data), data)


@settings(max_examples=40, deadline=None)
@given(batches(min_rows=1), st.integers(1, 3))
def test_fold_then_unfold_is_the_identity(data, inner):
    whole = data.repeat(inner)
    assert same(unfold_batch_dim(fold_batch_dim(whole, len(data))), whole)


@settings(max_examples=40, deadline=None)
@given(batches())
def test_disk_round_trip(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("disk") / "batch"
    data.save_to_disk(path)
    again = DataProto.load_from_disk(path)
    assert same(again, data)
