"""Public cases B32 to B41: response masks, end tokens, templates and the border between prompt and response."""

from __future__ import annotations

import numpy as np
import pandas
import pytest
import torch
from cases_toys import one
from rewards_batches import WordDecoder
from tiny_models import make_tokenizer

from verl.algorithms.batch_metrics import data_metrics
from verl.data import PromptDataset
from verl.errors import DataError
from verl.rewards import RewardRunner
from verl.rollout.base import Completion, Request, SamplingParams
from verl.rollout.rows import sample_rows
from verl.workers.forward import cut_rows
from verl.workers.settings import Cut

PAD, EOS = 0, 1
PARAMS = SamplingParams(max_tokens=5)


def rows_of(*responses, prompts=None, pad=PAD, reason="stop", width=5):
    """The sample batch of finished responses."""
    prompts = prompts or [[7, 8]] * len(responses)
    requests = [Request(f"u{k}/0", np.array(p), PARAMS) for k, p in enumerate(prompts)]
    done = [
        Completion(r.id, np.array(ids, dtype=np.int64), np.full(len(ids), -1.0, np.float32), reason)
        for r, ids in zip(requests, responses, strict=True)
    ]
    return sample_rows(requests, done, prompt_width=3, response_width=width, pad_id=pad)


def scored(batch):
    with RewardRunner(one, WordDecoder(), num_workers=1) as runner:
        return runner.score(batch).result(timeout=60)


def test_B32_a_response_without_eos_ends_where_it_ends():
    batch = rows_of([5, 6, 7], reason="length")
    assert batch.batch["responses"].tolist() == [[5, 6, 7, PAD, PAD]]
    assert batch.batch["response_mask"].tolist() == [[1, 1, 1, 0, 0]]
    assert scored(batch).batch["token_level_scores"].tolist() == [[0.0, 0.0, 1.0, 0.0, 0.0]]


def test_B33_pad_equal_to_eos_keeps_the_one_real_eos():
    batch = rows_of([5, 6, EOS], prompts=[[EOS, 8]], pad=EOS)
    assert batch.batch["responses"].tolist() == [[5, 6, EOS, EOS, EOS]]
    assert batch.batch["response_mask"].tolist() == [[1, 1, 1, 0, 0]]
    assert batch.batch["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1, 0, 0]]  # the prompt's own EOS is attended to
    assert scored(batch).batch["token_level_scores"].tolist() == [[0.0, 0.0, 1.0, 0.0, 0.0]]


def test_B33_a_trained_eos_is_scored_by_the_model(tiny_model_dir):
    from cases_actor import make_actor

    batch = rows_of([12, 13, EOS], prompts=[[10, 11]], pad=EOS)
    log_probs = make_actor(tiny_model_dir).compute_log_prob(batch).batch["old_log_probs"]
    assert (log_probs[0, :3] < 0).all() and log_probs[0, 3:].eq(0).all()


def test_B35_eos_first_and_empty_responses():
    batch = rows_of([EOS], [], [5, EOS], width=3)
    assert batch.batch["response_mask"].tolist() == [[1, 0, 0], [0, 0, 0], [1, 1, 0]]
    result = scored(batch)
    assert result.batch["token_level_scores"].tolist() == [[1.0, 0, 0], [0, 0, 0], [0, 1.0, 0]]
    assert result.batch["score_valid"].tolist() == [True, False, True]
    metrics = data_metrics({**batch.batch, **result.batch})
    assert metrics["response/aborted_ratio"] == pytest.approx(1 / 3)
    assert metrics["response_length_non_aborted/mean"] == 1.5
    assert metrics["critic/score/mean"] == 1.0  # the empty row is in no mean
    assert sum(len(part) for part in cut_rows(batch, Cut(max_rows=2))) == 3


def test_B40_ids_of_a_response_are_never_made_from_text():
    """The tokenizer merges a space with the letter after it; the border between prompt and response stays."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(vocab={"?": 0, " ": 1, "A": 2, " A": 3, "Q": 4}, merges=[(" ", "A")], unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(" ?A", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="?", eos_token="?")
    assert tokenizer("Q A")["input_ids"] == [4, 3] and tokenizer("Q ")["input_ids"] == [4, 1]
    row = PromptDataset([{"prompt": "Q "}], tokenizer)[0]
    batch = rows_of([2], prompts=[row["prompt_ids"]], width=2)
    assert batch.batch["input_ids"].tolist() == [[0, 4, 1, 2, 0]]  # not [4, 3]
    assert batch.batch["response_mask"].tolist() == [[1, 0]]
    heard = []

    def listen(batch):
        heard.extend(batch["responses"])
        return [1.0]

    with RewardRunner(listen, tokenizer) as runner:
        result = runner.score(batch).result(timeout=60)
    assert heard == ["A"] and result.batch["token_level_scores"].tolist() == [[1.0, 0.0]]


def test_B41_messages_in_every_container_and_no_text_none(tmp_path):
    tokenizer = make_tokenizer()
    messages = [{"role": "user", "content": "hi"}]
    as_list = PromptDataset([{"prompt": messages}], tokenizer)[0]["prompt_ids"].tolist()
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    for prompt in (tuple(messages), np.array(messages, dtype=object), parts):
        assert PromptDataset([{"prompt": prompt}], tokenizer)[0]["prompt_ids"].tolist() == as_list
    file = tmp_path / "rows.parquet"
    pandas.DataFrame({"prompt": [np.array(messages, dtype=object)]}).to_parquet(file)
    assert PromptDataset(file, tokenizer)[0]["prompt_ids"].tolist() == as_list
    called = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "user", "content": "go"},
    ]
    text = tokenizer.decode(PromptDataset([{"prompt": called}], tokenizer)[0]["prompt_ids"])
    assert "None" not in text
    for content in ({"content": None}, {}):
        with pytest.raises(DataError, match=r"row 1, message 0: the user message has no content"):
            PromptDataset([{"prompt": messages}, {"prompt": [{"role": "user", **content}]}], tokenizer)
    with pytest.raises(DataError, match=r"row 0: column 'prompt' is null"):
        PromptDataset([{"prompt": None}, {"prompt": None}], tokenizer)


def test_masks_come_from_the_engine_through_a_whole_step(tiny_model_dir, tmp_path):
    """What was generated, trained on and scored are the same tokens, whatever their ids."""
    from trainer_helpers import make_trainer

    trainer = make_trainer(tiny_model_dir, tmp_path, data__max_response_length=6, trainer__total_training_steps=1)
    samples = trainer.train_step().frames["sample"]
    trainer.close()
    mask, attention = samples.batch["response_mask"], samples.batch["attention_mask"][:, -6:]
    assert torch.equal(mask, attention)  # single turn: every response token was sampled
    assert (mask.diff(dim=1) <= 0).all()
    assert (samples.batch["rollout_log_probs"][mask.bool()] < 0).all()
    last = mask.sum(1) - 1
    scores = samples.batch["token_level_scores"]
    assert torch.equal(scores.nonzero()[:, 1], last[scores.sum(1) != 0])
