"""Every algorithm of the presets trains: its nodes are there, its metrics are finite, and its weights move."""

from __future__ import annotations

import math

import pytest
import torch
from trainer_helpers import make_trainer, weights

from verl.config import PRESETS

NODES = {
    "ppo": {"values", "update_critic", "critic_plan"},
    "remax": {"generate_greedy", "score_greedy", "baseline"},
    "dapo": {"refill"},
}


@pytest.mark.parametrize("algorithm", sorted(PRESETS))
def test_every_preset_trains(tiny_model_dir, tmp_path, algorithm):
    changes = {"actor_rollout_ref__rollout__n": 3, "data__gen_batch_size": 2}
    trainer = make_trainer(tiny_model_dir, tmp_path, algorithm=algorithm, **changes)
    names = {node.name for node in trainer.flows.flow("train", 1).nodes}
    assert NODES.get(algorithm, set()) <= names
    if algorithm != "ppo":
        assert not names & NODES["ppo"]
    before = weights(trainer)
    metrics = trainer.fit()
    assert trainer.global_steps == 2
    assert any(not torch.equal(before[name], now) for name, now in weights(trainer).items())
    wrong = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    assert not wrong
    for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "response_length/mean", "timing_s/gen"):
        assert name in metrics
    assert metrics["training/rollout_probs_diff_mean"] < 1e-4


@pytest.mark.parametrize("executor", ["serial", "concurrent"])
def test_both_executors_give_the_same_trajectory(tiny_model_dir, tmp_path, executor):
    torch.manual_seed(0)
    trainer = make_trainer(tiny_model_dir, tmp_path / executor, trainer__executor=executor)
    metrics = trainer.fit()
    reference = make_trainer(tiny_model_dir, tmp_path / "reference", trainer__executor="serial").fit()
    from verl.tracking import is_time_metric

    plain = {k: v for k, v in metrics.items() if not is_time_metric(k) and "seconds" not in k}
    assert plain == {k: v for k, v in reference.items() if k in plain} and len(plain) > 20


def test_kl_in_reward_and_in_loss_load_a_reference_and_stay_finite(tiny_model_dir, tmp_path):
    changes = {
        "algorithm__use_kl_in_reward": True,
        "algorithm__kl_ctrl__type": "adaptive",
        "algorithm__kl_ctrl__kl_coef": 0.1,
        "algorithm__kl_ctrl__horizon": 50,
        "actor_rollout_ref__actor__use_kl_loss": True,
        "actor_rollout_ref__actor__entropy_coeff": 0.01,
    }
    trainer = make_trainer(tiny_model_dir, tmp_path, **changes)
    assert trainer.roles.reference is not None
    metrics = trainer.fit()
    assert metrics["actor/reward_kl_penalty"] > 0  # after a step the policy has left the reference
    assert metrics["actor/kl_loss"] > 0 and metrics["actor/entropy"] > 0
    assert trainer.roles.kl_controller.value != 0.1


def test_without_kl_there_is_no_reference_and_no_log_prob_pass(tiny_model_dir, tmp_path):
    trainer = make_trainer(tiny_model_dir, tmp_path)
    names = {node.name for node in trainer.flows.flow("train", 1).nodes}
    assert trainer.roles.reference is None and not names & {"ref_logp", "old_logp"}
    trainer.roles.close()


def test_several_mini_batches_take_several_steps_from_frozen_old_log_probs(tiny_model_dir, tmp_path):
    changes = {"actor_rollout_ref__actor__ppo_mini_batch_size": 2, "actor_rollout_ref__actor__ppo_epochs": 2}
    trainer = make_trainer(tiny_model_dir, tmp_path, **changes)
    trainer.total_steps = 1
    metrics = trainer.fit()
    assert trainer.roles.actor.workers[0].engine.version == 4
    assert metrics["actor/ppo_kl"] != 0  # later mini-batches see a policy that has moved


def test_critic_warmup_trains_only_the_critic_first(tiny_model_dir, tmp_path):
    trainer = make_trainer(
        tiny_model_dir, tmp_path, algorithm="ppo", trainer__critic_warmup=1, trainer__total_training_steps=1
    )
    actor, critic = weights(trainer), weights(trainer, "critic")
    trainer.fit()
    assert all(torch.equal(actor[name], now) for name, now in weights(trainer).items())
    assert any(not torch.equal(critic[name], now) for name, now in weights(trainer, "critic").items())


def test_rollout_correction_weights_and_rejection_run(tiny_model_dir, tmp_path):
    changes = {
        "algorithm__rollout_correction__rollout_is": "token",
        "algorithm__rollout_correction__rollout_rs": "token_k1",
        "algorithm__rollout_correction__rollout_rs_threshold": "0.5_2.0",
    }
    metrics = make_trainer(tiny_model_dir, tmp_path, **changes).fit()
    assert any(name.startswith("rollout_corr/") for name in metrics)


def test_validation_scores_every_row_once_and_a_custom_estimator_is_used(tiny_model_dir, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\nfrom verl.algorithms.registry import register_adv_est\n"
        "@register_adv_est('sign')\ndef sign(token_level_rewards, response_mask, config=None, **kwargs):\n"
        "    a = token_level_rewards.sum(-1, keepdim=True).sign() * response_mask\n    return a, a\n"
    )
    trainer = make_trainer(
        tiny_model_dir,
        tmp_path / "run",
        validation=True,
        algorithm__custom_path=str(file),
        algorithm__adv_estimator="sign",
        trainer__test_freq=1,
    )
    metrics = trainer.fit()
    assert metrics["critic/advantages/max"] == 1.0
    assert any(name.startswith("val-core/") for name in metrics)
