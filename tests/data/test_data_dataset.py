"""The prompt dataset: rows ready for generation, and every mistake found before training."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from data_helpers import byte_tokenizer, text_rows, user, write_jsonl

from verl.config.tree.data import Data
from verl.data import rl_dataset
from verl.data.build import build_prompt_dataset, build_train_loader
from verl.data.rl_dataset import PromptDataset
from verl.data.rlhf_dataset import RLHFDataset
from verl.errors import ConfigError, DataError
from verl.notices import reset, seen

TOKENIZER = byte_tokenizer()
GSM8K = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "gsm8k"


@pytest.fixture(autouse=True)
def _fresh_notices():
    reset()


def test_items_hold_the_prompt_row():
    rows = [{"prompt": "ab", "difficulty": 3}, {"prompt": user("c"), "data_source": "s", "extra_info": {"index": 7}}]
    dataset = PromptDataset(rows, TOKENIZER)
    first, second = dataset[0], dataset[1]
    assert first["prompt_ids"].dtype == np.int64 and TOKENIZER.decode(first["prompt_ids"]) == "ab"
    assert {key: value for key, value in first.items() if key != "prompt_ids"} == {
        "prompt": "ab",
        "raw_prompt": "ab",
        "difficulty": 3,
        "data_source": "local/rows",
        "reward_model": {"style": "none", "ground_truth": None},
        "extra_info": {},
        "index": 0,
    }
    assert TOKENIZER.decode(second["prompt_ids"]).endswith("c<|im_end|>\n<|im_start|>assistant\n")
    assert (second["index"], second["extra_info"], second["data_source"]) == (1, {"index": 7}, "s")
    assert TOKENIZER.decode(dataset[-1]["prompt_ids"]) == TOKENIZER.decode(second["prompt_ids"])
    with pytest.raises(IndexError):
        dataset[2]


def test_an_item_is_new_each_time():
    dataset = PromptDataset([{"prompt": "a", "extra_info": {"k": [1]}}], TOKENIZER)
    dataset[0]["extra_info"]["k"].append(2)
    dataset[0]["prompt_ids"][0] = 99
    assert dataset[0]["extra_info"] == {"k": [1]} and TOKENIZER.decode(dataset[0]["prompt_ids"]) == "a"


@pytest.mark.parametrize(("how", "kept"), [("left", (46, 558)), ("right", (0, 512)), ("middle", None), ("error", None)])
def test_a_prompt_of_558_tokens_against_512(tmp_path, how, kept):
    text = "".join(chr(97 + k % 26) for k in range(558))
    file = write_jsonl(tmp_path / "train.jsonl", [{"prompt": "ok"}, {"prompt": text}])
    if how == "error":
        with pytest.raises(
            DataError, match=r"train\.jsonl, line 2 \(row 1\): prompt length 558 > max_prompt_length 512"
        ):
            PromptDataset(file, TOKENIZER, {"max_prompt_length": 512})
        return
    dataset = PromptDataset(file, TOKENIZER, {"max_prompt_length": 512, "truncation": how})
    expected = text[slice(*kept)] if kept else text[:256] + text[-256:]
    assert TOKENIZER.decode(dataset[1]["prompt_ids"]) == expected
    assert dataset[1]["raw_prompt"] == text
    assert dataset.report.truncated == 1
    assert any("1 of 2 prompts are cut to 512 tokens" in text for text in seen())


def test_overlong_filter_counts_and_tells():
    rows = [{"prompt": "a" * length} for length in (3, 9, 4, 8)]
    dataset = PromptDataset(rows, TOKENIZER, {"max_prompt_length": 5, "filter_overlong_prompts": True})
    assert [dataset[k]["index"] for k in range(len(dataset))] == [0, 2]
    assert (dataset.report.rows, dataset.report.kept, dataset.report.overlong, dataset.report.longest) == (4, 2, 2, 9)
    assert any("2 of 4 prompts are longer than 5 tokens (longest 9)" in text for text in seen())
    assert dataset.where(1) == "rows, row 2"
    with pytest.raises(DataError, match=r"4 of 4 prompts are longer than 2 tokens .* none is left"):
        PromptDataset(rows, TOKENIZER, {"max_prompt_length": 2, "filter_overlong_prompts": True})


def test_the_filter_sees_the_tools_that_generation_sees():
    rows = [{"prompt": user("a" * 10)}]
    tools = [{"type": "function", "function": {"name": "add", "description": "d" * 60}}]
    bare = len(PromptDataset(rows, TOKENIZER)[0]["prompt_ids"])
    config = {"max_prompt_length": bare + 7, "filter_overlong_prompts": True}
    assert len(PromptDataset(rows, TOKENIZER, config)) == 1
    with pytest.raises(DataError, match="none is left"):
        PromptDataset(rows, TOKENIZER, config, tools=tools)
    with pytest.raises(DataError, match="none is left"):
        PromptDataset(rows, TOKENIZER, {**config, "apply_chat_template_kwargs": {"tools": tools}})


def test_rows_that_the_template_refuses():
    strict = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[0].content }}"
    )
    tokenizer = byte_tokenizer(chat_template=strict)
    bad = {"prompt": [{"role": "system", "content": "s"}, *user("x")]}
    rows = [{"prompt": user(f"q{k}")} for k in range(9)]
    rows.insert(4, bad)
    dataset = PromptDataset(rows, tokenizer, {"filter_overlong_prompts": True})
    assert len(dataset) == 9 and dataset.report.failed == 1
    assert any("failed on 1 of 10 rows; the first: rows, row 4: TemplateError: no system" in text for text in seen())
    with pytest.raises(DataError, match="failed on 1 of 10 rows"):
        PromptDataset(rows, tokenizer)
    with pytest.raises(DataError, match="failed on 2 of 2 rows"):
        PromptDataset([bad, bad], tokenizer, {"filter_overlong_prompts": True})


def test_empty_prompts_are_errors():
    with pytest.raises(DataError, match=r"rows, row 1: the prompt is empty"):
        PromptDataset([{"prompt": "a"}, {"prompt": ""}], TOKENIZER)


def test_max_samples_is_the_same_seeded_subset_each_time():
    def kept(**keys):
        dataset = PromptDataset(text_rows(50), TOKENIZER, max_samples=5, **keys)
        return [dataset[k]["index"] for k in range(len(dataset))]

    assert kept() == kept() != list(range(5))
    assert len(set(kept(seed=1))) == 5 and kept(seed=1) == kept(seed=1) != kept(seed=2)
    assert any("5 of 50 rows are used (max_samples), drawn with seed 42" in text for text in seen())
    assert kept(shuffle=False) == list(range(5))
    assert len(PromptDataset(text_rows(3), TOKENIZER, max_samples=9)) == 3
    with pytest.raises(DataError, match="max_samples=0"):
        PromptDataset(text_rows(3), TOKENIZER, max_samples=0)


def test_files_of_different_layouts_together(tmp_path):
    chat = write_jsonl(tmp_path / "chat.jsonl", [{"prompt": user("a")}])
    alpaca = write_jsonl(tmp_path / "alpaca.jsonl", [{"instruction": "b", "output": "o"}])
    dataset = PromptDataset([chat, alpaca], TOKENIZER)
    assert [dataset[k]["raw_prompt"] for k in range(2)] == [user("a"), user("b")]
    assert [dataset[k]["data_source"] for k in range(2)] == ["local/chat", "local/alpaca"]


def test_wrong_settings_are_all_named():
    with pytest.raises(ConfigError) as caught:
        PromptDataset(text_rows(1), TOKENIZER, {"truncation": "lef", "max_prompt_length": 0, "apply_chat_template": 3})
    assert len(caught.value.problems) == 3
    with pytest.raises(ConfigError, match=r"data\.max_promt_length: did you mean max_prompt_length\?"):
        PromptDataset(text_rows(1), TOKENIZER, {"max_promt_length": 5})
    with pytest.raises(ConfigError, match=r"data\.maxsamples"):
        PromptDataset(text_rows(1), TOKENIZER, maxsamples=5)
    with pytest.raises(ConfigError, match="is a dict or a dataclass"):
        PromptDataset(text_rows(1), TOKENIZER, "512")
    PromptDataset(text_rows(1), TOKENIZER, {"train_files": "x", "return_raw_chat": True, "apply_chat_template": "true"})


def test_a_large_dataset_shows_progress(monkeypatch, capsys):
    monkeypatch.setattr(rl_dataset, "PROGRESS_FROM", 10)
    assert len(PromptDataset(text_rows(9), TOKENIZER)) == 9 and "Reading prompts" not in capsys.readouterr().out
    assert len(PromptDataset(text_rows(10), TOKENIZER)) == 10 and "Reading prompts" in capsys.readouterr().out


def test_media_columns_are_noticed():
    PromptDataset([{"prompt": "a", "images": [1]}], TOKENIZER)
    assert any("'images'" in text for text in seen())


def test_rlhf_dataset_reads_the_alpaca_parquet_of_the_first_steps(tmp_path):
    data = {"instruction": ["写诗", "b", "c"], "input": ["", "", ""], "output": ["x", "y", "z"]}
    pd.DataFrame(data).to_parquet(tmp_path / "train.parquet", index=False)
    config = {"max_prompt_length": 128, "max_response_length": 128}
    dataset = RLHFDataset(data_files=str(tmp_path / "train.parquet"), tokenizer=TOKENIZER, config=config)
    item = dataset[0]
    assert len(dataset) == 3 and item["reward_model"] == {"style": "reference", "ground_truth": "x"}
    assert item["input_ids"].shape == item["attention_mask"].shape == item["position_ids"].shape == (128,)
    length = len(item["prompt_ids"])
    assert item["input_ids"][-length:].tolist() == item["prompt_ids"].tolist()
    assert set(item["input_ids"][:-length].tolist()) == {TOKENIZER.pad_token_id}
    assert item["attention_mask"].sum() == length and item["position_ids"][-1] == length - 1
    with pytest.raises(DataError, match=r"prompt length .* > max_prompt_length 16"):
        RLHFDataset(str(tmp_path / "train.parquet"), TOKENIZER, config, max_prompt_length=16)
    cut = RLHFDataset(str(tmp_path / "train.parquet"), TOKENIZER, {"max_prompt_length": 16, "truncation": "left"})
    assert [len(cut[k]["prompt_ids"]) for k in range(3)] == [16] * 3
    assert len(RLHFDataset(str(tmp_path / "train.parquet"), TOKENIZER, max_samples=2)) == 2


def test_built_from_the_configuration(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", text_rows(20))
    data = Data(
        train_files=str(file), val_files=[str(file)], train_max_samples=8, val_max_samples=3, train_batch_size=4
    )
    train = build_prompt_dataset(data, TOKENIZER, seed=5)
    validation = build_prompt_dataset(data, TOKENIZER, "validation")
    assert len(train) == 8 and [validation[k]["index"] for k in range(3)] == [0, 1, 2]
    loader = build_train_loader(train, data, epochs=2, seed=5)
    assert loader.total_steps == 4
    data.train_files = None
    with pytest.raises(DataError, match=r"data\.train_files is not set"):
        build_prompt_dataset(data, TOKENIZER)
    assert len(build_prompt_dataset(data, TOKENIZER, files=text_rows(5))) == 5


def test_any_dataclass_with_the_names_is_a_configuration():
    @dataclass
    class Mine:
        max_prompt_length: int = 3
        truncation: str = "right"

    assert len(PromptDataset([{"prompt": "abcdef"}], TOKENIZER, Mine())[0]["prompt_ids"]) == 3


@pytest.mark.skipif(not GSM8K.is_dir(), reason=f"the GSM8K files are not at {GSM8K}")
def test_all_of_gsm8k_is_ready_in_seconds():
    start = time.process_time()
    dataset = PromptDataset(str(GSM8K / "train.jsonl"), TOKENIZER, {"max_prompt_length": 1500})
    seconds = time.process_time() - start
    assert len(dataset) == 7473 and dataset[0]["reward_model"] == {"style": "rule", "ground_truth": "72"}
    assert seconds < 20, f"{seconds:.1f} s of CPU"
