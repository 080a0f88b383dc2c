"""Online DPO and on-policy distillation: tables over the policy's own answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from learning_helpers import assert_equal, make_learner, two_ranks, weights
from tiny_models import save_tiny_model
from trainer_rewards import digits_share

from verl.data import arithmetic_task
from verl.errors import ConfigError, ModelError
from verl.notices import seen
from verl.protocol import DataProto
from verl.trainer.preference.online import make_pairs

RL = {
    "data__max_prompt_length": 32,
    "data__max_response_length": 5,
    "actor_rollout_ref__rollout__stop": ["\n"],
    "actor_rollout_ref__rollout__n": 4,
}
REWARD = {"reward__reward_fn": digits_share, "reward__num_workers": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("teacher"), seed=3)


def all_alike(batch):
    return [1.0] * len(batch["responses"])


def scored(scores: list[list[float]], valid: list[list[bool]] | None = None) -> DataProto:
    """Answers of 2 tokens, the first token of answer k of prompt i being 10 * i + k."""
    rows = [(i, k) for i, group in enumerate(scores) for k in range(len(group))]
    ones = torch.ones(len(rows), 2, dtype=torch.long)
    grid = torch.zeros(len(rows), 2)
    grid[:, 1] = torch.tensor([scores[i][k] for i, k in rows])
    return DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([[i] for i, _ in rows]),
            "responses": torch.tensor([[10 * i + k, 5] for i, k in rows]),
            "response_mask": ones,
            "attention_mask": torch.ones(len(rows), 3, dtype=torch.long),
            "token_level_scores": grid,
            "score_valid": torch.tensor([valid[i][k] if valid else True for i, k in rows]),
        },
        non_tensors={"uid": [f"p{i}" for i, _ in rows], "sample_id": [f"p{i}/{k}" for i, k in rows]},
    )


def test_the_best_and_the_worst_make_the_pair():
    made = make_pairs(scored([[0.1, 0.9, 0.5], [2.0, 2.0, 1.0]]))
    assert made.batch["chosen_responses"][:, 0].tolist() == [1, 10]
    assert made.batch["rejected_responses"][:, 0].tolist() == [0, 12]
    assert list(made.non_tensor_batch["pair_id"]) == ["p0", "p1"]
    assert made.meta_info["metrics"]["pairs/score_gap"] == pytest.approx((0.8 + 1.0) / 2)


def test_equal_and_failed_answers_make_no_pair():
    made = make_pairs(scored([[1.0, 1.0], [0.0, 5.0], [0.0, 1.0]], [[True, True], [True, False], [True, True]]))
    trained = (made.batch["chosen_mask"].any(1) & made.batch["rejected_mask"].any(1)).tolist()
    assert trained == [False, False, True]
    assert made.meta_info["metrics"]["pairs/equal"] == 2
    assert made.meta_info["metrics"]["critic/score/mean"] == pytest.approx((1 + 1 + 0 + 0 + 1) / 5)


def test_online_dpo_raises_the_reward(model, tmp_path):
    trainer = make_learner(
        model, tmp_path, "online_dpo", arithmetic_task("train", 5), **RL, **REWARD,
        trainer__total_training_steps=25, actor_rollout_ref__actor__optim__lr=3e-3,
    )  # fmt: skip
    scores = []
    trainer.callbacks = (lambda _, metrics: scores.append(metrics["critic/score/mean"]),)
    metrics = trainer.fit()
    assert np.mean(scores[-5:]) > np.mean(scores[:5]) + 0.2
    assert metrics["rewards/accuracies"] >= 0
    assert (tmp_path / "samples.jsonl").read_text()


def test_a_step_of_equal_answers_changes_nothing(model, tmp_path):
    trainer = make_learner(
        model, tmp_path, "online_dpo", arithmetic_task("train", 5), **RL, reward__reward_fn=all_alike,
        actor_rollout_ref__actor__optim__weight_decay=0.0, trainer__total_training_steps=1,
    )  # fmt: skip
    before = weights(trainer)
    metrics = trainer.fit()
    assert metrics["pairs/equal"] == 4 and metrics["train/loss"] == 0 and metrics["actor/grad_norm"] == 0
    assert_equal(before, weights(trainer))


def test_dpo_without_pairs_and_with_a_reward_goes_online(model, tmp_path):
    trainer = make_learner(
        model, tmp_path, "dpo", arithmetic_task("train", 5), **{k: v for k, v in RL.items() if "__n" not in k}, **REWARD
    )
    assert [node.name for node in trainer.flows.flow("train", 1).nodes][:3] == ["generate", "score", "pair"]
    assert trainer.config.actor_rollout_ref.rollout.n == 2
    assert any("makes its pairs itself" in text and "rollout.n=2 answers" in text for text in seen())
    assert math.isfinite(trainer.fit()["train/loss"])


def test_online_needs_two_answers_and_pairs(tmp_path):
    for settings, message in (
        ({"actor_rollout_ref__rollout__n": 1}, "at least 2"),
        ({"preference__loss_type": "kto"}, "learns from labels"),
        ({"preference__precompute_ref_log_probs": True}, "known before training"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_learner(tmp_path, tmp_path / "run", "online_dpo", arithmetic_task("train", 5), **{**RL, **settings})


def test_distillation_brings_the_student_to_the_teacher(model, teacher, tmp_path):
    trainer = make_learner(
        model, tmp_path, "distillation", arithmetic_task("train", 5), **RL, distillation__teacher_path=str(teacher),
        trainer__total_training_steps=40, actor_rollout_ref__actor__optim__lr=3e-3, data__train_batch_size=8,
    )  # fmt: skip
    found = []
    trainer.callbacks = (lambda _, metrics: found.append(metrics["distillation/reverse_kl"]),)
    trainer.fit()
    assert found[0] > 0.5 and np.mean(found[-5:]) < 0.6 * np.mean(found[:3])


def test_a_student_that_is_its_teacher_has_no_gradient(model, tmp_path):
    trainer = make_learner(
        model, tmp_path, "distillation", arithmetic_task("train", 5), **RL, distillation__teacher_path=str(model),
        trainer__total_training_steps=1,
    )  # fmt: skip
    metrics = trainer.fit()
    assert metrics["distillation/reverse_kl"] == 0 and metrics["actor/grad_norm"] < 1e-6


def test_a_teacher_of_another_vocabulary_is_refused(model, tmp_path):
    other = save_tiny_model(tmp_path / "teacher", vocab_size=128)
    with pytest.raises(ModelError, match="vocabulary of 128 tokens and the student one of 96"):
        make_learner(
            model, tmp_path / "run", "distillation", arithmetic_task("train", 5), **RL,
            distillation__teacher_path=str(other),
        )  # fmt: skip
    with pytest.raises(ConfigError, match=r"distillation.teacher_path is not set"):
        make_learner(model, tmp_path / "run", "distillation", arithmetic_task("train", 5), **RL)


@pytest.mark.parametrize("algorithm", ["online_dpo", "distillation"])
def test_two_ranks_and_executors_equal_one(model, teacher, tmp_path, monkeypatch, algorithm):
    settings = {**RL, "actor_rollout_ref__actor__optim__optimizer": "SGD", "trainer__total_training_steps": 2}
    settings |= {"distillation__teacher_path": str(teacher)} if algorithm == "distillation" else REWARD
    runs = {}
    for name, more in (("one", {}), ("serial", {"trainer__executor": "serial"}), ("two", {})):
        if name == "two":
            two_ranks(monkeypatch)
        trainer = make_learner(
            model, tmp_path / name, algorithm, arithmetic_task("train", 5), stays_open=True, **settings, **more
        )
        metrics = trainer.fit()
        runs[name] = metrics, weights(trainer)
        trainer.close()
    assert_equal(runs["one"][1], runs["serial"][1])
    assert_equal(runs["one"][1], runs["two"][1], 2e-6)
