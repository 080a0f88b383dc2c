"""Tokenizers as they come: without pad, with pad equal to end, with merges over spaces, with templates that refuse."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from cases_fuzz import fuzz, refused
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import make_config, make_model, make_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl.data import PromptDataset
from verl.hybrid import make_twin
from verl.models.loading import load_tokenizer, stop_token_ids
from verl.rewards import RewardRunner
from verl.rollout.base import Completion, Request, SamplingParams
from verl.rollout.hf import HFEngine
from verl.rollout.rows import sample_rows

LETTERS = ["<pad>", "<eos>", "<s>", "<unk>", " ", "a", "b", "A", "B", "\n", "."]
MERGES = [(" ", "a"), (" ", "A"), ("a", "b"), (" a", "b"), (" ", " "), ("\n", "\n"), (".", "\n"), ("A", "B")]
TEMPLATES = [
    None,
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{{ bos_token }}{% for m in messages %}{{ m.role[0] }}{{ m.content }}.{% endfor %}",
    "{{ raise_exception('never') }}",
    "{% if messages[0].role == 'user' %}{{ messages[0].content }}{% else %}{{ raise_exception('no') }}{% endif %}",
    "{{ messages[0]['content'].nothing.there }}",
    "{% for",
    "",
]


@st.composite
def tokenizers(draw):
    merges = draw(st.lists(st.sampled_from(MERGES), unique=True))
    vocabulary = {token: number for number, token in enumerate(LETTERS)}
    usable = []
    for left, right in merges:
        if left in vocabulary and right in vocabulary:
            vocabulary.setdefault(left + right, len(vocabulary))
            usable.append((left, right))
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=usable, unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    if draw(st.booleans()):
        core.normalizer = normalizers.Lowercase()
    if draw(st.booleans()):
        core.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    eos = draw(st.sampled_from(["<eos>", None, "<pad>"]))
    pad = draw(st.sampled_from(["<pad>", None, "<eos>", "<unk>"]))
    bos = draw(st.sampled_from(["<s>", None, "<eos>"]))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=eos, pad_token=pad, bos_token=bos, unk_token="<unk>",
        padding_side=draw(st.sampled_from(["left", "right"])),
    )  # fmt: skip
    tokenizer.chat_template = draw(st.sampled_from(TEMPLATES))
    return tokenizer


prompts = st.text(alphabet=" abAB\n.xé", max_size=12)


@given(
    tokenizer=tokenizers(),
    drawn=st.lists(prompts | prompts.map(lambda t: [{"role": "user", "content": t}]), min_size=1, max_size=3),
    answers=st.lists(st.lists(st.integers(0, 10), max_size=4), min_size=3, max_size=3),
)
@fuzz(60)
def test_a_tokenizer_of_any_kind_is_used_rightly_or_refused(tmp_path_factory, tokenizer, drawn, answers):
    folder = tmp_path_factory.getbasetemp() / "drawn_tokenizer"
    shutil.rmtree(folder, ignore_errors=True)
    make_config("llama", 32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    loaded, _ = refused(lambda: load_tokenizer(str(folder)))
    if loaded is None:
        assert tokenizer.eos_token_id is None and tokenizer.pad_token_id is None
        return
    assert loaded.pad_token_id is not None and loaded.padding_side == "left"
    data, _ = refused(lambda: PromptDataset([{"prompt": prompt} for prompt in drawn], loaded, max_prompt_length=64))
    if data is None:
        return
    bos = tokenizer.bos_token_id
    for k, prompt in enumerate(drawn):
        if isinstance(prompt, str):  # plain text as it is, after the begin token if the tokenizer adds one
            ids = data[k]["prompt_ids"].tolist()
            assert (ids[1:] if ids[:1] == [bos] else ids) == tokenizer(prompt, add_special_tokens=False)["input_ids"]
    check_rows([data[k]["prompt_ids"] for k in range(len(drawn))], answers[: len(drawn)], loaded)


def check_rows(prompt_ids, answers, tokenizer):
    """The sample batch holds exactly these ids, masks count exactly these tokens, the scorer reads exactly that."""
    requests = [Request(f"u{k}/0", ids, SamplingParams(4)) for k, ids in enumerate(prompt_ids)]
    done = [
        Completion(r.id, np.array(a, dtype=np.int64), np.zeros(len(a), np.float32), "stop")
        for r, a in zip(requests, answers, strict=True)
    ]
    batch = sample_rows(requests, done, prompt_width=70, response_width=4, pad_id=tokenizer.pad_token_id)
    for row, (prompt, answer) in enumerate(zip(prompt_ids, answers, strict=True)):
        mask, attention = batch.batch["response_mask"][row].bool(), batch.batch["attention_mask"][row].bool()
        assert batch.batch["responses"][row][mask].tolist() == answer
        assert batch.batch["input_ids"][row][attention].tolist() == prompt.tolist() + answer
    heard = []

    def listen(batch):
        heard.extend(batch["responses"])
        return [1.0] * len(batch["responses"])

    with RewardRunner(listen, tokenizer) as runner:
        scored = runner.score(batch).result(timeout=60)
    if any(answers):
        assert heard == [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    for row, answer in enumerate(answers):
        assert bool(scored.batch["score_valid"][row]) == bool(answer)
        assert scored.batch["token_level_scores"][row].nonzero().flatten().tolist() == (
            [len(answer) - 1] if answer else []
        )


@pytest.mark.parametrize("ends", [(1,), (1, 9, 40), (0,), (7, 8)])
def test_a_response_ends_at_the_first_of_several_end_tokens(ends):
    model = make_model("llama")
    model.generation_config.eos_token_id = list(ends)
    model.config.eos_token_id = ends[0]
    tokenizer = make_tokenizer()
    stops = stop_token_ids(model, tokenizer)
    assert set(ends) <= set(stops) and tokenizer.eos_token_id in stops
    engine = HFEngine(make_twin(model), tokenizer, stops)
    params = SamplingParams(40, temperature=3.0)
    requests = [Request(f"u{k}/0", np.array([10, 11]), params, seed=k) for k in range(24)]
    done = engine.generate(requests)
    assert any(c.finish_reason == "stop" for c in done)
    for completion in done:
        ids = completion.token_ids.tolist()
        assert not set(ids[:-1]) & set(stops)
        assert (completion.finish_reason == "stop") == (ids[-1] in stops)
        assert completion.finish_reason == "stop" or len(ids) == 40
    batch = sample_rows(requests, done, prompt_width=2, response_width=40, pad_id=ends[0])
    assert batch.batch["response_mask"].sum(1).tolist() == [len(c.token_ids) for c in done]
    assert torch.equal(batch.batch["response_mask"], batch.batch["attention_mask"][:, 2:])


def test_a_folder_without_a_usable_tokenizer_says_so(tmp_path):
    make_config("llama", 32).save_pretrained(tmp_path)
    for content in (None, "", "{}", "[]", '{"version": "1.0"}', "\x00"):
        if content is not None:
            (tmp_path / "tokenizer.json").write_text(content)
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
        found, message = refused(lambda: load_tokenizer(str(tmp_path)))
        assert found is None and str(tmp_path) in message, content
