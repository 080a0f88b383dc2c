"""Rules of what is not reinforcement learning of the PPO kind: SFT, preferences, reward models, distillation."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config import names
from verl.config.derived import family, generates, needs_reference
from verl.config.tree import LEAVES, Config

_PREFERENCE = ("preference", "online_preference")
_PPO_ONLY = ("algorithm.gamma", "algorithm.lam", "algorithm.adv_estimator", "algorithm.filter_groups.enable")


def family_contradictions(config: Config) -> Iterator[str]:
    """A sentence for each contradiction."""
    kind, preference = family(config), config.preference
    if kind == "online_preference" and preference.loss_type in names.LABEL_LOSSES:
        yield f"preference.loss_type={preference.loss_type} learns from labels, and online_dpo makes pairs"
    if kind == "online_preference" and config.actor_rollout_ref.rollout.n < 2:
        yield "actor_rollout_ref.rollout.n must be at least 2 for online_dpo: a pair is the best and the worst of n"
    if kind == "online_preference" and preference.precompute_ref_log_probs:
        yield "preference.precompute_ref_log_probs=true needs answers that are known before training, so not online_dpo"
    if kind == "distillation" and config.distillation.teacher_path is None:
        yield "distillation.teacher_path is not set: name the teacher, a model folder or a hub model"
    if kind in _PREFERENCE:
        yield from _reference(config)
    model = config.actor_rollout_ref.model
    if kind == "reward_model" and (model.lora_rank > 0 or model.lora_adapter_path is not None):
        yield "actor_rollout_ref.model.lora_rank: a reward model trains all its weights, set it to 0"
    if kind == "reward_model" and config.trainer.sample_prompts:
        yield "trainer.sample_prompts asks for answers, and a reward model gives none: leave it out"
    reward_model = config.reward_model
    if reward_model.enable and reward_model.model.path is None:
        yield "reward_model.enable=true needs reward_model.model.path, a sequence-classification model"
    scorers = {
        "reward_model.enable": reward_model.enable,
        "reward.judge.url": config.reward.judge.url,
        "a reward function": config.reward.reward_fn or config.reward.custom_reward_function.path,
    }
    several = [name for name, given in scorers.items() if given]
    if len(several) > 1:
        yield f"{' and '.join(several)} are given together: keep one of them"
    if config.sft.train_files and kind not in ("ppo", "preference", "online_preference"):
        yield f"sft.train_files puts SFT steps between those of an algorithm, which {config.algorithm.name} cannot be"


def _reference(config: Config) -> Iterator[str]:
    preference, adapters = config.preference, config.actor_rollout_ref.model.lora_rank > 0
    free = not needs_reference(config)
    for name in ("sync_ref_model", "precompute_ref_log_probs", "ref_model_path"):
        if free and getattr(preference, name):
            yield f"preference.{name} has no use: preference.loss_type={preference.loss_type} has no reference"
    if preference.precompute_ref_log_probs and preference.loss_type == "kto":
        yield (
            "preference.precompute_ref_log_probs=true cannot know the mismatched answers that kto's KL asks about: "
            "leave it out"
        )
    if preference.sync_ref_model and preference.precompute_ref_log_probs:
        yield "preference.sync_ref_model=true changes the reference, precompute_ref_log_probs=true fixes it: keep one"
    if preference.sync_ref_model and adapters and preference.ref_model_path is None:
        yield (
            "preference.sync_ref_model=true needs a reference of its own, and with adapters the base model is it: "
            "train all weights (actor_rollout_ref.model.lora_rank=0)"
        )


def family_advice(config: Config) -> Iterator[str]:
    """A sentence for each key that was given and is not used by the algorithm."""
    kind = family(config)
    unused: list[str] = []
    if kind not in _PREFERENCE:
        unused += [key for key in LEAVES if key.startswith("preference.")]
    if kind != "ppo":
        unused += _PPO_ONLY
    if not generates(config):
        unused += ["data.max_prompt_length", "data.max_response_length"]
    elif not config.sft.train_files:
        unused += ["data.max_length", "data.on_bad_row"]
    if kind != "reward_model":
        unused.append("reward_model.center_rewards_coefficient")
    if not config.sft.train_files:
        unused += ["sft.ratio", "sft.train_batch_size"]
    for key in unused:
        if config.given(key):
            yield f"{key} is given and not used by {config.algorithm.name or config.algorithm.adv_estimator}"
