"""No option without effect: changing one changes what is sampled, trained or printed; cuts of the work change nothing.

That every option is read at all is checked in tests/config/test_config_readers.py.
"""

from __future__ import annotations

import pytest
import torch
from trainer_helpers import make_trainer, weights

from verl.tracking import is_time_metric

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
COMMON = {
    "trainer.total_training_steps": 2,
    "data.train_batch_size": 4,
    "data.max_prompt_length": 64,
    f"{ACTOR}.optim.lr": 0.02,
    f"{ACTOR}.ppo_mini_batch_size": 2,  # four steps: ratios leave 1
    f"{ROLLOUT}.n": 3,
}
CHANGES = {
    "grpo": {
        f"{ACTOR}.optim.lr": 0.01,
        f"{ACTOR}.optim.weight_decay": 0.5,
        f"{ACTOR}.optim.betas": [0.5, 0.9],
        f"{ACTOR}.optim.eps": 0.1,
        f"{ACTOR}.optim.optimizer": "SGD",
        f"{ACTOR}.optim.lr_scheduler_type": "linear",
        f"{ACTOR}.optim.lr_warmup_steps": 2,
        f"{ACTOR}.optim.lr_warmup_steps_ratio": 1.0,
        f"{ACTOR}.grad_clip": 0.001,
        f"{ACTOR}.clip_ratio": 0.001,
        f"{ACTOR}.clip_ratio_low": 0.001,
        f"{ACTOR}.clip_ratio_high": 0.001,
        f"{ACTOR}.clip_ratio_c": 1.0001,
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
        f"{ACTOR}.entropy_coeff": 0.1,
        f"{ACTOR}.calculate_entropy": True,
        f"{ACTOR}.use_kl_loss": True,
        f"{ACTOR}.ppo_epochs": 2,
        f"{ACTOR}.ppo_mini_batch_size": 4,
        f"{ACTOR}.shuffle": True,
        f"{ACTOR}.policy_loss.loss_mode": "gspo",
        f"{ROLLOUT}.n": 2,
        f"{ROLLOUT}.temperature": 0.7,
        f"{ROLLOUT}.top_k": 3,
        f"{ROLLOUT}.top_p": 0.4,
        f"{ROLLOUT}.min_p": 0.3,
        f"{ROLLOUT}.do_sample": False,
        f"{ROLLOUT}.stop": ["a", "1"],
        f"{ROLLOUT}.stop_token_ids": list(range(5, 40)),
        f"{ROLLOUT}.seed": 7,
        "data.seed": 7,
        "data.shuffle": False,
        "data.train_batch_size": 6,
        "data.train_max_samples": 8,
        "data.max_response_length": 3,
        "data.apply_chat_template": "true",
        "algorithm.adv_estimator": "rloo",
        "algorithm.norm_adv_by_std_in_grpo": False,
        "algorithm.use_kl_in_reward": True,
        "algorithm.rollout_correction.rollout_is": "token",
        "algorithm.rollout_correction.bypass_mode": True,
        "algorithm.filter_groups.enable": True,
        "reward.overlong_buffer.enable": True,
        "trainer.seed": 7,
        "trainer.total_training_steps": 1,
    },
    "ppo": {
        "algorithm.gamma": 0.5,
        "algorithm.lam": 0.5,
        "critic.optim.lr": 0.5,
        "critic.cliprange_value": 0.0001,
        "critic.ppo_epochs": 3,
        "critic.grad_clip": 0.0001,
        "critic.loss_agg_mode": "seq-mean-token-sum",
        "critic.ppo_mini_batch_size": 4,
        "trainer.critic_warmup": 1,
    },
}
CUTS = {
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 20,
    f"{ACTOR}.use_dynamic_bsz": True,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 1,
    f"{ROLLOUT}.max_num_seqs": 2,
    "reward.num_workers": 2,
    "trainer.executor": "serial",
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
}


def outcome(model, folder, algorithm, changes):
    """(metrics that do not depend on the clock, weights) of a short run."""
    values = {name.replace(".", "__"): value for name, value in {**COMMON, **changes}.items()}
    trainer = make_trainer(model, folder, algorithm=algorithm, **values)
    metrics = trainer.fit()
    plain = {k: v for k, v in metrics.items() if not is_time_metric(k) and "seconds" not in k}
    roles = ("actor", "critic") if algorithm == "ppo" else ("actor",)
    return plain, {role: weights(trainer, role) for role in roles}


@pytest.fixture(scope="module")
def plain(tiny_model_dir, tmp_path_factory):
    return {name: outcome(tiny_model_dir, tmp_path_factory.mktemp(name), name, {}) for name in CHANGES}


def differs(one, two):
    same = all(torch.equal(state[name], two[1][role][name]) for role, state in one[1].items() for name in state)
    return not same or one[0] != two[0]


@pytest.mark.parametrize(
    ("algorithm", "key"), [(algorithm, key) for algorithm, changes in CHANGES.items() for key in changes]
)
def test_a_changed_option_changes_the_run(plain, tiny_model_dir, tmp_path, algorithm, key):
    changed = outcome(tiny_model_dir, tmp_path, algorithm, {key: CHANGES[algorithm][key]})
    assert differs(plain[algorithm], changed)


def test_without_a_change_the_run_is_the_same(plain, tiny_model_dir, tmp_path):
    for algorithm in CHANGES:
        assert not differs(plain[algorithm], outcome(tiny_model_dir, tmp_path / algorithm, algorithm, {}))


@pytest.mark.parametrize("key", CUTS)
def test_how_the_work_is_cut_changes_nothing(plain, tiny_model_dir, tmp_path, key):
    metrics, states = outcome(tiny_model_dir, tmp_path, "grpo", {key: CUTS[key]})
    for name in ("critic/score/mean", "response_length/mean", "prompt_length/mean"):
        assert metrics[name] == plain["grpo"][0][name]
    assert metrics["actor/pg_loss"] == pytest.approx(plain["grpo"][0]["actor/pg_loss"], abs=1e-5)
    for name, value in plain["grpo"][1]["actor"].items():
        torch.testing.assert_close(states["actor"][name], value, rtol=0, atol=5e-4)  # Adam's sign at gradients near 0
