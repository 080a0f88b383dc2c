"""Public cases B43 to B50: prompts, filters, batches of rows."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_models import make_tokenizer

from verl import notices
from verl.config import fit_batch_to_rows, load_config
from verl.data import (
    PreferenceDataset,
    PromptDataset,
    PromptLoader,
    SFTDataset,
    UnpairedDataset,
    build_prompt_dataset,
    collate_pairs,
    collate_sequences,
    collate_unpaired,
)
from verl.errors import ConfigError, DataError
from verl.rewards import default_compute_score

LONG = "ab" * 279  # 558 tokens: a token a character


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def texts(count):
    return [{"prompt": f"p{k}"} for k in range(count)]


def test_B43_a_prompt_that_is_too_long_names_its_row_or_is_cut_as_asked(tokenizer):
    rows = [{"prompt": "ok"}, {"prompt": LONG}]
    with pytest.raises(DataError, match=r"row 1: prompt length 558 > max_prompt_length 512"):
        PromptDataset(rows, tokenizer, max_prompt_length=512, truncation="error")
    whole = tokenizer(LONG)["input_ids"]
    for how, right in (("left", whole[-512:]), ("right", whole[:512]), ("middle", whole[:256] + whole[-256:])):
        cut = PromptDataset(rows, tokenizer, max_prompt_length=512, truncation=how)[1]["prompt_ids"]
        assert cut.tolist() == right


def test_B44_the_filter_counts_what_the_rollout_is_given():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for t in tools or [] %}{{ t.text }}{% endfor %}" + tokenizer.chat_template
    rows = [{"prompt": [{"role": "user", "content": "x" * n}]} for n in (470, 10)]
    bare = PromptDataset(rows, tokenizer, max_prompt_length=512, filter_overlong_prompts=True)
    assert bare.report.kept == 2
    tools = [{"text": "t" * 60}]
    data = PromptDataset(rows, tokenizer, max_prompt_length=512, filter_overlong_prompts=True, tools=tools)
    assert data.report.kept == 1 and data.report.overlong == 1 and data[0]["index"] == 1
    assert any("1 of 2 prompts are longer than 512" in line for line in notices.seen())
    assert len(data[0]["prompt_ids"]) == len(bare[1]["prompt_ids"]) + 60
    assert all(len(data[k]["prompt_ids"]) <= 512 for k in range(len(data)))


def test_B45_a_template_that_raises_is_told_and_all_failing_is_an_error():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('no such turn') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    chat = [[{"role": "user", "content": "bad" if k == 4 else f"q{k}"}] for k in range(10)]
    data = PromptDataset([{"prompt": m} for m in chat], tokenizer, filter_overlong_prompts=True)
    assert (data.report.kept, data.report.failed, data.report.overlong) == (9, 1, 0)
    assert any(
        "failed on 1 of 10 rows" in line and "no such turn" in line and "row 4" in line for line in notices.seen()
    )
    with pytest.raises(DataError, match=r"failed on 2 of 2 rows.*no such turn"):
        PromptDataset([{"prompt": chat[4]}] * 2, tokenizer, filter_overlong_prompts=True)


def test_B46_fewer_rows_than_a_batch_is_an_error_with_both_numbers(tokenizer):
    data = PromptDataset(texts(7), tokenizer)
    with pytest.raises(DataError, match=r"7 rows.*train_batch_size=8"):
        PromptLoader(data, 8)
    with pytest.raises(ConfigError, match=r"train_batch_size=8 is more than the 7 rows"):
        fit_batch_to_rows(load_config(["data.train_batch_size=8"]), 7)
    nine = PromptLoader(PromptDataset(texts(9), tokenizer), 8, epochs=2)
    assert nine.steps_per_epoch == 1 and [len(batch) for batch in nine] == [8, 8]
    assert any("1 row unused per epoch" in line for line in notices.seen())
    short = PromptLoader(PromptDataset(texts(9), tokenizer), 8, epochs=1, last_batch="short")
    assert [len(batch) for batch in short] == [8, 1]


def test_B48_a_subset_depends_on_a_logged_seed_alone(tokenizer):
    picked = []
    for _ in range(2):
        data = PromptDataset(texts(50), tokenizer, shuffle=True, seed=None, max_samples=5)
        picked.append([data[k]["index"] for k in range(5)])
    assert picked[0] == picked[1] and len(set(picked[0])) == 5
    (line,) = [line for line in notices.seen() if "drawn with seed" in line]
    seed = int(line.rsplit(" ", 1)[1])
    again = PromptDataset(texts(50), tokenizer, shuffle=True, seed=seed, max_samples=5)
    assert [again[k]["index"] for k in range(5)] == picked[0]
    other = PromptDataset(texts(50), tokenizer, shuffle=True, seed=seed + 1, max_samples=5)
    assert [other[k]["index"] for k in range(5)] != picked[0]


def test_B49_metadata_of_a_newer_datasets_package_is_not_read(tokenizer, tmp_path):
    features = {"info": {"features": {"prompt": {"_type": "List", "feature": {"_type": "FromTheFuture"}}}}}
    table = pa.table({"prompt": [[{"role": "user", "content": "hi"}]]})
    file = tmp_path / "new.parquet"
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(features)}), file)
    assert PromptDataset(file, tokenizer)[0]["raw_prompt"] == [{"role": "user", "content": "hi"}]


def test_B50_extra_info_and_ground_truth_of_any_type(tokenizer):
    rows = [
        {"prompt": "a", "extra_info": {"index": np.int64(3)}, "reward_model": {"ground_truth": 42}},
        {"prompt": "b", "extra_info": None, "reward_model": {"ground_truth": ["x", {"y": 1}]}},
        {"prompt": "c", "reward_model": {"ground_truth": {"z": None}}},
    ]
    data = PromptDataset(rows, tokenizer)
    assert [data[k]["extra_info"] for k in range(3)] == [{"index": 3}, {}, {}]
    assert type(data[0]["extra_info"]["index"]) is int
    assert [data[k]["reward_model"]["ground_truth"] for k in range(3)] == [42, ["x", {"y": 1}], {"z": None}]
    assert (
        default_compute_score("openai/gsm8k", "#### 42", 42)
        == default_compute_score("openai/gsm8k", "#### 42", "42")
        == 1.0
    )
    batch = PromptLoader(data, 3, shuffle=False).next_batch()
    assert len(set(batch.non_tensor_batch["uid"])) == 3  # groups are draws, never extra_info.index


def test_a_column_that_only_some_rows_have_reaches_the_batch_of_every_row(tiny_model_dir, tmp_path):
    """JSON lines need not agree in their fields; a batch without a field is a batch with None there."""
    from trainer_helpers import SETTINGS
    from trainer_rewards import digits_share

    from verl.trainer.base import Trainer

    rows = [{"prompt": f"{k}+1=", "data_source": "toy"} for k in range(24)]
    rows[0]["early"], rows[20]["late"] = "x", "y"
    values = {
        **SETTINGS, "actor_rollout_ref.model.path": str(tiny_model_dir), "trainer.default_local_dir": str(tmp_path),
        "reward.reward_fn": digits_share, "data.shuffle": False, "trainer.total_training_steps": 6,
        "data.train_batch_size": 4, "actor_rollout_ref.rollout.n": 2,
    }  # fmt: skip
    trainer = Trainer(load_config(values=values), train_rows=rows)
    trainer.fit()
    assert trainer.global_steps == 6


@pytest.mark.parametrize("kind", ["answers", "pairs", "labels"])
def test_a_column_that_only_some_texts_have_is_in_every_batch(tokenizer, kind):
    pairs = [{"prompt": f"{k}", "chosen": "a", "rejected": "b"} for k in range(6)]
    dataset, rows = {
        "answers": (SFTDataset, [{"prompt": f"{k}", "response": "a"} for k in range(6)]),
        "pairs": (PreferenceDataset, pairs),
        "labels": (UnpairedDataset, [{"prompt": f"{k}", "completion": "a", "label": k % 2 == 0} for k in range(6)]),
    }[kind]
    collate = {"answers": collate_sequences, "pairs": collate_pairs, "labels": collate_unpaired}[kind]
    rows[4]["late"] = "x"
    loader = PromptLoader(dataset(rows, tokenizer), 3, shuffle=False, collate=partial(collate, pad_id=0))
    batches = [loader.next_batch() for _ in range(2)]
    first, second = (batch.non_tensor_batch["late"].tolist() for batch in batches)
    assert set(first) == {None} and set(second) == {None, "x"}
    assert set(batches[0].non_tensor_batch) == set(batches[1].non_tensor_batch)


OWN_DATASET = """
class Own:
    def __init__(self, **_):
        pass
    def __len__(self):
        return 24
    def __getitem__(self, i):
        return {"raw_prompt": f"{i}+1=", **({"early": "x"} if i == 0 else {})}
"""


def test_a_dataset_of_ones_own_may_leave_columns_out(tiny_model_dir, tmp_path):
    """A run over all of it: the batches after the first have no item with the column."""
    from trainer_helpers import make_trainer

    file = tmp_path / "own.py"
    file.write_text(OWN_DATASET)
    config = load_config([f"data.custom_cls.path={file}", "data.custom_cls.name=Own"])
    data = build_prompt_dataset(config.data, make_tokenizer(), files=[])
    assert [data[k]["early"] for k in (0, 1, 23)] == ["x", None, None]
    trainer = make_trainer(
        tiny_model_dir, tmp_path / "run", data__custom_cls__path=str(file), data__custom_cls__name="Own",
        data__shuffle=False, trainer__total_training_steps=3,
    )  # fmt: skip
    trainer.fit()
    assert trainer.global_steps == 3
