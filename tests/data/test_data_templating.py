"""Prompts to ids: whole conversations, one beginning-of-sequence token, exact cuts."""

from __future__ import annotations

import numpy as np
import pytest
from data_helpers import byte_tokenizer, user
from hypothesis import given
from hypothesis import strategies as st

from verl.data.templating import GROUP, PromptTemplate, messages_as_text, truncate
from verl.errors import DataError
from verl.notices import reset, seen

BOS_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
STRICT = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('must begin with user') }}{% endif %}"
    "{% for m in messages %}[{{ m.content }}]{% endfor %}"
)


def test_a_conversation_goes_through_the_template_as_a_whole():
    tokenizer = byte_tokenizer()
    chat = [{"role": "system", "content": "s"}, *user("a"), {"role": "assistant", "content": "b"}, *user("c")]
    ids = PromptTemplate(tokenizer).encode(chat)
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids == tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    strict = byte_tokenizer(chat_template=STRICT)
    turns = [*user("a"), {"role": "assistant", "content": "b"}, *user("c")]
    assert strict.decode(PromptTemplate(strict).encode(turns)) == "[a][b][c]"


def test_modes_for_text_and_messages():
    tokenizer = byte_tokenizer()
    templated = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    expected = {"auto": ("hi", templated), True: (templated, templated), False: ("hi", "hi")}
    for mode, texts in expected.items():
        template = PromptTemplate(tokenizer, mode=mode)
        assert tuple(tokenizer.decode(template.encode(prompt)) for prompt in ("hi", user("hi"))) == texts


def test_a_model_without_a_template_gets_plain_text_with_a_notice():
    tokenizer = byte_tokenizer(chat_template=None)
    reset()
    assert tokenizer.decode(PromptTemplate(tokenizer).encode(user("hi"))) == "hi"
    assert any("no chat template" in text for text in seen())
    with pytest.raises(DataError, match=r"apply_chat_template=true.*custom_chat_template"):
        PromptTemplate(tokenizer, mode=True)
    chat = [{"role": "system", "content": "s"}, *user("a"), {"role": "assistant", "content": "b"}, *user("c")]
    assert messages_as_text(chat) == "s\n\nUser: a\n\nAssistant: b\n\nUser: c\n\nAssistant:"


@pytest.mark.parametrize("add_eos", [False, True])
@pytest.mark.parametrize("text", ["hi", "<s>hi"])
def test_exactly_one_bos_and_no_eos_on_plain_text(add_eos, text):
    tokenizer = byte_tokenizer(add_bos=True, add_eos=add_eos)
    assert tokenizer.decode(PromptTemplate(tokenizer).encode(text)) == "<s>hi"


def test_exactly_one_bos_when_the_template_writes_it():
    tokenizer = byte_tokenizer(chat_template=BOS_TEMPLATE, add_bos=True)
    assert tokenizer.decode(PromptTemplate(tokenizer).encode(user("hi"))) == "<s>hi"
    plain = byte_tokenizer(chat_template=None, add_bos=True)
    assert plain.decode(PromptTemplate(plain).encode(user("hi"))) == "<s>hi"


def test_a_tokenizer_that_adds_no_bos_gets_none():
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(PromptTemplate(tokenizer).encode("hi")) == "hi"


def test_kwargs_custom_template_and_tools_reach_the_template():
    tokenizer = byte_tokenizer()
    custom = PromptTemplate(tokenizer, chat_template="{{ messages[0].content }}{{ word }}", kwargs={"word": "!"})
    assert tokenizer.decode(custom.encode(user("hi"))) == "hi!"
    bare = PromptTemplate(tokenizer, kwargs={"add_generation_prompt": False})
    assert not tokenizer.decode(bare.encode(user("hi"))).endswith("assistant\n")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert '"add"' in tokenizer.decode(PromptTemplate(tokenizer, tools=tools).encode(user("hi")))


def test_many_prompts_equal_single_ones_and_failures_stay_with_their_rows():
    tokenizer = byte_tokenizer(chat_template=STRICT)
    template = PromptTemplate(tokenizer)
    prompts = [user(f"q{k}") if k % 3 else f"t{k}" for k in range(GROUP + 5)]
    assert template.encode_many(prompts) == [template.encode(prompt) for prompt in prompts]
    prompts[7] = [{"role": "system", "content": "x"}]
    encoded = template.encode_many(prompts)
    assert [k for k, ids in enumerate(encoded) if isinstance(ids, Exception)] == [7]
    assert "must begin with user" in str(encoded[7])


@given(st.integers(1, 40), st.integers(1, 60))
def test_truncation_keeps_exactly_the_ends_it_says(limit, length):
    ids = np.arange(length)
    for how in ("left", "right", "middle"):
        cut = truncate(ids, limit, how)
        assert len(cut) == min(limit, length)
        if length > limit:
            head = {"left": 0, "right": limit, "middle": limit // 2}[how]
            assert cut[:head].tolist() == list(range(head))
            assert cut[head:].tolist() == list(range(length - (limit - head), length))
        else:
            assert cut.tolist() == ids.tolist()
