"""Which keys each node of a PPO-like step needs, given the configuration. A part that is off has an empty list."""

from __future__ import annotations

from verl.config import Config, needs_critic, needs_reference
from verl.trainer.settings import old_log_probs_needed

SEQUENCE = ["prompts", "responses", "response_mask", "attention_mask"]
ROLLOUT = [*SEQUENCE, "input_ids", "position_ids", "rollout_log_probs", "finish_reason"]
TURNS = "__num_turns__"  # given where conversations have several
SCORES = ["token_level_scores", "score_valid", "reward_extra_info", "reward_error"]
STATE = ("actor.weights", "critic.weights", "ref.weights", "kl_coef")
# what trackers and reports read besides the metrics
OUTPUTS = [*ROLLOUT, *SCORES, "advantages", "returns"]


class Keys:
    """Lists of keys, by the node that needs them.

    Attributes:
        old: log-probs of the policy before the update, where a pass of their own is needed.
        weights: importance weights of the off-policy correction.
        mask: the mask of trained tokens, after rejection if there is one; ``rename`` lets a call see it as
            ``response_mask``, ``trained`` is SEQUENCE with it.
    """

    def __init__(self, config: Config):
        correction = config.algorithm.rollout_correction
        bypass, kl_loss = correction.bypass_mode, config.actor_rollout_ref.actor.use_kl_loss
        self.corrected = bool(correction.rollout_is or correction.rollout_rs) and not bypass
        self.old = ["old_log_probs"] if old_log_probs_needed(config) else []
        self.ref = ["ref_log_prob"] if needs_reference(config) else []
        self.values = ["values"] if needs_critic(config) else []
        self.baseline = ["prompt/reward_baselines"] if config.algorithm.adv_estimator == "remax" else []
        self.weights = ["rollout_is_weights"] if self.corrected and correction.rollout_is else []
        self.mask = "trained_mask" if self.corrected else "response_mask"
        self.rename = {"response_mask": self.mask} if self.corrected else {}
        self.trained = [self.mask if name == "response_mask" else name for name in SEQUENCE]
        masks = ["response_mask", self.mask] if self.corrected else ["response_mask"]
        before = ["rollout_log_probs"] if bypass else self.old
        kl_reward = [*before, *self.ref] if config.algorithm.use_kl_in_reward else []
        self.rewards = ["token_level_rewards"]
        self.correction = [*self.old, "rollout_log_probs", "response_mask"]
        self.scores = ["token_level_scores", "response_mask", "attention_mask", *kl_reward]
        self.advantage = [*self.rewards, *masks, "score_valid", *self.values, *self.baseline]
        self.critic_update = [*self.trained, *self.values, "returns", "step/critic_plan"]
        self.actor_update = [*self.trained, "advantages", "rollout_log_probs", *self.old, *self.weights, "step/plan"]
        self.actor_update += self.ref if kl_loss else []
        self.measured = [*SEQUENCE, "token_level_scores", "score_valid", *self.rewards, "advantages", "returns"]
        self.measured += ["rollout_log_probs", *self.old, *self.values]
