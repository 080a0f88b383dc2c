"""Algorithms by name: what each sets, below everything that the user gives.

Selected with ``algorithm.name=dapo`` (or ``preset=dapo``). Group size stays the user's choice except that a preset
which compares the answers to one prompt starts with eight of them.
"""

from __future__ import annotations

from typing import Any

_ACTOR = "actor_rollout_ref.actor"
_GROUP = {"actor_rollout_ref.rollout.n": 8}
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
