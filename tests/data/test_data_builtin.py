"""Data without files, and a user's own dataset class."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from data_helpers import byte_tokenizer, text_rows, user, write_jsonl

import verl.data
from verl.config.tree.data import CustomClass, Data
from verl.data.build import build_prompt_dataset
from verl.data.builtin import arithmetic_task, builtin_prompts
from verl.data.loader import PromptLoader
from verl.data.rl_dataset import PromptDataset
from verl.errors import DataError

TOKENIZER = byte_tokenizer()
CLASS = """
class Mine:
    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        self.limit = config.max_prompt_length
    def __len__(self):
        return 3
    def __getitem__(self, item):
        return {items}[item]

class Subclass:
    pass
"""


@pytest.mark.parametrize("high", [9, 20])
def test_arithmetic_problems_are_right_and_disjoint(high):
    train, validation = arithmetic_task("train", high), arithmetic_task("validation", high)
    pairs = [{(row["extra_info"]["x"], row["extra_info"]["y"]) for row in rows} for rows in (train, validation)]
    assert len(pairs[0]) + len(pairs[1]) == high * high == len(train) + len(validation)
    assert not pairs[0] & pairs[1]
    assert all((7 * x + 3 * y) % 4 == 0 for x, y in pairs[1])
    for row in train + validation:
        x, y = row["extra_info"]["x"], row["extra_info"]["y"]
        assert row["prompt"] == f"1+2=3\n4+5=9\n{x}+{y}=" and row["data_source"] == "verl/arithmetic"
        assert row["reward_model"] == {"style": "rule", "ground_truth": str(x + y)}
    assert arithmetic_task(seed=1) == arithmetic_task(seed=1) != arithmetic_task(seed=2)
    dataset = PromptDataset(train, TOKENIZER)
    assert TOKENIZER.decode(dataset[0]["prompt_ids"]) == train[0]["prompt"]


def test_wrong_arithmetic():
    with pytest.raises(DataError, match="not 'dev'"):
        arithmetic_task("dev")
    with pytest.raises(DataError, match="no validation problem"):
        arithmetic_task("validation", 1)


def test_builtin_prompts_make_a_dataset():
    dataset = PromptDataset(builtin_prompts(), TOKENIZER)
    assert len(dataset) == 16 and dataset[0]["data_source"] == "verl/builtin"
    assert len(PromptLoader(dataset, 8, epochs=1).next_batch()) == 8


def custom(tmp_path, source, name="Mine", **keys):
    file = tmp_path / "mine.py"
    file.write_text(source)
    return Data(train_files="unused", custom_cls=CustomClass(path=str(file), name=name), **keys)


def test_a_custom_class_may_give_prompts_or_ids(tmp_path):
    items = [
        {"raw_prompt": user("a"), "data_source": "s", "reward_model": {"style": "rule", "ground_truth": 1}},
        {"prompt": "bb", "index": 7},
        {"raw_prompt": "c", "prompt_ids": [5, 6]},
    ]
    dataset = build_prompt_dataset(custom(tmp_path, CLASS.replace("{items}", repr(items))), TOKENIZER)
    rows = [dataset[k] for k in range(len(dataset))]
    assert TOKENIZER.decode(rows[0]["prompt_ids"]) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(rows[1]["prompt_ids"]) == "bb"
    assert rows[2]["prompt_ids"].tolist() == [5, 6] and rows[2]["prompt_ids"].dtype == np.int64
    assert [row["index"] for row in rows] == [0, 7, 2]
    assert [row["data_source"] for row in rows] == ["s", "local/Mine", "local/Mine"]
    assert rows[0]["reward_model"] == {"style": "rule", "ground_truth": 1}
    assert len(PromptLoader(dataset, 3).next_batch()) == 3


def test_a_custom_subclass_of_the_public_dataset(tmp_path):
    source = (
        "from verl.data.rlhf_dataset import RLHFDataset\n"
        "class Mine(RLHFDataset):\n"
        "    def __getitem__(self, item):\n"
        "        return {**super().__getitem__(item), 'extra': item}\n"
    )
    data = custom(tmp_path, source, max_prompt_length=8)
    data.train_files = str(write_jsonl(tmp_path / "a.jsonl", text_rows(4)))
    batch = PromptLoader(build_prompt_dataset(data, TOKENIZER), 4, shuffle=False).next_batch()
    assert batch.non_tensor_batch["extra"].tolist() == [0, 1, 2, 3] and batch.batch is None


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("class Mine:\n    def\n", "Mine", r"mine\.py, line 2: invalid syntax|mine\.py, line 2"),
        ("import nothing_like_this\n", "Mine", r"fails when imported \(line 1\): ModuleNotFoundError"),
        ("class Mine: pass\n", "Mime", r"no class 'Mime' .*did you mean Mine\?"),
        ("Mine = 3\n", "Mine", r"no class 'Mine'"),
        ("class Mine: pass\n", None, r"set data\.custom_cls\.name"),
    ],
)
def test_custom_classes_that_cannot_be_loaded(tmp_path, source, name, message):
    with pytest.raises(DataError, match=message):
        build_prompt_dataset(custom(tmp_path, source, name), TOKENIZER)


def test_custom_file_that_is_missing(tmp_path):
    data = custom(tmp_path, "class Mine: pass\n")
    data.custom_cls.path = str(tmp_path / "mien.py")
    with pytest.raises(DataError, match=r"no such data file: .*did you mean .*mine\.py"):
        build_prompt_dataset(data, TOKENIZER)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("[1, 2]", "item 0: an item must be a dict, got list"),
        ("{'text': 'x'}", r"item 0: no raw_prompt and no 'prompt' \(data\.prompt_key\); it has text"),
        ("{'prompt': 'x' * 600}", "item 0: prompt length 600 > max_prompt_length 512"),
        ("{'prompt': 'x', 'prompt_ids': []}", "at least one token"),
    ],
)
def test_wrong_items_of_a_custom_class(tmp_path, item, message):
    dataset = build_prompt_dataset(custom(tmp_path, CLASS.replace("{items}", f"[{item}]")), TOKENIZER)
    with pytest.raises(DataError, match=message):
        dataset[0]


def test_names_of_the_package_and_what_importing_it_costs():
    for name in verl.data.__all__:
        assert getattr(verl.data, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        verl.data.nothing  # noqa: B018
    code = "import sys, verl.data.preprocess as _, verl.data.builtin as _; "
    code += "print({'torch', 'transformers', 'ray'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
