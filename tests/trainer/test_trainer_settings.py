"""From the configuration to the settings of workers."""

from __future__ import annotations

import pytest

from verl import notices
from verl.config import Config, load_config, resolve
from verl.data import arithmetic_task
from verl.hardware import decide
from verl.trainer.build import prepare
from verl.trainer.settings import actor_settings

CORRECTION = "algorithm.rollout_correction"


def settings_of(*overrides: str):
    config = resolve(load_config(["actor_rollout_ref.model.path=some/model", "preset=grpo", *overrides]))
    return config, actor_settings(config, decide("cpu"), total_steps=10)


@pytest.mark.parametrize(
    ("overrides", "loss", "bypass"),
    [
        ([], "vanilla", False),
        ([f"{CORRECTION}.bypass_mode=true"], "vanilla", True),
        ([f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.loss_type=reinforce"], "gpg", True),
    ],
)
def test_bypass_mode_with_reinforce_is_the_plain_policy_gradient(overrides, loss, bypass):
    config, settings = settings_of("actor_rollout_ref.actor.clip_ratio=0.1", *overrides)
    assert settings.loss.policy_loss.loss_mode == loss
    assert settings.use_rollout_log_probs is bypass
    assert settings.loss.clip_ratio == 0.1
    assert (
        config.actor_rollout_ref.actor.policy_loss.loss_mode == Config().actor_rollout_ref.actor.policy_loss.loss_mode
    )


@pytest.mark.parametrize(("longest", "told"), [(200, False), (300, True)])
def test_sequences_beyond_the_models_context_are_told_before_anything_loads(tiny_model_dir, longest, told):
    values = {
        "actor_rollout_ref.model.path": str(tiny_model_dir),
        "data.train_batch_size": 4,
        "data.max_prompt_length": 32,
        "data.max_response_length": longest - 32,
    }
    prepare(load_config(values=values), train_rows=arithmetic_task("train", 5))
    assert any("256 positions" in line for line in notices.seen()) is told
