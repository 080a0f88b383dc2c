"""Batches: every row once an epoch, and a resumed order that equals the uninterrupted one."""

from __future__ import annotations

import json

import numpy as np
import pytest
from data_helpers import byte_tokenizer, text_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.data.collate import collate_prompts
from verl.data.loader import PromptLoader, validation_batches
from verl.data.rl_dataset import PromptDataset
from verl.data.sampler import PromptSampler, choose_subset, permutation
from verl.errors import DataError
from verl.notices import reset, seen

DATASETS = {rows: PromptDataset(text_rows(rows), byte_tokenizer()) for rows in range(1, 14)}
SIZES = st.integers(1, 13)


def take(loader, steps):
    """(row, uid) of the next ``steps`` batches, fewer at the end."""
    batches = []
    for _ in range(steps):
        try:
            batch = loader.next_batch()
        except StopIteration:
            break
        batches.append(list(zip(batch.non_tensor_batch["index"], batch.non_tensor_batch["uid"], strict=True)))
    return batches


@settings(deadline=None, max_examples=60)
@given(
    rows=SIZES, size=SIZES, shuffle=st.booleans(), short=st.booleans(), stop=st.integers(0, 30), seed=st.integers(0, 9)
)
def test_resume_at_any_point_equals_never_having_stopped(rows, size, shuffle, short, stop, seed):
    size = size if short else min(size, rows)
    keys = {"shuffle": shuffle, "seed": seed, "last_batch": "short" if short else "drop", "epochs": 3}
    whole = take(PromptLoader(DATASETS[rows], size, **keys), 100)
    first = PromptLoader(DATASETS[rows], size, **keys)
    before = take(first, stop)
    state = json.loads(json.dumps(first.state_dict()))
    second = PromptLoader(DATASETS[rows], size, **keys)
    second.load_state_dict(state)
    assert before + take(second, 100) == whole
    assert len(whole) == first.total_steps == 3 * first.steps_per_epoch


@settings(deadline=None, max_examples=60)
@given(rows=SIZES, size=SIZES, shuffle=st.booleans())
def test_each_row_exactly_once_an_epoch(rows, size, shuffle):
    loader = PromptLoader(DATASETS[rows], size, shuffle=shuffle, last_batch="short", epochs=2)
    batches = list(loader)
    drawn = [row for batch in batches for row in batch.non_tensor_batch["index"]]
    assert sorted(drawn[:rows]) == sorted(drawn[rows:]) == list(range(rows))
    uids = [uid for batch in batches for uid in batch.non_tensor_batch["uid"]]
    assert len(set(uids)) == 2 * rows
    assert all(0 < len(batch) <= size for batch in batches)


@settings(deadline=None, max_examples=60)
@given(rows=SIZES, counts=st.lists(st.integers(1, 20), max_size=6), stop=st.integers(0, 6))
def test_draws_follow_one_order_however_they_are_cut(rows, counts, stop):
    whole = PromptSampler(rows, shuffle=True, seed=3).take(sum(counts))
    sampler = PromptSampler(rows, shuffle=True, seed=3)
    pieces = []
    for number, count in enumerate(counts):
        if number == stop:
            state = sampler.state_dict()
            sampler = PromptSampler(rows, shuffle=True, seed=3)
            sampler.load_state_dict(state)
        pieces.extend(sampler.take(count))
    assert pieces == whole
    for start in range(0, len(whole) - rows + 1, rows):
        assert sorted(draw.row for draw in whole[start : start + rows]) == list(range(rows))


def test_draw_continues_into_the_next_epoch_and_ends_with_the_last():
    loader = PromptLoader(DATASETS[5], 2, seed=1, epochs=2)
    first = loader.draw(3).non_tensor_batch["uid"].tolist()
    second = loader.draw(4).non_tensor_batch["uid"].tolist()
    assert first + second == ["e0.0", "e0.1", "e0.2", "e0.3", "e0.4", "e1.0", "e1.1"]
    assert loader.epoch == 1
    assert loader.draw(99).non_tensor_batch["uid"].tolist() == ["e1.2", "e1.3", "e1.4"]
    with pytest.raises(StopIteration):
        loader.draw(1)


def test_resume_at_the_border_of_an_epoch_does_the_second_epoch():
    loader = PromptLoader(DATASETS[12], 2, epochs=2)
    assert len(take(loader, 6)) == 6
    resumed = PromptLoader(DATASETS[12], 2, epochs=2)
    resumed.load_state_dict(loader.state_dict())
    rest = take(resumed, 100)
    assert len(rest) == 6 and rest[0][0][1] == "e1.0"


def test_1024_of_1000_rows_drawn_are_24_into_the_second_epoch():
    sampler = PromptSampler(1000, shuffle=True, seed=0)
    for _ in range(8):
        sampler.take(128)
    assert (sampler.epoch, sampler.position) == (1, 24)


def test_the_batch_size_may_change_on_resume():
    first = PromptLoader(DATASETS[12], 4, seed=2)
    take(first, 2)
    other = PromptLoader(DATASETS[12], 2, seed=2)
    other.load_state_dict(first.state_dict())
    rest = [row for batch in take(other, 2) for row, _ in batch]
    assert rest == permutation(12, 2, 0)[8:].tolist()


def test_resume_with_other_data_or_order():
    state = PromptLoader(DATASETS[12], 2, seed=2).state_dict()
    with pytest.raises(DataError, match="made with 12 prompts, the data now gives 11"):
        PromptLoader(DATASETS[11], 2, seed=2).load_state_dict(state)
    reset()
    other = PromptLoader(DATASETS[12], 2, seed=9)
    other.load_state_dict(state)
    assert take(other, 3) == take(PromptLoader(DATASETS[12], 2, seed=2), 3)
    assert any("goes on as the checkpoint has it (seed 2" in text for text in seen())


RECORDED = ([7, 1, 6, 4, 3, 5, 0, 2], [4, 5, 3, 0, 2, 7, 1, 6], [33, 35, 50, 63])


def test_the_order_is_the_recorded_one():
    """Fails if the order ever changes, for then old checkpoints would resume with other rows."""
    assert permutation(8, 42, 0).tolist() == RECORDED[0]
    assert permutation(8, 42, 1).tolist() == RECORDED[1]
    assert choose_subset(100, 4, 42).tolist() == RECORDED[2]
    assert permutation(5, -1, 0).tolist() == permutation(5, 2**64 - 1, 0).tolist()


def test_fewer_rows_than_a_batch():
    with pytest.raises(DataError, match=r"the dataset has 7 rows, fewer than data\.train_batch_size=8"):
        PromptLoader(DATASETS[7], 8)
    assert len(PromptLoader(DATASETS[7], 8, last_batch="short").next_batch()) == 7
    reset()
    loader = PromptLoader(DATASETS[9], 8, epochs=1)
    assert loader.steps_per_epoch == 1 and len(take(loader, 5)) == 1
    assert any("1 row unused per epoch: 9 rows in batches of 8" in text for text in seen())
    for wrong in ({"batch_size": 0}, {"batch_size": 2, "last_batch": "keep"}):
        with pytest.raises(DataError):
            PromptLoader(DATASETS[9], **wrong)


def test_without_an_end_it_goes_on():
    loader = PromptLoader(DATASETS[3], 2)
    assert loader.total_steps is None and len(take(loader, 20)) == 20


@pytest.mark.parametrize("size", [None, 1, 5, 13, 20])
@pytest.mark.parametrize("shuffle", [False, True])
def test_validation_gives_every_row_exactly_once(size, shuffle):
    batches = list(validation_batches(DATASETS[13], size, shuffle=shuffle))
    pairs = {
        (uid, row)
        for batch in batches
        for uid, row in zip(batch.non_tensor_batch["uid"], batch.non_tensor_batch["index"], strict=True)
    }
    assert pairs == {(f"v{row}", row) for row in range(13)}
    assert sum(len(batch) for batch in batches) == 13
    if size:
        assert [len(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1)
    with pytest.raises(DataError, match="val_batch_size=0"):
        next(validation_batches(DATASETS[3], 0))


def test_collate_keeps_objects_and_tells_equal_texts_apart():
    rows = [{"prompt": "same", "reward_model": {"ground_truth": k}} for k in (1, 2)]
    dataset = PromptDataset(rows, byte_tokenizer())
    batch = collate_prompts([dataset[0], {**dataset[1], "more": 1, "input_ids": np.zeros(3)}], ["a", "b"])
    columns = batch.non_tensor_batch
    assert batch.batch is None and batch.meta_info == {} and len(batch) == 2
    assert all(column.shape == (2,) and column.dtype == object for column in columns.values())
    assert columns["uid"].tolist() == ["a", "b"] and columns["more"].tolist() == [None, 1]
    assert [model["ground_truth"] for model in columns["reward_model"]] == [1, 2]
    assert "input_ids" not in columns and columns["prompt_ids"][0].dtype == np.int64
    with pytest.raises(ValueError, match="different uids"):
        collate_prompts([dataset[0], dataset[1]], ["a", "a"])
