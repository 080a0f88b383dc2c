"""Text while it is made: whatever the cut of the tokens, the pieces add up to the whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl.serving.text import TextStream, response_text


@pytest.fixture(scope="module")
def bytes_tokenizer():
    """A token a byte: a character outside ASCII is several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=30), cuts=st.lists(st.integers(1, 5), max_size=60), stop=st.sampled_from(["", "ab", "é"]))
def test_pieces_add_up(bytes_tokenizer, text, cuts, stop):
    tokens = bytes_tokenizer(text)["input_ids"]
    stops = [stop] if stop else []
    stream, pieces, place = TextStream(bytes_tokenizer, stops), [], 0
    for cut in cuts:
        pieces.append(stream.push(tokens[place : place + cut]))
        place += cut
    pieces.append(stream.push(tokens[place:], last=True))
    assert "".join(pieces) == (text.split(stop)[0] if stop else text)
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in text


def test_half_a_character_waits(bytes_tokenizer):
    tokens = bytes_tokenizer("a€b")["input_ids"]
    stream = TextStream(bytes_tokenizer)
    assert [stream.push([token]) for token in tokens] == ["a", "", "", "€", "b"]


def test_what_may_become_a_stop_text_waits():
    tokenizer = make_tokenizer()
    stream = TextStream(tokenizer, ["###"])
    assert [stream.push(tokenizer(c)["input_ids"]) for c in "a#b##"] == ["a", "", "#b", "", ""]
    assert stream.push([], last=True) == "##" and not stream.stopped
    stream = TextStream(tokenizer, ["###"])
    assert stream.push(tokenizer("x###y")["input_ids"]) == "x" and stream.stopped
    assert stream.push(tokenizer("z")["input_ids"], last=True) == ""


def test_special_tokens():
    tokenizer = make_tokenizer()
    tokens = tokenizer("hi<|im_end|>")["input_ids"]
    assert response_text(tokenizer, tokens) == "hi"
    assert response_text(tokenizer, tokens, skip_special=False) == "hi<|im_end|>"
