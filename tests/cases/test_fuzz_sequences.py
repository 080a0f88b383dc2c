"""Conversations, pairs and labelled answers from outside: a message with the row, or exactly the right tokens."""

from __future__ import annotations

import json

from cases_fuzz import fuzz, good_messages, messages, refused, scalars, texts, values
from data_helpers import byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from verl.data import (
    PreferenceDataset,
    SFTDataset,
    UnpairedDataset,
    collate_pairs,
    collate_sequences,
    collate_unpaired,
)

TOKENIZER, PLAIN = byte_tokenizer(), byte_tokenizer(chat_template=None)
LIMIT = 48
answers = texts | messages | values | st.text(min_size=1, max_size=9)
talks = good_messages.flatmap(
    lambda start: st.text(min_size=1, max_size=9).map(lambda t: [*start, {"role": "assistant", "content": t}])
)
KINDS = {
    SFTDataset: (
        collate_sequences,
        st.fixed_dictionaries(
            {},
            optional={
                "messages": messages | talks | values, "prompt": answers, "response": answers, "text": answers,
                "tools": values,
            },
        ),
    ),
    PreferenceDataset: (
        collate_pairs,
        st.fixed_dictionaries(
            {"chosen": answers | talks, "rejected": answers | talks},
            optional={"prompt": answers | good_messages, "margin": scalars},
        ),
    ),
    UnpairedDataset: (
        collate_unpaired,
        st.fixed_dictionaries(
            {"completion": answers | talks, "label": st.booleans() | scalars},
            optional={"prompt": answers | good_messages},
        ),
    ),
}  # fmt: skip


@given(data=st.data(), kind=st.sampled_from(list(KINDS)), how=st.sampled_from(["error", "keep_start", "keep_end"]))
@fuzz(150)
def test_any_rows(tmp_path_factory, data, kind, how):
    collate, rows = KINDS[kind]
    drawn = data.draw(st.lists(rows, min_size=1, max_size=3))
    tokenizer = data.draw(st.sampled_from([TOKENIZER, PLAIN]))
    bad = data.draw(st.sampled_from(["error", "drop"]))
    file = tmp_path_factory.getbasetemp() / "sequences.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in drawn))
    dataset, message = refused(lambda: kind(file, tokenizer, max_length=LIMIT, truncation=how, on_bad_row=bad))
    if dataset is None:
        assert file.name in message
        return
    assert dataset.report.kept + dataset.report.dropped.total() == len(drawn)
    items = [dataset[k] for k in range(len(dataset))]
    batch = collate(items, [f"u{k}" for k in range(len(items))], 0)
    assert (batch.batch["response_mask"].sum(1) > 0).all()  # never a row without a token to learn from
    assert (batch.batch["attention_mask"].sum(1) <= LIMIT).all()
    assert (batch.batch["attention_mask"][:, : batch.batch["prompts"].shape[1]].sum(1) > 0).all()


@given(
    prompt=st.text(alphabet="pqr \n", min_size=1, max_size=9),
    answer=st.text(alphabet="abé 答\n", min_size=1, max_size=9).filter(str.strip),
)
@fuzz(100)
def test_what_is_trained_is_the_answer_and_its_end(prompt, answer):
    plain = SFTDataset([{"prompt": prompt, "response": answer}], PLAIN)[0]
    assert PLAIN.decode(plain["prompt_ids"]) == prompt and PLAIN.decode(plain["response_ids"]) == answer + "</s>"
    chat = SFTDataset(
        [{"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}], TOKENIZER
    )[0]
    assert TOKENIZER.decode(chat["response_ids"]) == answer + "<|im_end|>" and chat["response_mask"].all()


def test_rows_nested_too_deep_are_named(tmp_path):
    file = tmp_path / "deep.jsonl"
    for depth in (100, 500, 900):
        deep = '{"a":' * depth + "1" + "}" * depth
        file.write_text('{"prompt": "p", "response": "r", "tools": ' + deep + "}\n")
        dataset, message = refused(lambda: SFTDataset(file, TOKENIZER))
        assert dataset is None and "line 1" in message
