"""Pairs and labelled answers: prompts, cuts, wrong rows, batches."""

from functools import partial

import numpy as np
import pytest
import torch
from data_helpers import byte_tokenizer, user, write_jsonl

from verl import notices
from verl.algorithms.preference import PairRows, PreferenceSettings, pair_logps, pair_loss
from verl.data import (
    PreferenceDataset,
    PromptLoader,
    PromptTemplate,
    UnpairedDataset,
    collate_pairs,
    collate_unpaired,
    mismatched,
)
from verl.data.sequences import cut, split
from verl.errors import DataError
from verl.models.packing import rows_of

PLAIN = byte_tokenizer(chat_template=None)
CHAT = byte_tokenizer()
# As many templates do: a default system text where a conversation has none.
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nhelp<|im_end|>\n{% endif %}" + CHAT.chat_template
)
SYSTEM = {"role": "system", "content": "s"}


def assistant(text):
    return [{"role": "assistant", "content": text}]


def texts(tokenizer, row, **config):
    item = PreferenceDataset([row], tokenizer, config)[0]
    assert item["chosen_mask"].all() and item["rejected_mask"].all()
    return [tokenizer.decode(item[key]) for key in ("prompt_ids", "chosen_ids", "rejected_ids")]


def test_plain_pairs():
    assert texts(PLAIN, {"prompt": "q:", "chosen": "yes", "rejected": "no"}) == ["q:", "yes</s>", "no</s>"]


HEAD = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": user("q"), "chosen": assistant("a"), "rejected": assistant("b")},
        {"prompt": user("q"), "chosen": "a", "rejected": "b"},
        {"prompt": user("q"), "chosen": assistant("a")[0], "rejected": assistant("b")[0]},
        {"prompt": "q", "chosen": user("q") + assistant("a"), "rejected": user("q") + assistant("b")},
        {"prompt": user("q"), "chosen": user("q") + assistant("a"), "rejected": user("q") + assistant("b")},
        {"chosen": user("q") + assistant("a"), "rejected": user("q") + assistant("b")},
        {"prompt": None, "chosen": user("q") + assistant("a"), "rejected": user("q") + assistant("b")},
    ],
    ids=["messages", "texts", "single messages", "text and conversations", "repeated", "implicit", "null prompt"],
)
def test_chat_pairs_in_every_form(row):
    assert texts(CHAT, row) == [HEAD, "a<|im_end|>", "b<|im_end|>"]


def test_implicit_prompt_is_the_longest_common_beginning_and_templated_once():
    tokenizer = byte_tokenizer(chat_template=DEFAULT_SYSTEM)
    start = user("q") + assistant("x") + user("r")
    prompt, chosen, rejected = texts(tokenizer, {"chosen": start + assistant("a"), "rejected": start + assistant("b")})
    assert prompt.count("help") == 1 and (chosen, rejected) == ("a<|im_end|>", "b<|im_end|>")
    item = PreferenceDataset([{"chosen": start + assistant("a"), "rejected": start + assistant("b")}], tokenizer)[0]
    assert item["prompt_ids"].tolist() == PromptTemplate(tokenizer).encode(start)
    with_system = [SYSTEM, *start]
    row = {"chosen": with_system + assistant("a"), "rejected": with_system + assistant("b")}
    prompt = texts(tokenizer, row)[0]
    assert "help" not in prompt and prompt.count("<|im_start|>system\ns<|im_end|>") == 1


def test_only_the_assistant_is_learned_in_answers_of_several_turns():
    row = {
        "prompt": user("q"),
        "chosen": assistant("a") + user("more") + assistant("c"),
        "rejected": assistant("b") + user("more") + assistant("d"),
    }
    item = PreferenceDataset([row], CHAT)[0]
    mask = item["chosen_mask"]
    assert CHAT.decode(item["chosen_ids"][mask]) == "a<|im_end|>c<|im_end|>" and not mask.all()


def encoded(prompt, response):
    ids = np.arange(prompt + response, dtype=np.int32)
    return ids, ids >= prompt


def test_cut_is_by_row_before_padding():
    """Prompt of 6, answers of 2 and 8, max_length 6, keeping the end: never an all-padding row."""
    prompt, response, mask = split(cut(encoded(6, 2), 6, "keep_end"))
    assert prompt.tolist() == [2, 3, 4, 5] and response.tolist() == [6, 7] and mask.all()
    prompt, response, mask = split(cut(encoded(6, 8), 6, "keep_end"))
    assert not len(prompt) and response.tolist() == [8, 9, 10, 11, 12, 13] and mask.all()
    prompt, response, _ = split(cut(encoded(10, 3), 8, "keep_start"))
    assert prompt.tolist() == list(range(8)) and not len(response)


LONG = {"prompt": "012345", "chosen": "a", "rejected": "bcdefgh"}
SHORT = {"prompt": "0", "chosen": "a", "rejected": "b"}


@pytest.mark.parametrize(
    ("config", "message", "reason"),
    [
        ({"max_length": 6}, r"row 0, 'chosen': length 8 > max_length 6", "too long"),
        ({"max_length": 6, "truncation_mode": "keep_end"}, "cuts the two prompts", "different prompts after cutting"),
        ({"max_length": 10, "truncation": "keep_end"}, "cuts the two prompts", "different prompts after cutting"),
        ({"max_length": 5, "truncation": "keep_start"}, "leaves nothing of 'chosen'", "no response after cutting"),
    ],
)
def test_pairs_that_cutting_spoils(config, message, reason):
    with pytest.raises(DataError, match=message):
        PreferenceDataset([LONG, SHORT], PLAIN, config)
    dataset = PreferenceDataset([LONG, SHORT], PLAIN, config, on_bad_row="drop")
    assert len(dataset) == 1 and dataset[0]["index"] == 1
    assert dataset.report.dropped == {reason: 1} and dataset.report.selected == 2
    assert any(f"(1 {reason}); the first: rows, row 0" in text for text in notices.seen())


def test_keep_start_cuts_the_longer_answer():
    dataset = PreferenceDataset([LONG], PLAIN, max_length=9, truncation="keep_start")
    item = dataset[0]
    assert PLAIN.decode(item["chosen_ids"]) == "a</s>" and PLAIN.decode(item["rejected_ids"]) == "bcd"
    assert dataset.report.truncated == 1
    same = {"prompt": "0", "chosen": "abX", "rejected": "abY"}
    with pytest.raises(DataError, match="equal after cutting"):
        PreferenceDataset([same], PLAIN, max_length=3, truncation="keep_start")


@pytest.mark.parametrize(
    ("row", "message", "reason"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "chosen and rejected are equal", "chosen equals rejected"),
        ({"prompt": "q", "chosen": " ", "rejected": "a"}, "'chosen' has no text", "empty completion"),
        ({"prompt": "q", "chosen": "a", "rejected": ""}, "'rejected' has no text", "empty completion"),
        ({"prompt": "q", "chosen": "a", "rejected": None}, "column 'rejected' is null", "missing value"),
        ({"prompt": None, "chosen": "a", "rejected": "b"}, "needs a 'prompt' too", "missing value"),
        ({"chosen": user("a") + assistant("x"), "rejected": user("b") + assistant("x")}, "same message", "no common"),
        ({"chosen": user("a"), "rejected": user("a") + assistant("b")}, "'chosen' has no text", "empty completion"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "text or a list of messages", "wrong row"),
    ],
)
def test_wrong_pairs_name_file_and_row(tmp_path, row, message, reason):
    path = write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "q", "chosen": "x", "rejected": "y"}, row])
    with pytest.raises(DataError, match=rf"pairs\.jsonl, line 2 \(row 1\).*{message}.*data\.on_bad_row=drop"):
        PreferenceDataset(path, CHAT)
    dataset = PreferenceDataset(path, CHAT, on_bad_row="drop")
    assert len(dataset) == 1 and next(iter(dataset.report.dropped)).startswith(reason)


def test_missing_columns_are_an_error_whatever_the_policy():
    with pytest.raises(DataError, match="rows has no column 'rejected', which learning from pairs needs; its columns"):
        PreferenceDataset([{"prompt": "q", "chosen": "a"}], PLAIN, on_bad_row="drop")
    with pytest.raises(DataError, match="no column 'completion' and no column 'label'"):
        UnpairedDataset([{"prompt": "q"}], PLAIN)


def test_a_template_that_shows_the_answer_in_the_prompt_is_refused():
    leaky = "{{ messages[-1].content }}|{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
    tokenizer = byte_tokenizer(chat_template=leaky)
    with pytest.raises(DataError, match="cannot be proven"):
        PreferenceDataset([{"prompt": user("q"), "chosen": "a", "rejected": "b"}], tokenizer)


def test_a_template_that_renders_the_prompt_by_what_follows_is_refused():
    """The system text goes into the last user turn, so it depends on the answer where that one is."""
    late = (
        "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{% for m in messages %}"
        "{% if m.role == 'user' %}[{% if m == users[-1] %}{{ messages[0].content }} {% endif %}{{ m.content }}]"
        "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    longer = assistant("b") + user("more") + assistant("c")
    row = {"prompt": [SYSTEM, *user("q")], "chosen": assistant("a"), "rejected": longer}
    with pytest.raises(DataError, match="rows, row 0: the chat template renders the prompt differently"):
        PreferenceDataset([row], byte_tokenizer(chat_template=late))
    row = {**row, "rejected": assistant("b")}
    assert texts(byte_tokenizer(chat_template=late), row) == ["[s q]", "a</s>", "b</s>"]


def pair_batch():
    rows = [
        {"prompt": "q1", "chosen": "aaa", "rejected": "b", "margin": 0.5},
        {"prompt": "question", "chosen": "c", "rejected": "dd", "margin": 1.0},
    ]
    dataset = PreferenceDataset(rows, PLAIN)
    loader = PromptLoader(dataset, 2, shuffle=False, collate=partial(collate_pairs, pad_id=PLAIN.pad_token_id))
    return loader.next_batch()


def test_pair_batch():
    batch = pair_batch()
    columns = batch.non_tensor_batch
    assert columns["uid"].tolist() == columns["pair_id"].tolist() == ["e0.0", "e0.0", "e0.1", "e0.1"]
    assert columns["side"].tolist() == ["chosen", "rejected"] * 2
    assert columns["sample_id"].tolist()[:2] == ["e0.0/chosen", "e0.0/rejected"]
    assert columns["margin"].tolist() == [0.5, 0.5, 1.0, 1.0]
    real = rows_of(batch)
    assert [PLAIN.decode(row.prompt) for row in real] == ["q1", "q1", "question", "question"]
    assert [PLAIN.decode(row.response) for row in real] == ["aaa</s>", "b</s>", "c</s>", "dd</s>"]
    assert batch.batch["prompts"][0, 0] == PLAIN.pad_token_id and batch.batch["responses"][1, -1] == PLAIN.pad_token_id
    assert all(value.dtype == torch.int64 for value in batch.batch.values())


def test_batch_and_loss_fit_together():
    batch = pair_batch()
    mask = batch.batch["response_mask"]
    rows = PairRows.of(batch.non_tensor_batch["pair_id"], batch.non_tensor_batch["side"])
    garbage = torch.full(mask.shape, torch.nan)
    x = pair_logps(torch.where(mask > 0, -1.0, garbage), torch.where(mask > 0, -2.0, garbage), mask, rows)
    assert x.policy_chosen.tolist() == [-4, -2] and x.ref_rejected.tolist() == [-4, -6]
    _, metrics = pair_loss(x, PreferenceSettings(beta=1.0))
    assert metrics["rewards/chosen"] == 3 and metrics["rewards/margins"] == 0.5 and metrics["rewards/accuracies"] == 0.5


def test_labelled_answers():
    rows = [
        {"prompt": user("q"), "completion": assistant("a"), "label": True},
        {"prompt": user("q"), "completion": "b", "label": False},
        {"completion": user("q") + assistant("c"), "label": True, "prompt": None},
    ]
    dataset = UnpairedDataset(rows, CHAT)
    assert [CHAT.decode(item["prompt_ids"]) for item in dataset] == [HEAD] * 3
    assert [CHAT.decode(item["response_ids"]) for item in dataset] == [f"{t}<|im_end|>" for t in "abc"]
    batch = collate_unpaired([dataset[k] for k in range(3)], ["u", "v", "w"], CHAT.pad_token_id)
    assert batch.batch["label"].tolist() == [True, False, True] and batch.batch["label"].dtype == torch.bool
    assert "label" not in batch.non_tensor_batch


@pytest.mark.parametrize("label", [1, 0, "true", None, 1.0])
def test_labels_are_true_or_false(label):
    rows = [{"prompt": "q", "completion": "a", "label": label}, {"prompt": "q", "completion": "a", "label": True}]
    with pytest.raises(DataError, match=r"rows, row 0: label must be true or false, got"):
        UnpairedDataset(rows, PLAIN)
    assert UnpairedDataset(rows, PLAIN, on_bad_row="drop").report.dropped == {"label not boolean": 1}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "q", "completion": ""}, "'completion' has no text"),
        ({"prompt": None, "completion": "a"}, "needs a 'prompt' too"),
        ({"completion": assistant("a")}, "holds no prompt"),
    ],
)
def test_wrong_labelled_answers(row, message):
    with pytest.raises(DataError, match=message):
        UnpairedDataset([{**row, "label": True}], CHAT)


def test_mismatched_pairs_each_prompt_with_the_next_response():
    rows = [{"prompt": p, "completion": c, "label": True} for p, c in (("q", "aaa"), ("rrr", "b"), ("ss", "cc"))]
    dataset = UnpairedDataset(rows, PLAIN)
    batch = collate_unpaired([dataset[k] for k in range(3)], ["u", "v", "w"], PLAIN.pad_token_id)
    other = mismatched(batch)
    real = rows_of(other)
    assert [PLAIN.decode(row.prompt) for row in real] == ["q", "rrr", "ss"]
    assert [PLAIN.decode(row.response) for row in real] == ["b</s>", "cc</s>", "aaa</s>"]
    assert [len(row.trained) for row in real] == [2, 3, 4]
    assert other.non_tensor_batch["sample_id"].tolist() == batch.non_tensor_batch["sample_id"].tolist()
    assert torch.equal(other.batch["input_ids"], torch.cat([other.batch["prompts"], other.batch["responses"]], 1))
    assert other.batch["position_ids"][0].max() == 2 and "label" not in other.batch.keys()
    with pytest.raises(DataError, match="mini-batches of 2"):
        mismatched(batch[:1])
