"""Algorithms that are not of the PPO kind: their presets, what their keys mean, and which are not used."""

from __future__ import annotations

import pytest

from verl import notices
from verl.config import family, generates, load_config, max_sequence_length, needs_critic, needs_reference, validate
from verl.config.overrides import with_algorithm
from verl.config.presets import FAMILIES, FAMILY_PRESETS, PRESETS
from verl.errors import ConfigError

NEEDS = {"distillation": ["distillation.teacher_path=some/teacher"]}


@pytest.mark.parametrize("name", FAMILY_PRESETS)
def test_every_preset_makes_sense_and_gives_way(name):
    config = load_config([f"algorithm.name={name}", *NEEDS.get(name, [])])
    validate(config, need_data=False, need_model=False)
    assert family(config) == FAMILIES[name] and not needs_critic(config)
    for key in FAMILY_PRESETS[name]:
        assert not config.given(key)
    assert load_config([f"algorithm.name={name}", "trainer.total_epochs=7"]).trainer.total_epochs == 7
    assert name not in PRESETS


def test_names_by_word_and_by_key():
    for overrides in (["algorithm=kto"], ["algorithm.name=kto"], with_algorithm(["kto", "~data.val_files"])[:1]):
        assert load_config(overrides).preference.loss_type == "kto"
    assert load_config(values={"algorithm": "simpo"}).preference.beta == 2.0


def test_lengths_and_references_follow_the_family():
    sft = load_config(["algorithm=sft", "data.max_length=100"])
    assert max_sequence_length(sft) == 100 and not generates(sft) and not needs_reference(sft)
    assert needs_reference(load_config(["algorithm=dpo"])) and not needs_reference(load_config(["algorithm=orpo"]))
    online = load_config(["algorithm=online_dpo", "data.max_prompt_length=10", "data.max_response_length=20"])
    assert max_sequence_length(online) == 30 and online.actor_rollout_ref.rollout.n == 2


def test_a_kl_coefficient_is_the_beta_of_a_preference_loss():
    config = load_config(["algorithm=dpo", "algorithm.kl_penalty=0.3"])
    assert config.preference.beta == 0.3 and not config.algorithm.use_kl_in_reward
    assert load_config(["algorithm=dpo", "algorithm.kl_penalty=0.3", "preference.beta=0.3"]).preference.beta == 0.3
    with pytest.raises(ConfigError, match=r"both set the pull to the reference: give one"):
        load_config(["algorithm=dpo", "algorithm.kl_penalty=0.3", "preference.beta=0.2"])
    assert load_config(["algorithm=sft", "algorithm.kl_ctrl.kl_coef=0.3"]).preference.beta == 0.1


@pytest.mark.parametrize("typed", ["algorithm.kl_penalty", "algorithm.kl_ctrl.kl_coef"])
@pytest.mark.parametrize(("name", "beta"), [("dpo", 0.1), ("kto", 0.1), ("online_dpo", 0.1), ("simpo", 2.0)])
def test_a_kl_coefficient_of_zero_says_what_it_does_to_a_preference_loss(typed, name, beta):
    """And nothing about keys that were not typed, or about a reference that is not left out."""
    notices.reset()
    config = load_config([f"algorithm.name={name}", f"{typed}=0"])
    validate(config, need_data=False, need_model=False)
    assert config.preference.beta == beta and not config.algorithm.use_kl_in_reward
    told = [text for text in notices.seen() if "kl" in text.lower()]
    if name == "simpo":
        assert told == []
    else:
        assert len(told) == 1 and told[0].startswith(f"{typed}=0 switches nothing off in {name}")
        assert f"preference.beta, which is {beta:g}" in told[0] and needs_reference(config)


@pytest.mark.parametrize("value", ["0", "0.3"])
@pytest.mark.parametrize("typed", ["algorithm.kl_penalty", "algorithm.kl_ctrl.kl_coef"])
def test_a_kl_coefficient_is_told_to_be_unused_under_the_name_that_was_typed(typed, value):
    notices.reset()
    validate(load_config(["algorithm=sft", f"{typed}={value}"]), need_data=False, need_model=False)
    told = [text for text in notices.seen() if "kl" in text.lower()]
    assert told == [f"{typed} is given and not used by sft"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["algorithm=grpo", "preference.beta=0.3"], "preference.beta"),
        (["algorithm=dpo", "algorithm.lam=0.9"], "algorithm.lam"),
        (["algorithm=sft", "data.max_prompt_length=9"], "data.max_prompt_length"),
        (["algorithm=ppo", "sft.ratio=0.5"], "sft.ratio"),
        (["algorithm=dpo", "reward_model.center_rewards_coefficient=0.5"], "reward_model.center_rewards_coefficient"),
        (["algorithm=dpo", "actor_rollout_ref.actor.clip_ratio=0.1"], "actor_rollout_ref.actor.clip_ratio"),
        (["algorithm=kto", "actor_rollout_ref.actor.use_kl_loss=true"], "actor_rollout_ref.actor.use_kl_loss"),
        (["algorithm=sft", "actor_rollout_ref.actor.entropy_coeff=0.1"], "actor_rollout_ref.actor.entropy_coeff"),
        (["algorithm=rm", "critic.optim.lr=1e-5"], "critic.optim.lr"),
        (
            ["algorithm=dpo", "actor_rollout_ref.actor.loss_agg_mode=token-mean"],
            "actor_rollout_ref.actor.loss_agg_mode",
        ),
        (["algorithm=dpo", "preference.ref_model_sync_steps=8"], "preference.ref_model_sync_steps"),
    ],
)
def test_keys_of_another_family_are_told(overrides, key):
    validate(load_config(overrides), need_data=False, need_model=False)
    assert any(text.startswith(f"{key} is given and not used by") for text in notices.seen())


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["algorithm=distillation", "actor_rollout_ref.actor.clip_ratio=0.1"], "clip_ratio is given and not used"),
        (["algorithm=sft", "actor_rollout_ref.actor.loss_agg_mode=token-mean"], "loss_agg_mode is given and not used"),
        (
            ["algorithm=dpo", "preference.sync_ref_model=true", "preference.ref_model_sync_steps=8"],
            "ref_model_sync_steps is given and not used",
        ),
        (["algorithm=kto", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3"], "two of a pair stay together"),
        (["algorithm=dpo", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"], "two of a pair stay together"),
    ],
)
def test_keys_that_are_used_are_not_told(overrides, told):
    validate(load_config([*overrides, *NEEDS.get(overrides[0][10:], [])]), need_data=False, need_model=False)
    assert not any(told in text for text in notices.seen())


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["algorithm=rm", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"], "micro-batches have 2"),
        (["algorithm=dpo", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=5"], "micro-batches have 4"),
        (["algorithm=grpo", "reward_model.model.path=some/model"], "set reward_model.enable=true"),
    ],
)
def test_what_is_done_otherwise_is_told(overrides, told):
    validate(load_config(overrides), need_data=False, need_model=False)
    assert any(told in text for text in notices.seen())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm=kto", "actor_rollout_ref.actor.ppo_mini_batch_size=1"], r"ppo_mini_batch_size=1: the KL of kto"),
        (["algorithm=kto", "data.train_batch_size=1"], r"data\.train_batch_size=1: the KL of kto"),
        (["algorithm=dpo", "preference.loss_type=aot", "preference.use_weighting=true"], r"sides of different pairs"),
        (
            ["algorithm=distillation", "actor_rollout_ref.actor.use_kl_loss=true", *NEEDS["distillation"]],
            r"use_kl_loss=true needs a reference",
        ),
    ],
)
def test_contradictions_of_the_family(overrides, message):
    with pytest.raises(ConfigError, match=message):
        validate(load_config(overrides), need_data=False, need_model=False)


def test_keys_of_verls_sft_trainer():
    config = load_config(
        [
            "algorithm=sft",
            "model.partial_pretrain=some/model",
            "optim.lr=1e-4",
            "optim.clip_grad=0.5",
            "optim.lr_scheduler=cosine",
            "data.micro_batch_size_per_gpu=4",
            "data.multiturn.messages_key=turns",
        ]
    )
    actor = config.actor_rollout_ref.actor
    assert config.actor_rollout_ref.model.path == "some/model" and config.data.messages_key == "turns"
    assert (actor.optim.lr, actor.grad_clip, actor.optim.lr_scheduler_type) == (1e-4, 0.5, "cosine")
    assert actor.ppo_micro_batch_size_per_gpu == 4
