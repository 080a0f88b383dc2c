"""Supervised fine-tuning end to end on a tiny model."""

from __future__ import annotations

import pytest
import torch
from learning_helpers import answers, assert_equal, make_learner, two_ranks, weights
from tiny_models import make_tokenizer, save_tiny_model
from transformers import AutoModelForCausalLM

CHAT = [
    {"messages": [{"role": "user", "content": f"{a}+1"}, {"role": "assistant", "content": f"{a + 1}"}]}
    for a in range(4)
] + [
    {
        "messages": [
            {"role": "user", "content": "2+2"},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": "and 3 more"},
            {"role": "assistant", "content": "that is 7"},
        ]
    }
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def own_loss(model, texts: list[tuple[str, str]]) -> float:
    """Mean over all answer tokens of -log p, from one plain forward pass for each text with labels."""
    network, tokenizer = AutoModelForCausalLM.from_pretrained(model), make_tokenizer()
    total, count = 0.0, 0
    for prompt, answer in texts:
        before, ids = tokenizer(prompt).input_ids, tokenizer(prompt + answer).input_ids
        labels = torch.tensor([[-100] * len(before) + ids[len(before) :]])
        with torch.no_grad():
            loss = network(torch.tensor([ids]), labels=labels).loss
        total += float(loss) * (len(ids) - len(before))
        count += len(ids) - len(before)
    return total / count


def test_the_first_loss_is_that_of_a_plain_forward_pass(model, tmp_path):
    rows = answers(4)
    trainer = make_learner(model, tmp_path, "sft", rows, trainer__total_training_steps=1)
    texts = [(row["prompt"], row["response"] + "<eos>") for row in rows]
    assert trainer.fit()["train/loss"] == pytest.approx(own_loss(model, texts), rel=1e-5)


def test_a_conversation_learns_every_answer_and_nothing_else(model, tmp_path):
    trainer = make_learner(model, tmp_path, "sft", CHAT, trainer__total_training_steps=1, data__train_batch_size=5)
    metrics = trainer.fit()
    texts = [f"{a + 1}<|im_end|>" for a in range(4)] + ["4<|im_end|>", "that is 7<|im_end|>"]
    tokenizer = make_tokenizer()
    assert metrics["train/tokens"] == sum(len(tokenizer(text).input_ids) for text in texts)


@pytest.mark.parametrize(
    "changes",
    [
        {"actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 1},
        {"actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 3},
        {"actor_rollout_ref__actor__use_dynamic_bsz": True, "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 40},
        {"trainer__executor": "serial"},
    ],
)
def test_how_the_batch_is_cut_changes_nothing(model, tmp_path, changes):
    whole = make_learner(model, tmp_path / "a", "sft", CHAT, data__train_batch_size=5)
    cut = make_learner(model, tmp_path / "b", "sft", CHAT, data__train_batch_size=5, **changes)
    first, second = whole.fit(), cut.fit()
    assert first["train/loss"] == pytest.approx(second["train/loss"], rel=1e-5)
    assert_equal(weights(whole), weights(cut), 3e-4)  # Adam's first steps are signs: tiny gradients may differ


def test_two_ranks_equal_one(model, tmp_path, monkeypatch):
    one = make_learner(model, tmp_path / "a", "sft", answers(), actor_rollout_ref__actor__optim__optimizer="SGD")
    first = one.fit()
    two_ranks(monkeypatch)
    two = make_learner(
        model, tmp_path / "b", "sft", answers(), actor_rollout_ref__actor__optim__optimizer="SGD", stays_open=True
    )
    assert two.roles.actor.world_size == 2
    second = two.fit()
    assert first["train/loss"] == pytest.approx(second["train/loss"], rel=1e-5)
    assert first["train/tokens"] == second["train/tokens"]
    assert_equal(weights(one), weights(two), 1e-6)
    two.close()


def test_it_learns_the_answers_with_their_end(model, tmp_path):
    rows = answers(4)
    trainer = make_learner(
        model, tmp_path, "sft", rows, trainer__total_training_steps=60, actor_rollout_ref__actor__optim__lr=5e-3,
        trainer__save_final=True, validation=rows, trainer__test_freq=60,
    )  # fmt: skip
    metrics = trainer.fit()
    assert metrics["train/loss"] < 0.05 and metrics["val/loss"] < 0.05
    assert trainer.evaluation.score == -metrics["val/loss"]
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "actor" / "global_step_60")
    tokenizer = make_tokenizer()
    for row in rows:
        ids = tokenizer(row["prompt"]).input_ids
        out = network.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
        assert tokenizer.decode(out[0, len(ids) :].tolist()) == row["response"] + "<eos>"


def test_resuming_equals_never_having_stopped(model, tmp_path):
    settings = {"trainer__save_freq": 2, "actor_rollout_ref__actor__optim__lr_scheduler_type": "cosine"}
    whole = make_learner(model, tmp_path / "a", "sft", answers(), trainer__total_training_steps=4, **settings)
    whole.fit()
    half = make_learner(model, tmp_path / "b", "sft", answers(), trainer__total_training_steps=4, **settings)
    half.total_steps = 2
    half.fit()
    rest = make_learner(model, tmp_path / "b", "sft", answers(), trainer__total_training_steps=4, **settings)
    assert rest.global_steps == 2
    rest.fit()
    assert_equal(weights(whole), weights(rest))


def test_lora_trains_the_adapters_alone(model, tmp_path):
    trainer = make_learner(model, tmp_path, "sft", answers(), actor_rollout_ref__model__lora_rank=4)
    before = weights(trainer)
    trainer.fit()
    after = weights(trainer)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("lora" in name for name in changed)


def test_previews_show_what_the_model_answers_now(model, tmp_path):
    trainer = make_learner(
        model, tmp_path, "sft", answers(), trainer__sample_prompts=["1+1="], trainer__sample_freq=1,
        data__max_response_length=4,
    )  # fmt: skip
    trainer.fit()
    assert "1+1=" in (tmp_path / "samples.jsonl").read_text()


def test_every_learned_token_is_counted_once(model, tmp_path, monkeypatch):
    counts = []
    for size in (4, 2):
        trainer = make_learner(
            model, tmp_path / str(size), "sft", answers(4), trainer__total_training_steps=1,
            actor_rollout_ref__actor__ppo_mini_batch_size=size,
        )  # fmt: skip
        counts.append(trainer.fit()["train/tokens"])
    two_ranks(monkeypatch)
    spread = make_learner(model, tmp_path / "two", "sft", answers(4), trainer__total_training_steps=1)
    counts.append(spread.fit()["train/tokens"])
    tokenizer = make_tokenizer()
    expected = sum(len(tokenizer(row["response"] + "<eos>").input_ids) for row in answers(4))
    assert counts == [expected, expected, expected]


def test_the_temperature_of_sampling_is_not_in_the_loss(model, tmp_path):
    rows, texts = answers(4), [(row["prompt"], row["response"] + "<eos>") for row in answers(4)]
    trainer = make_learner(
        model, tmp_path, "sft", rows, validation=rows, trainer__total_training_steps=1, trainer__val_before_train=True,
        trainer__test_freq=1, actor_rollout_ref__rollout__temperature=0.5, actor_rollout_ref__actor__optim__lr=1e-9,
    )  # fmt: skip
    metrics = trainer.fit()
    assert metrics["train/loss"] == pytest.approx(own_loss(model, texts), rel=1e-5)
    assert metrics["val/loss"] == pytest.approx(own_loss(model, texts), rel=1e-4)
