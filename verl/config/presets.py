"""Algorithms by name: what each sets, below everything that the user gives.

Selected with ``algorithm.name=dapo`` (or ``preset=dapo``). Group size stays the user's choice except that a preset
which compares the answers to one prompt starts with eight of them.
"""

from __future__ import annotations

from typing import Any

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_GROUP = {f"{_ROLLOUT}.n": 8}
_GRPO = {"algorithm.adv_estimator": "grpo", **_GROUP}


def _estimator(name: str, **more: Any) -> dict[str, Any]:
    return {"algorithm.adv_estimator": name, **more}


def _grpo_with_loss(mode: str, **actor: Any) -> dict[str, Any]:
    return {
        **_GRPO,
        f"{_ACTOR}.policy_loss.loss_mode": mode,
        **{f"{_ACTOR}.{key}": value for key, value in actor.items()},
    }


PRESETS: dict[str, dict[str, Any]] = {
    "ppo": _estimator("gae"),
    "grpo": _GRPO,
    "dr_grpo": {
        **_GRPO,
        "algorithm.norm_adv_by_std_in_grpo": False,
        f"{_ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
    },
    "rloo": _estimator("rloo", **_GROUP),
    "reinforce_plus_plus": _estimator("reinforce_plus_plus"),
    "reinforce_plus_plus_baseline": _estimator("reinforce_plus_plus_baseline", **_GROUP),
    "remax": _estimator("remax"),
    "opo": _estimator("opo", **_GROUP),
    "gpg": {**_estimator("gpg", **_GROUP), f"{_ACTOR}.policy_loss.loss_mode": "gpg"},
    "grpo_passk": _estimator("grpo_passk", **_GROUP),
    "dapo": {
        **_GRPO,
        f"{_ACTOR}.clip_ratio_low": 0.2,
        f"{_ACTOR}.clip_ratio_high": 0.28,
        f"{_ACTOR}.loss_agg_mode": "token-mean",
        "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.max_num_gen_batches": 10,
        "reward.overlong_buffer.enable": True,
    },
    "gspo": _grpo_with_loss("gspo", clip_ratio_low=3e-4, clip_ratio_high=4e-4, loss_agg_mode="seq-mean-token-mean"),
    "cispo": _grpo_with_loss("cispo", clip_ratio_low=1.0, clip_ratio_high=0.28),
    "sapo": _grpo_with_loss("sapo", loss_agg_mode="seq-mean-token-mean"),
    "gmpo": _grpo_with_loss("geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.4, loss_agg_mode="seq-mean-token-mean"),
    "clip_cov": _grpo_with_loss("clip_cov", clip_ratio_low=1.0, clip_ratio_high=1.0),
    "kl_cov": _grpo_with_loss("kl_cov"),
}
"""Preset name → option → value."""

_SLOW = {f"{_ACTOR}.optim.lr": 1e-6, "trainer.total_epochs": 1}


def _preference(loss: str, **more: Any) -> dict[str, Any]:
    return {**_SLOW, "preference.loss_type": loss, **{f"preference.{key}": value for key, value in more.items()}}


FAMILY_PRESETS: dict[str, dict[str, Any]] = {
    "sft": {f"{_ACTOR}.optim.lr": 2e-5, "trainer.total_epochs": 3},
    "dpo": _preference("sigmoid"),
    "ipo": _preference("ipo"),
    "simpo": _preference("simpo", beta=2.0, simpo_gamma=1.0),
    "orpo": _preference("orpo"),
    "cpo": _preference("cpo"),
    "kto": _preference("kto"),
    "bco": _preference("bco"),
    "rm": {f"{_ACTOR}.optim.lr": 1e-5, "trainer.total_epochs": 1},
    "online_dpo": {**_preference("sigmoid"), f"{_ROLLOUT}.n": 2},
    "distillation": {f"{_ROLLOUT}.n": 1},
}
"""The same for what is not reinforcement learning of the PPO kind."""

FAMILIES: dict[str, str] = {
    "sft": "sft",
    **dict.fromkeys(("dpo", "ipo", "simpo", "orpo", "cpo", "kto", "bco"), "preference"),
    "rm": "reward_model",
    "online_dpo": "online_preference",
    "distillation": "distillation",
}
"""Preset name → which kind of training step it has; every other name is ``ppo``."""
