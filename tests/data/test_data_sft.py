"""What supervised fine-tuning learns from: proven on templates of five families, token by token."""

import re
from functools import partial

import numpy as np
import pytest
from data_helpers import CHATML, byte_tokenizer, user, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl import notices
from verl.data import PromptLoader, PromptTemplate, SFTDataset, collate_sequences
from verl.errors import ConfigError, DataError
from verl.models.packing import packed_lengths

# The families' own logic, in our words: what each writes around the turns, and what it refuses.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ first if loop.first else '' }}"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# The system text goes into the LAST user turn: the beginning of a conversation is not a beginning of the whole.
MISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% set users = rest | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in rest %}{% if m.role == 'user' %}[INST] "
    "{% if system is defined and m == users[-1] %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
# Refuses a lone system or assistant message; thinks in an empty block before the last answer, as Qwen3 does.
QWEN = (
    "{% if messages | length == 1 and messages[0].role != 'user' %}{{ raise_exception('no lone message') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SHOUTS = "{% for m in messages %}{{ m.role }}: {{ m.content | upper }}\n{% endfor %}"

MARKS = [
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
]


def tokenizer_for(template, **kwargs):
    tokenizer = byte_tokenizer(chat_template=template, **kwargs)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *MARKS]})
    return tokenizer


SYSTEM = {"role": "system", "content": "be brief"}


def assistant(text):
    return [{"role": "assistant", "content": text}]


TALK = [SYSTEM, *user("a?"), *assistant("Bb!"), *user("c?"), *assistant("Dd.")]


def learned(tokenizer, row, **config):
    """The trained stretches of a row's only item as texts, and the text of the whole item."""
    dataset = SFTDataset([row], tokenizer, config)
    item = dataset[0]
    ids = np.concatenate([item["prompt_ids"], item["response_ids"]])
    mask = np.concatenate([np.zeros(len(item["prompt_ids"]), bool), item["response_mask"]])
    assert item["response_mask"][0] and item["response_mask"][-1]
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return [tokenizer.decode(ids[a:b]) for a, b in edges.reshape(-1, 2)], tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["Bb!<|im_end|>", "Dd.<|im_end|>"]),
        (LLAMA3, ["Bb!<|eot_id|>", "Dd.<|eot_id|>"]),
        (GEMMA, ["Bb!<end_of_turn>", "Dd.<end_of_turn>"]),
        (MISTRAL, [" Bb!</s>", " Dd.</s>"]),
        (QWEN, ["Bb!<|im_end|>", "<think>\n\n</think>\n\nDd.<|im_end|>"]),
        (TAGGED, ["Bb!<|im_end|>", "Dd.<|im_end|>"]),
        (NO_END, ["Bb!\n", "Dd.\n</s>"]),
    ],
    ids=["chatml", "llama3", "gemma", "mistral", "qwen", "generation tags", "no end token"],
)
def test_assistant_turns_with_their_end_are_learned(template, expected):
    tokenizer = tokenizer_for(template)
    parts, text = learned(tokenizer, {"messages": TALK})
    if template is MISTRAL:  # content only where the beginning changes later; the space is the template's
        expected = ["Bb!</s>", expected[1]]
    assert parts == expected
    # the ids are those of the whole templated conversation, up to the last learned token
    whole = tokenizer.apply_chat_template(TALK, tokenize=False).rstrip()
    assert text.rstrip() == whole or (template is NO_END and text == whole + "\n</s>")


@pytest.mark.parametrize("template", [CHATML, LLAMA3, GEMMA, MISTRAL, QWEN, TAGGED])
def test_one_answer_starts_where_a_rollout_starts(template):
    tokenizer = tokenizer_for(template)
    talk = [SYSTEM, *user("a?"), *assistant("Bb!")]
    item = SFTDataset([{"messages": talk}], tokenizer)[0]
    assert item["prompt_ids"].tolist() == PromptTemplate(tokenizer).encode(talk[:-1])
    assert item["response_mask"].all() and item["response_mask"].dtype == bool


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.text("ab \n<>/é", min_size=1, max_size=6).filter(str.strip), min_size=2, max_size=6),
    template=st.sampled_from([CHATML, LLAMA3, GEMMA, MISTRAL, QWEN, TAGGED]),
    system=st.booleans(),
)
def test_learned_is_exactly_what_the_assistant_said(texts, template, system):
    texts = texts[: len(texts) // 2 * 2]
    talk = [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(texts)]
    parts, _ = learned(tokenizer_for(template), {"messages": [SYSTEM] * system + talk})
    plain = [
        re.sub(r"<think>\n\n</think>\n\n|<\|im_end\|>|<\|eot_id\|>|<end_of_turn>|</s>$", "", part) for part in parts
    ]
    assert [part.strip() for part in plain] == [text.strip() for text in texts[1::2]]
    assert all(part.endswith(("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "</s>")) for part in parts)


def test_a_template_that_changes_the_answers_is_an_error():
    with pytest.raises(DataError, match=r"rows, row 0: it cannot be proven .*generation"):
        SFTDataset([{"messages": [*user("a"), *assistant("b"), *user("c"), *assistant("D")]}], tokenizer_for(SHOUTS))


def test_turns_after_the_last_answer_are_left_away():
    parts, text = learned(tokenizer_for(CHATML), {"messages": [*TALK, *user("not seen")]})
    assert parts == ["Bb!<|im_end|>", "Dd.<|im_end|>"] and "not seen" not in text


def test_prompt_and_response_with_eos():
    """Exactly the response and its end are learned: two tokens of five."""
    tokenizer = byte_tokenizer(chat_template=None)
    item = SFTDataset([{"prompt": "xyz", "response": "r"}], tokenizer)[0]
    assert tokenizer.decode(item["prompt_ids"]) == "xyz"
    assert item["response_ids"].tolist() == [*tokenizer("r")["input_ids"], tokenizer.eos_token_id]
    assert item["response_mask"].tolist() == [True, True]


def test_eos_is_learned_also_where_it_is_the_pad_token():
    tokenizer = byte_tokenizer(chat_template=None)
    tokenizer.pad_token = tokenizer.eos_token
    rows = [{"prompt": "xy</s>", "response": "r"}, {"prompt": "x", "response": "rrr"}]
    dataset = SFTDataset(rows, tokenizer)
    batch = collate_sequences([dataset[0], dataset[1]], ["a", "b"], tokenizer.pad_token_id)
    assert batch.batch["response_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch.batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1]]


def test_layouts(tmp_path):
    tokenizer = byte_tokenizer()
    header = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"

    def pair(row, **config):
        item = SFTDataset([row], tokenizer, config)[0]
        return tokenizer.decode(item["prompt_ids"]), tokenizer.decode(item["response_ids"])

    assert pair({"instruction": "do", "input": "it", "output": "done"}) == (header.format("do\n\nit"), "done<|im_end|>")
    assert pair({"instruction": "do", "input": "", "output": "ok"}) == (header.format("do"), "ok<|im_end|>")
    assert pair({"instruction": "do", "context": "c", "response": "ok"})[0] == header.format("do\n\nc")
    assert pair({"question": "q", "answer": "a"}) == (header.format("q"), "a<|im_end|>")
    question, answer = pair({"question": "1+1?", "answer": "two\n#### 2"})
    assert "####" in question and answer == "two\n#### 2<|im_end|>"  # the prompt asks for the form, as for RL
    assert pair({"prompt": user("q"), "completion": assistant("a")}) == (header.format("q"), "a<|im_end|>")
    assert pair({"prompt": "q", "output": "a"}) == ("q", "a</s>")
    assert pair({"prompt": "q", "output": "a"}, apply_chat_template=True) == (header.format("q"), "a<|im_end|>")
    assert pair({"q": "Q", "r": "R", "prompt": ""}, prompt_key="q", response_key="r") == ("Q", "R</s>")
    assert pair({"text": "abc"}) == ("a", "bc</s>")
    bos = byte_tokenizer(add_bos=True)
    item = SFTDataset([{"text": "abc"}], bos)[0]
    assert bos.decode(item["prompt_ids"]) == "<s>" and bos.decode(item["response_ids"]) == "abc</s>"
    assert bos.decode(SFTDataset([{"prompt": "q", "response": "a"}], bos)[0]["prompt_ids"]) == "<s>q"


def test_without_a_template_a_question_and_its_answer_stay_apart():
    tokenizer = byte_tokenizer(chat_template=None)
    item = SFTDataset([{"question": "q", "answer": "a"}], tokenizer)[0]
    assert tokenizer.decode(item["prompt_ids"]) == "q" and tokenizer.decode(item["response_ids"]) == "\na</s>"
    item = SFTDataset([{"messages": [*user("a"), *assistant("b")]}], tokenizer)[0]
    assert tokenizer.decode(item["response_ids"]) == "\nb</s>"
    with pytest.raises(DataError, match="custom_chat_template"):
        SFTDataset([{"messages": TALK}], tokenizer)


def test_tools_reach_the_template():
    talk = {"messages": [*user("a"), *assistant("b")]}
    for tools in ([{"name": "calc"}], '[{"name": "calc"}]'):
        _, text = learned(byte_tokenizer(), {**talk, "tools": tools})
        assert text.startswith('<|im_start|>tools[{"name": "calc"}]')
    assert learned(byte_tokenizer(), {**talk, "tools": []})[1].startswith("<|im_start|>user")
    for wrong, message in (("{", "not JSON"), ({"name": "calc"}, "a list of schemas"), (["calc"], "a list of schemas")):
        with pytest.raises(DataError, match=f"rows, row 0: .*{message}"):
            SFTDataset([{**talk, "tools": wrong}], byte_tokenizer())


def merging_tokenizer():
    """' A' is one token; 'A' and ' ' are tokens too."""
    vocabulary = {"<pad>": 0, "</s>": 1, "Ġ": 2, "A": 3, "ĠA": 4, "Q": 5, ":": 6}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ġ", "A")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")


def test_token_across_the_border_is_split_and_told_once():
    tokenizer = merging_tokenizer()
    dataset = SFTDataset([{"prompt": "Q: ", "response": "A"}, {"prompt": "Q: ", "response": "AA"}], tokenizer)
    assert dataset[0]["prompt_ids"].tolist() == [5, 6, 2] and dataset[0]["response_ids"].tolist() == [3, 1]
    assert tokenizer.decode(dataset[1]["response_ids"]) == "AA</s>"
    told = [text for text in notices.seen() if "across the border" in text]
    assert len(told) == 1 and "rows, row 0" in told[0]
    # the border at a token's start is exact: ' A' stays one token
    assert SFTDataset([{"prompt": "Q:", "response": " A"}], tokenizer)[0]["response_ids"].tolist() == [4, 1]


def test_prefix_space_tokenizers_are_cut_by_offsets():
    """A tokenizer that puts a space before each text: the answer alone would get one that the whole has not."""
    letters = {"▁": 2, **{letter: number for number, letter in enumerate("Qab", start=3)}}
    backend = Tokenizer(models.BPE(vocab={"<pad>": 0, "</s>": 1, **letters}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")
    assert tokenizer("ab")["input_ids"][0] == 2
    item = SFTDataset([{"prompt": "Q", "response": "ab"}], tokenizer)[0]
    assert item["prompt_ids"].tolist() == [2, 3] and item["response_ids"].tolist() == [4, 5, 1]
    assert not [text for text in notices.seen() if "across the border" in text]


def test_too_long_rows():
    tokenizer = byte_tokenizer(chat_template=None)
    rows = [{"prompt": "0123456789", "response": "abcd"}, {"prompt": "p", "response": "r"}]
    with pytest.raises(DataError, match=r"rows, row 0: length 15 > max_length 12; raise data\.max_length"):
        SFTDataset(rows, tokenizer, max_length=12)
    kept = SFTDataset(rows, tokenizer, max_length=12, truncation="right", shuffle=False)
    assert (
        tokenizer.decode(kept[0]["response_ids"]) == "ab" and kept.report.truncated == 1 and kept.report.longest == 15
    )
    kept = SFTDataset(rows, tokenizer, max_length=12, truncation="keep_end")
    assert tokenizer.decode(kept[0]["prompt_ids"]) == "3456789" and kept[0]["response_mask"].sum() == 5
    inside = SFTDataset(rows, tokenizer, max_length=3, truncation="left")
    assert tokenizer.decode(inside[0]["prompt_ids"]) == "c" and tokenizer.decode(inside[0]["response_ids"]) == "d</s>"
    with pytest.raises(DataError, match="row 0: max_length leaves nothing of the response"):
        SFTDataset(rows, tokenizer, max_length=10, truncation="right")
    dropped = SFTDataset(rows, tokenizer, max_length=12, on_bad_row="drop")
    assert len(dropped) == 1 and dropped.report.dropped == {"too long": 1} and dropped[0]["index"] == 1
    assert any("1 of 2 rows are left out (1 too long); the first: rows, row 0" in text for text in notices.seen())


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "response": " "}, "column 'response' is empty"),
        ({"prompt": "a", "response": None}, "column 'response' is null"),
        ({"prompt": None, "response": "b"}, "column 'prompt' is null"),
        ({"messages": user("a")}, "no assistant message"),
        ({"messages": [*user("a"), {"role": "assistant", "content": None}]}, "has no content"),
        ({"messages": assistant("a"), "x": 1}, "cannot be proven|a prompt"),
        ({"text": ""}, "column 'text' is empty"),
        ({"a": 1, "b": 2}, r"rows has no layout to learn from: its columns are a, b"),
        ({"prompt": "a", "c": "b"}, r"data\.response_key"),
    ],
)
def test_wrong_rows(row, message):
    template = CHATML if "x" not in row else SHOUTS
    with pytest.raises(DataError, match=message):
        SFTDataset([row], byte_tokenizer(chat_template=template))


@pytest.mark.parametrize("as_messages", [False, True])
def test_an_answer_that_is_labelled_as_not_wanted_is_not_learned(as_messages, tmp_path):
    """KTO's data, given to SFT."""
    rows = [
        {
            "prompt": user("a") if as_messages else "a",
            "completion": assistant(answer) if as_messages else answer,
            "label": label,
        }
        for answer, label in (("good", True), ("bad", False), ("fine", True))
    ]
    path, tokenizer = write_jsonl(tmp_path / "kto.jsonl", rows), byte_tokenizer(chat_template=CHATML)
    with pytest.raises(DataError, match=r"kto\.jsonl, line 2 .*label is false.*kto learns.*data\.on_bad_row=drop"):
        SFTDataset(path, tokenizer)
    kept = SFTDataset(path, tokenizer, on_bad_row="drop")
    learned = [tokenizer.decode(row["response_ids"][row["response_mask"]]) for row in kept]
    assert len(kept) == 2 and not any("bad" in text for text in learned)
    assert any("1 of 3 rows are left out (1 labelled false)" in text for text in notices.seen())
    without = [{key: value for key, value in row.items() if key != "label"} for row in rows]
    assert len(SFTDataset(without, tokenizer)) == 3
    classes = [{**row, "label": 0} for row in rows]
    assert len(SFTDataset(classes, tokenizer)) == 3, "numbers are classes, not KTO's labels"


def test_template_that_raises_names_the_row_and_all_dropped_is_an_error(tmp_path):
    path = write_jsonl(tmp_path / "talk.jsonl", [{"messages": [*user("a"), *user("b"), *assistant("c")]}])
    with pytest.raises(DataError, match=r"talk\.jsonl, line 1 .*failed on this conversation: .*must alternate"):
        SFTDataset(path, tokenizer_for(GEMMA))
    with pytest.raises(DataError, match=r"no row can be used: 1 of 1 rows are left out \(1 template\)"):
        SFTDataset(path, tokenizer_for(GEMMA), on_bad_row="drop")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_length": 1}, "max_length=1"),
        ({"truncation": "middle"}, "truncation='middle'"),
        ({"on_bad_row": "skip"}, "on_bad_row='skip'"),
        ({"apply_chat_template": "maybe"}, "apply_chat_template='maybe'"),
        ({"max_lenth": 5}, "did you mean max_length"),
        ({"truncation": "error", "truncation_mode": "keep_end"}, "differ"),
        (3, "a dict or a dataclass"),
    ],
)
def test_wrong_settings(config, message):
    with pytest.raises(ConfigError, match=message):
        SFTDataset([{"text": "a"}], byte_tokenizer(), config)


def test_loader_gives_sample_batches_and_resumes():
    tokenizer = byte_tokenizer(chat_template=None)
    rows = [{"prompt": f"p{k}", "response": "r" * (k + 1), "source": k} for k in range(7)]
    dataset = SFTDataset(rows, tokenizer)

    def loader():
        collate = partial(collate_sequences, pad_id=tokenizer.pad_token_id)
        return PromptLoader(dataset, 3, seed=1, epochs=2, collate=collate)

    first = loader()
    batches = [next(first)]
    state = first.state_dict()
    batches += list(first)
    resumed = loader()
    resumed.load_state_dict(state)
    again = list(resumed)
    assert len(batches) == 4 and len(again) == 3
    for one, other in zip(batches[1:], again, strict=True):
        assert one.non_tensor_batch["uid"].tolist() == other.non_tensor_batch["uid"].tolist()
        assert (one.batch["input_ids"] == other.batch["input_ids"]).all()
    batch = batches[0]
    assert batch.non_tensor_batch["sample_id"][0] == "e0.0/0" and len(batch) == 3
    numbers = batch.non_tensor_batch["index"]
    assert batch.batch["response_mask"].sum(1).tolist() == [k + 2 for k in numbers]
    assert packed_lengths(batch).tolist() == [2 + k + 1 for k in numbers]
    assert batch.batch["position_ids"][:, 2:4].tolist() == [[2, 3]] * 3
    assert batch.batch["input_ids"].shape[1] == batch.batch["prompts"].shape[1] + batch.batch["responses"].shape[1]


def test_max_samples_is_a_seeded_subset():
    rows = [{"text": "abc" + "d" * k} for k in range(9)]
    chosen = [SFTDataset(rows, byte_tokenizer(), max_samples=4, seed=3) for _ in range(2)]
    assert [item["index"] for item in chosen[0]] == [item["index"] for item in chosen[1]] and len(chosen[0]) == 4
    assert chosen[0].where(0) == f"rows, row {chosen[0][0]['index']}"
