"""DataProto: construction, selecting, merging, and the errors that name the key."""

import numpy as np
import pytest
import torch

from verl.errors import DataError
from verl.metrics import Metrics
from verl.protocol import (
    DataProto,
    DataProtoConfig,
    DataProtoFuture,
    DataProtoItem,
    collate_fn,
    fold_batch_dim,
    mark_padding_rows,
    pad_dataproto_to_divisor,
    pad_to_common_width,
    padding_rows,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)


def make(rows: int = 4, width: int = 3, **meta) -> DataProto:
    return DataProto.from_dict(
        {"x": torch.arange(rows * width).reshape(rows, width), "score": torch.arange(rows) / 2},
        {"uid": [f"u{row}" for row in range(rows)], "ids": [np.arange(row) for row in range(rows)]},
        meta,
    )


def test_rows_are_counted_with_and_without_tensors():
    assert len(make(4)) == 4
    assert len(DataProto.from_dict(non_tensors={"uid": ["a", "b"]})) == 2
    assert len(DataProto()) == 0
    assert len(make(4)[:0]) == 0


def test_object_columns_keep_one_object_a_row():
    data = DataProto.from_dict(non_tensors={"pairs": [[1, 2], [3, 4]], "numbers": np.array([1, 2])})
    assert data.non_tensor_batch["pairs"].shape == (2,)
    assert data.non_tensor_batch["pairs"][1] == [3, 4]
    assert data.non_tensor_batch["numbers"].dtype == object


def test_from_single_dict_sorts_tensors_from_objects():
    data = DataProto.from_single_dict({"x": torch.ones(2, 1), "uid": np.array(["a", "b"], dtype=object)}, {"k": 1})
    assert data.tensor_keys() == ["x"] and list(data.non_tensor_batch) == ["uid"] and data.meta_info == {"k": 1}
    with pytest.raises(DataError, match="'uid' is a list"):
        DataProto.from_single_dict({"uid": ["a", "b"]})


def test_construction_refuses_columns_of_different_length():
    with pytest.raises(DataError, match="'uid' has 3 rows where the batch has 2"):
        DataProto.from_dict({"x": torch.ones(2, 1)}, {"uid": ["a", "b", "c"]})
    with pytest.raises(DataError, match="differ in their first 1"):
        DataProto.from_dict({"x": torch.ones(2), "y": torch.ones(3)})
    with pytest.raises(DataError, match="'x' is a tensor and an object column"):
        DataProto.from_dict({"x": torch.ones(2)}, {"x": ["a", "b"]})
    with pytest.raises(DataError, match="'abc' is a single str"):
        DataProto.from_dict(non_tensors={"uid": "abc"})
    with pytest.raises(DataError, match="from_dict"):
        DataProto(batch={"x": torch.ones(2)})


def test_items_and_selections():
    data = make(4)
    item = data[1]
    assert isinstance(item, DataProtoItem)
    assert item.batch["x"].tolist() == [3, 4, 5] and item.non_tensor_batch["uid"] == "u1"
    assert data[-1].non_tensor_batch["uid"] == "u3"
    for index in ([2, 0, 2], np.array([2, 0, 2]), torch.tensor([2, 0, 2])):
        picked = data[index]
        assert picked.non_tensor_batch["uid"].tolist() == ["u2", "u0", "u2"]
        assert picked.batch["score"].tolist() == [1.0, 0.0, 1.0]
    assert data[torch.tensor([True, False, False, True])].non_tensor_batch["uid"].tolist() == ["u0", "u3"]
    assert data[1:4:2].non_tensor_batch["uid"].tolist() == ["u1", "u3"]
    assert data[::-1].batch["score"].tolist() == [1.5, 1.0, 0.5, 0.0]
    assert len(data[[]]) == 0 and data[[]].batch["x"].shape == (0, 3)
    assert [item.non_tensor_batch["uid"] for item in data] == ["u0", "u1", "u2", "u3"]


@pytest.mark.parametrize("index", [[4], [-5], [True, False], [0.5], np.zeros((2, 2), dtype=int)])
def test_impossible_indices_are_errors(index):
    with pytest.raises(DataError):
        make(4)[index]


def test_select_pop_rename():
    data = make(2, k=1, l=2)
    selected = data.select(["x"], ["uid"], ["k"])
    assert selected.tensor_keys() == ["x"] and list(selected.non_tensor_batch) == ["uid"]
    assert selected.meta_info == {"k": 1}
    assert data.select().tensor_keys() == ["x", "score"]
    deep = data.select(deepcopy=True)
    deep.batch["x"][0, 0] = 99
    assert data.batch["x"][0, 0] == 0
    shallow = data.select()
    popped = data.pop(["score"], ["ids"], ["l"])
    assert (
        popped.tensor_keys() == ["score"] and list(popped.non_tensor_batch) == ["ids"] and popped.meta_info == {"l": 2}
    )
    assert data.tensor_keys() == ["x"] and list(data.non_tensor_batch) == ["uid"] and data.meta_info == {"k": 1}
    assert shallow.tensor_keys() == ["x", "score"], "taking columns out of one batch must not take them out of another"
    assert data.rename("x", "y") is data and data.tensor_keys() == ["y"]
    with pytest.raises(DataError, match=r"no tensor 'scores' in this batch: it has 'score'"):
        make(2).select(["scores"])
    with pytest.raises(DataError, match="cannot rename"):
        make(2).rename(["x"], ["score"])


def test_union_keeps_equal_columns_and_refuses_different_ones():
    left, right = make(3), make(3)
    left.batch["score"][1] = right.batch["score"][1] = float("nan")
    left.non_tensor_batch["r"] = np.array([float("nan"), {"a": np.float32("nan")}, None], dtype=object)
    right.non_tensor_batch["r"] = np.array([float("nan"), {"a": np.float32("nan")}, None], dtype=object)
    right.batch["new"] = torch.ones(3)
    assert left.union(right) is left
    assert left.tensor_keys() == ["x", "score", "new"]
    other = make(3)
    other.batch["x"] = other.batch["x"] + 1
    other.batch["also"] = torch.ones(3)
    with pytest.raises(DataError, match="tensor 'x' is on both sides"):
        left.union(other)
    assert "also" not in left.tensor_keys(), "a refused union must change nothing"
    with pytest.raises(DataError, match="object column 'uid'"):
        make(3).union(DataProto.from_dict(non_tensors={"uid": ["a", "b", "c"]}))
    with pytest.raises(DataError, match="3 here, 2 in the other"):
        make(3).union(DataProto.from_dict({"y": torch.ones(2)}))
    with pytest.raises(DataError, match="meta_info entry 'k'"):
        make(3, k=1).union(make(3, k=2))


def test_union_into_an_empty_batch_and_of_parts():
    data = DataProto(meta_info={"k": 1}).union(make(3, l=2))
    assert len(data) == 3 and data.meta_info == {"k": 1, "l": 2}
    tensors = make(2).batch
    assert union_tensor_dict(None, tensors) is tensors
    assert list(union_numpy_dict({}, make(2).non_tensor_batch)) == ["uid", "ids"]


def test_union_does_not_change_the_shallow_copy():
    data = make(2)
    copy = data.select()
    data.union(DataProto.from_dict({"new": torch.ones(2)}))
    assert "new" not in copy.tensor_keys()


def test_concat_names_the_key_that_does_not_fit():
    with pytest.raises(DataError, match=r"tensor 'x' .* \(4, 3\), part 1 .* \(4, 5\)"):
        DataProto.concat([make(4, 3), make(4, 5)])
    other = make(4)
    other.batch["score"] = other.batch["score"].double()
    with pytest.raises(DataError, match=r"tensor 'score' .*float64"):
        DataProto.concat([make(4), other])
    with pytest.raises(DataError, match="'score' is on one side only"):
        DataProto.concat([make(4), make(4).select(["x"])])
    with pytest.raises(DataError, match="'ids' is on one side only"):
        DataProto.concat([make(4), make(4).select(None, ["uid"])])


def test_concat_passes_over_parts_without_rows():
    whole = DataProto.concat([DataProto(meta_info={"k": 1}), make(2, k=1), make(0, width=9)])
    assert len(whole) == 2 and whole.meta_info == {"k": 1}
    assert len(DataProto.concat([])) == 0
    assert DataProto.concat([DataProto(), make(0)]).tensor_keys() == ["x", "score"]


def test_concat_merges_metrics_and_refuses_other_differences():
    bags = []
    for value, weight in ((1.0, 1), (2.0, 3)):
        bag = Metrics()
        bag.add("loss", value, weight=weight)
        bags.append(bag)
    merged = DataProto.concat([make(1, metrics=bags[0]), make(1, metrics=bags[1])]).meta_info["metrics"]
    assert merged["loss"] == pytest.approx(7 / 4)
    assert bags[0]["loss"] == 1.0, "merging must leave the parts alone"

    parts = [
        make(1, t=0.5, metrics={"a": 1}),
        make(1, t=0.5, metrics=[{"a": 2}, {"b": 3}]),
        make(1, metrics={"a": [4, 5]}),
    ]
    assert DataProto.concat(parts).meta_info == {"t": 0.5, "metrics": {"a": [1, 2, 4, 5], "b": [3]}}
    with pytest.raises(DataError, match=r"meta_info\['t'\]"):
        DataProto.concat([make(1, t=0.5), make(1, t=0.6)])
    with pytest.raises(DataError, match="use one form"):
        DataProto.concat([make(1, metrics=Metrics()), make(1, metrics={"a": 1})])


def test_pad_to_common_width_then_concat():
    def part(prompt: int, response: int) -> DataProto:
        return DataProto.from_dict(
            {
                "prompts": torch.ones(1, prompt, dtype=torch.long),
                "responses": torch.ones(1, response, dtype=torch.long),
                "response_mask": torch.ones(1, response, dtype=torch.bool),
                "hidden": torch.ones(1, response, 2),
            }
        )

    table = {"prompts": 7, "responses": 8, "response_mask": False, "hidden": 0.5, "not there": 1}
    whole = DataProto.concat(pad_to_common_width([part(2, 3), part(3, 1)], table, {"prompts"}))
    assert whole.batch["prompts"].tolist() == [[7, 1, 1], [1, 1, 1]]
    assert whole.batch["responses"].tolist() == [[1, 1, 1], [1, 8, 8]]
    assert whole.batch["response_mask"].tolist() == [[True] * 3, [True, False, False]]
    assert whole.batch["hidden"][1, :, 0].tolist() == [1, 0.5, 0.5]


def test_two_rows_padded_to_eight_and_back():
    data = make(2)
    padded, extra = pad_dataproto_to_divisor(data, 8)
    assert extra == 6 and padded.non_tensor_batch["uid"].tolist() == ["u0", "u1"] * 4
    assert unpad_dataproto(padded, extra).batch["x"].equal(data.batch["x"])
    assert pad_dataproto_to_divisor(make(0), 8)[1] == 0
    with pytest.raises(DataError, match="3 padding rows"):
        unpad_dataproto(data, 3)
    with pytest.raises(DataError, match="positive"):
        pad_dataproto_to_divisor(data, 0)


def test_marked_padding_counts_for_nothing_and_leaves_the_source_alone():
    data = DataProto.from_dict(
        {"response_mask": torch.ones(3, 2, dtype=torch.long), "score_valid": torch.ones(3, dtype=torch.bool)},
        {"uid": ["a", "b", "a"], "sample_id": ["a/0", "b/0", "a/1"]},
    )
    padded = mark_padding_rows(*pad_dataproto_to_divisor(data, 5))
    assert padded.batch["response_mask"].sum(1).tolist() == [2, 2, 2, 0, 0]
    assert padded.batch["score_valid"].tolist() == [True, True, True, False, False]
    assert padding_rows(padded).tolist() == [False, False, False, True, True]
    assert len(set(padded.non_tensor_batch["sample_id"])) == 5
    assert not padding_rows(data).any() and data.batch["response_mask"].all()
    fixed_width = DataProto(non_tensor_batch={"uid": np.array(["a", "b"])})
    assert padding_rows(mark_padding_rows(fixed_width, 1)).tolist() == [False, True]
    same = mark_padding_rows(data.select(), 1)
    assert same.batch["response_mask"][2].sum() == 0 and data.batch["response_mask"].all()


def test_padding_in_place():
    for candidate, row in (("first", "u0"), ("last", "u2")):
        data = make(3)
        data.padding(2, candidate)
        assert data.non_tensor_batch["uid"].tolist() == ["u0", "u1", "u2", row, row] and len(data.batch) == 5
    with pytest.raises(DataError, match="'middle'"):
        make(3).padding(1, "middle")


def test_chunk_is_equal_unless_padding_is_enabled(monkeypatch):
    with pytest.raises(DataError, match="10 rows cannot be cut into 3"):
        make(10).chunk(3)
    padded = DataProto.from_dict({"x": torch.arange(10)}, auto_padding=True)
    assert padded.is_padding_enabled() and [len(part) for part in padded.chunk(3)] == [4, 3, 3]
    monkeypatch.setattr(DataProtoConfig, "auto_padding", True)
    assert [len(part) for part in make(2).chunk(3)] == [1, 1, 0]


def test_join_goes_by_id():
    samples = DataProto.from_dict({"x": torch.arange(4)}, {"uid": ["b", "a", "b", "a"]}, {"k": 1})
    prompts = DataProto.from_dict({"baseline": torch.tensor([1.0, 2.0, 3.0])}, {"uid": ["a", "b", "unused"]}, {"l": 2})
    joined = samples.join(prompts, on="uid")
    assert joined.batch["baseline"].tolist() == [2, 1, 2, 1] and joined.batch["x"].tolist() == [0, 1, 2, 3]
    assert joined.meta_info == {"k": 1, "l": 2}
    assert samples.tensor_keys() == ["x"], "join must not change its sides"


def test_join_names_missing_and_double_ids():
    def ids(column, values):
        return DataProto.from_dict(non_tensors={column: values})

    with pytest.raises(DataError, match=r"'u0', 'u1', 'u2', 'u3', 'u4' and 2 more has no row .* \(7 of 8"):
        ids("uid", [f"u{i}" for i in range(8)]).join(ids("uid", ["u7"]))
    with pytest.raises(DataError, match="'a' is more than once on the right side"):
        ids("uid", ["a"]).join(ids("uid", ["a", "a"]))
    with pytest.raises(DataError, match="'a/0' is more than once on the left side"):
        ids("sample_id", ["a/0", "a/0"]).join(ids("sample_id", ["a/0"]), on="sample_id")
    with pytest.raises(DataError, match="no object column"):
        ids("uid", ["a"]).join(ids("sample_id", ["a/0"]), on="sample_id")
    left, right = make(2), make(2).select_idxs([1, 0])
    assert left.join(right).batch["x"].equal(left.batch["x"]), "equal after matching"
    right.batch["x"] = right.batch["x"] + 1
    with pytest.raises(DataError, match="tensor 'x'"):
        left.join(right)


def test_iterator_covers_every_row_each_epoch():
    data = make(6)
    seen = [part.batch["score"].tolist() for part in data.make_iterator(2, 2)]
    assert seen == [[0, 0.5], [1, 1.5], [2, 2.5]] * 2
    shuffled = [
        [row for part in data.make_iterator(3, 2, seed, {"shuffle": True}) for row in part.batch["score"].tolist()]
        for seed in (1, 1, 2)
    ]
    assert shuffled[0] == shuffled[1] != shuffled[2]
    assert sorted(shuffled[0][:6]) == [0, 0.5, 1, 1.5, 2, 2.5]
    with pytest.raises(DataError, match="6 rows do not divide into mini-batches of 4"):
        data.make_iterator(4, 1)


def test_collate_undoes_iteration():
    data = make(3, k=1)
    again = collate_fn(list(data))
    assert again.batch["x"].equal(data.batch["x"]) and again.meta_info == {"k": 1}
    assert again.non_tensor_batch["uid"].tolist() == data.non_tensor_batch["uid"].tolist()
    assert len(collate_fn([])) == 0


def test_repeat_orders():
    data = make(2)
    assert data.repeat(2, interleave=True).batch["score"].tolist() == [0, 0, 0.5, 0.5]
    assert data.repeat(2, interleave=False).batch["score"].tolist() == [0, 0.5, 0, 0.5]
    assert make(3).sample_level_repeat([2, 0, 1]).non_tensor_batch["uid"].tolist() == ["u0", "u0", "u2"]
    with pytest.raises(DataError, match="one count"):
        make(3).sample_level_repeat([1, 1])


def test_reorder_needs_a_permutation():
    data = make(3)
    data.reorder(torch.tensor([2, 0, 1]))
    assert data.non_tensor_batch["uid"].tolist() == ["u2", "u0", "u1"] and data.batch["score"].tolist() == [1, 0, 0.5]
    with pytest.raises(DataError, match="exactly once"):
        data.reorder([0, 0, 1])


def test_folding_and_unfolding():
    data = make(6)
    folded = fold_batch_dim(data, 2)
    assert folded.batch["x"].shape == (2, 3, 3) and folded.non_tensor_batch["uid"].shape == (2, 3) and len(folded) == 2
    again = unfold_batch_dim(folded)
    assert again.batch["x"].equal(data.batch["x"])
    assert again.non_tensor_batch["uid"].tolist() == data.non_tensor_batch["uid"].tolist()
    with pytest.raises(DataError, match="6 rows cannot be folded into 4"):
        fold_batch_dim(data, 4)


def test_unfold_column_chunks():
    data = DataProto.from_dict(
        {"pair": torch.arange(8).reshape(2, 4), "x": torch.arange(2)}, {"words": [list("abcd"), list("efgh")]}
    )
    unfolded = data.unfold_column_chunks(2, ["pair", "words"])
    assert unfolded.batch["pair"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert unfolded.batch["x"].tolist() == [0, 0, 1, 1]
    assert unfolded.non_tensor_batch["words"].tolist() == [["a", "b"], ["c", "d"], ["e", "f"], ["g", "h"]]
    with pytest.raises(DataError, match="'pair' is 4 wide"):
        data.unfold_column_chunks(3, ["pair"])


def test_tensordict_round_trip():
    data = DataProto.from_dict(
        {"x": torch.ones(2, 3)}, {"info": [{"a": 1}, None]}, {"temperature": 0.7, "names": ["a"]}
    )
    again = DataProto.from_tensordict(data.to_tensordict())
    assert again.batch["x"].equal(data.batch["x"]) and again.meta_info == data.meta_info
    assert again.non_tensor_batch["info"].tolist() == [{"a": 1}, None]
    objects = DataProto.from_dict(non_tensors={"info": [[1], [2]]})
    assert DataProto.from_tensordict(objects.to_tensordict()).non_tensor_batch["info"].tolist() == [[1], [2]]


def test_summary_and_device(capsys):
    data = make(2, k=1)
    info = data.get_data_info()
    assert "batch.x: torch.int64 (2, 3) on cpu" in info and "non_tensor_batch.uid: (2,) of str" in info
    data.print_size("before")
    assert capsys.readouterr().out.startswith("before: 0.0000 GiB")
    assert data.to("cpu") is data


def test_futures_concat_chunk_and_get():
    from concurrent.futures import Future

    parts: list[Future] = [Future(), Future()]
    future = DataProtoFuture.concat(parts)
    halves = future.chunk(2)
    assert not future.done()
    parts[1].set_result(make(2)[1:])
    parts[0].set_result(make(3))
    assert future.done() and len(future.get()) == 4
    assert [half.get().non_tensor_batch["uid"].tolist() for half in halves] == [["u0", "u1"], ["u2", "u1"]]
    quarter = halves[1].chunk(2)[1]
    assert quarter.get().non_tensor_batch["uid"].tolist() == ["u1"]
