"""From the configuration to the settings of workers."""

from __future__ import annotations

import pytest

from verl.config import Config, load_config, resolve
from verl.hardware import decide
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
