"""Every layout becomes the same prompt row; wrong rows are named."""

from __future__ import annotations

import numpy as np
import pytest
from data_helpers import user

from verl.data.messages import check_messages, plain
from verl.data.preprocess import GSM8K_INSTRUCTION
from verl.data.schemas import Layout, detect_layout, prompt_row, rows_from_prompts
from verl.errors import DataError
from verl.notices import reset, seen

WHERE = "f.jsonl, line 3"


def convert(row, prompt_key="prompt", **keys):
    return prompt_row(row, detect_layout(list(row), prompt_key, "f.jsonl"), WHERE, prompt_key=prompt_key, **keys)


@pytest.mark.parametrize(
    ("row", "prompt", "source", "style", "truth"),
    [
        ({"prompt": "1+1="}, "1+1=", "local", "none", None),
        ({"prompt": user("hi"), "ground_truth": 2}, user("hi"), "local", "reference", 2),
        ({"prompt": "x", "ground_truth": [1], "data_source": "s"}, "x", "s", "rule", [1]),
        ({"prompt": "x", "response": "r"}, "x", "local", "reference", "r"),
        ({"instruction": "Do", "input": "this", "output": "o"}, user("Do\n\nthis"), "local", "reference", "o"),
        ({"instruction": "Do", "input": "", "output": "o"}, user("Do"), "local", "reference", "o"),
        ({"instruction": "Do", "input": None, "output": "o"}, user("Do"), "local", "reference", "o"),
        ({"instruction": "Do", "context": "c", "response": "r"}, user("Do\n\nc"), "local", "reference", "r"),
        ({"question": "q", "answer": "42"}, user("q"), "local", "reference", "42"),
        (
            {"question": "q", "answer": "so #### 1,234.5"},
            user(f"q {GSM8K_INSTRUCTION}"),
            "openai/gsm8k",
            "rule",
            "1234.5",
        ),
        ({"messages": [*user("q"), {"role": "assistant", "content": "a"}]}, user("q"), "local", "reference", "a"),
        (
            {
                "chosen": [*user("q"), {"role": "assistant", "content": "a"}],
                "rejected": [*user("q"), {"role": "assistant", "content": "b"}],
            },
            user("q"),
            "local",
            "none",
            None,
        ),
        ({"prompt": "x", "chosen": "c", "rejected": "r"}, "x", "local", "none", None),
    ],
)
def test_layouts(row, prompt, source, style, truth):
    done = convert(row)
    assert done["raw_prompt"] == prompt
    assert done["data_source"] == source
    assert done["reward_model"] == {"style": style, "ground_truth": truth}
    assert done["extra_info"] == {}
    assert {name: done[name] for name in row if name != "data_source"} == {
        name: value for name, value in row.items() if name != "data_source"
    }


def test_keys_name_other_columns():
    row = {"problem": "p", "solution": "s", "kind": "math"}
    done = convert(row, prompt_key="problem", answer_key="solution", source_key="kind")
    assert (done["raw_prompt"], done["data_source"]) == ("p", "math")
    assert done["reward_model"] == {"style": "rule", "ground_truth": "s"}
    with pytest.raises(DataError, match=r"no column 'gold' \(data.answer_key\)"):
        convert(row, prompt_key="problem", answer_key="gold")


@pytest.mark.parametrize("truth", ["42", 42, [1, 2], {"a": None}, np.int64(3), 1.5])
def test_ground_truth_is_passed_on_unchanged(truth):
    model = {"style": "rule", "ground_truth": truth}
    assert convert({"prompt": "x", "reward_model": model})["reward_model"]["ground_truth"] is truth


def test_extra_info_is_a_dict_of_plain_values():
    assert convert({"prompt": "x", "extra_info": None})["extra_info"] == {}
    info = convert({"prompt": "x", "extra_info": {"i": np.int64(3), "a": np.array([1, 2])}})["extra_info"]
    assert info == {"i": 3, "a": [1, 2]} and type(info["i"]) is int
    with pytest.raises(DataError, match="'extra_info' must be a dict"):
        convert({"prompt": "x", "extra_info": "no"})


def test_unknown_layout_names_columns_and_key():
    with pytest.raises(DataError, match=r"no column 'prompt': its columns are text, label; set data\.prompt_key"):
        detect_layout(["text", "label"], "prompt", "f.jsonl")
    with pytest.raises(DataError, match="no column 'problem'"):  # a key that was set is meant
        detect_layout(["instruction", "output"], "problem", "f.jsonl")
    assert detect_layout(["instruction", "output"], "prompt", "f.jsonl") is Layout.ALPACA


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": None}, "column 'prompt' is null"),
        ({"prompt": 3}, "a prompt is text or a list of messages, got int"),
        ({"prompt": {"role": "user", "content": "x"}}, "got dict"),
        ({"prompt": []}, "the prompt has no messages"),
        ({"prompt": ["hello"]}, "message 0: a message is a dict"),
        ({"prompt": [{"content": "x"}]}, "message 0: the message has no role"),
        ({"prompt": [*user("x"), {"role": "tool", "content": None}]}, "message 1: the tool message has no content"),
        ({"prompt": [{"role": "assistant", "content": None}]}, "the assistant message has no content"),
        ({"prompt": [{"role": "user", "content": 7}]}, "content must be text, got int"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "a part of type 'image'"),
        ({"prompt": [{"role": "assistant", "content": "a"}]}, "only an assistant message"),
        ({"prompt": "x", "reward_model": "42"}, "'reward_model' must be a dict"),
        ({"instruction": None, "output": "x"}, "column 'instruction' must be text, got null"),
        ({"question": "q", "answer": "#### none"}, "no number after '####'"),
        ({"chosen": "a", "rejected": "b"}, "also needs a 'prompt' column"),
        ({"chosen": user("a"), "rejected": user("b")}, "do not begin with the same message"),
    ],
)
def test_wrong_rows_are_named(row, message):
    with pytest.raises(DataError, match=message) as caught:
        convert(row)
    assert str(caught.value).startswith(WHERE)


@pytest.mark.parametrize("layout", list(Layout))
def test_a_row_without_the_columns_of_its_file_is_named(layout):
    with pytest.raises(DataError, match=r"^f\.jsonl, line 3: "):
        prompt_row({"other": 1}, layout, WHERE)


def test_messages_as_pandas_and_columnar_files_give_them():
    array = np.array([{"role": "user", "content": "x", "name": None, "tool_calls": None}], dtype=object)
    assert check_messages(array, WHERE) == user("x")
    assert check_messages(({"role": "user", "content": "x"},), WHERE) == user("x")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert check_messages([{"role": "user", "content": parts}], WHERE) == user("ab")
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}
    assert check_messages([*user("x"), call], WHERE)[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": 1}],
    }


def test_reserved_columns_are_renamed_with_a_notice():
    reset()
    done = convert({"prompt": "x", "uid": "mine", "index": 9})
    assert done["dataset_uid"] == "mine" and "uid" not in done
    assert done["dataset_index"] == 9 and "index" not in done
    assert any("'uid'" in text for text in seen())


def test_rows_from_prompts():
    assert [convert(row)["raw_prompt"] for row in rows_from_prompts(["a", user("b")])] == ["a", user("b")]


def test_plain_makes_new_containers():
    inner = {"a": (1, np.float32(2))}
    assert plain(inner) == {"a": [1, 2.0]}
    assert plain(inner) is not inner
