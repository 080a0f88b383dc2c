"""Rules of what is not reinforcement learning of the PPO kind: SFT, preferences, reward models, distillation."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config import names
from verl.config.derived import family, generates, needs_reference
from verl.config.tree import LEAVES, Config

_PREFERENCE = ("preference", "online_preference")
_ACTOR = "actor_rollout_ref.actor"
_PPO_ONLY = (
    "algorithm.gamma",
    "algorithm.lam",
    "algorithm.adv_estimator",
    "algorithm.norm_adv_by_std_in_grpo",
    "algorithm.filter_groups.enable",
    "algorithm.kl_penalty",
    "algorithm.use_kl_in_reward",
    f"{_ACTOR}.use_kl_loss",
    f"{_ACTOR}.kl_loss_coef",
    "critic.enable",
    "critic.optim.lr",
    "critic.model.path",
)
_POLICY_LOSS_ONLY = (
    *(f"{_ACTOR}.clip_ratio{end}" for end in ("", "_low", "_high", "_c")),
    f"{_ACTOR}.entropy_coeff",
    f"{_ACTOR}.policy_loss.loss_mode",
)
_SYNC_ONLY = ("preference.ref_model_sync_steps", "preference.ref_model_mixup_alpha")
_SORTING = ("aot", "aot_pair", "aot_unpaired")


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
    if kind == "distillation" and config.actor_rollout_ref.actor.use_kl_loss:
        yield f"{_ACTOR}.use_kl_loss=true needs a reference, and distillation has a teacher in its place: leave it out"
    if kind == "preference" and preference.loss_type == "kto":
        yield from _kto_sizes(config)
    if kind in _PREFERENCE:
        yield from _reference(config)
    model = config.actor_rollout_ref.model
    if kind == "reward_model" and model.quantization is not None:
        yield (
            f"actor_rollout_ref.model.quantization={model.quantization}: the base of a reward model is not quantised "
            "here, leave it out (model.lora_rank works)"
        )
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


def _kto_sizes(config: Config) -> Iterator[str]:
    sizes = {
        "data.train_batch_size": config.data.train_batch_size,
        f"{_ACTOR}.ppo_mini_batch_size": config.actor_rollout_ref.actor.ppo_mini_batch_size,
    }
    for key, size in sizes.items():
        if size == 1:
            yield f"{key}=1: the KL of kto pairs each prompt with another row's answer, so set it to 2 or more"


def _reference(config: Config) -> Iterator[str]:
    preference, model = config.preference, config.actor_rollout_ref.model
    adapters = model.lora_rank > 0 or model.lora_adapter_path is not None
    free = not needs_reference(config)
    for name in ("sync_ref_model", "precompute_ref_log_probs", "ref_model_path"):
        if free and getattr(preference, name):
            yield f"preference.{name} has no use: preference.loss_type={preference.loss_type} has no reference"
    if preference.use_weighting and preference.loss_type in _SORTING:
        yield (
            f"preference.use_weighting=true weighs pairs, and preference.loss_type={preference.loss_type} compares "
            "sides of different pairs: keep one of them"
        )
    if preference.precompute_ref_log_probs and preference.loss_type == "kto":
        yield (
            "preference.precompute_ref_log_probs=true cannot know the mismatched answers that kto's KL asks about, "
            "which every mini-batch pairs anew: leave it out, or take a loss of labels without a KL "
            "(apo_zero_unpaired, bco)"
        )
    if preference.sync_ref_model and preference.precompute_ref_log_probs:
        yield "preference.sync_ref_model=true changes the reference, precompute_ref_log_probs=true fixes it: keep one"
    if preference.sync_ref_model and adapters:
        yield (
            "preference.sync_ref_model=true needs a reference of its own that takes over all weights, and with "
            "adapters only they are trained: train all weights (actor_rollout_ref.model.lora_rank=0)"
        )


def family_advice(config: Config) -> Iterator[str]:
    """A sentence for each key that was given and is not used by the algorithm."""
    kind = family(config)
    unused: list[str] = []
    if kind not in _PREFERENCE:
        unused += [key for key in LEAVES if key.startswith("preference.")]
    elif not config.preference.sync_ref_model:
        unused += _SYNC_ONLY
    if kind != "ppo":
        unused += _PPO_ONLY
    if kind not in ("ppo", "distillation"):
        unused += _POLICY_LOSS_ONLY
    if kind in (*_PREFERENCE, "reward_model") and not config.sft.train_files:
        unused.append(f"{_ACTOR}.loss_agg_mode")
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
    if config.given("reward_model.model.path") and not config.reward_model.enable:
        yield "reward_model.model.path is given and scores nothing: set reward_model.enable=true"
    rows = config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
    of_pairs = kind == "reward_model" or (kind in _PREFERENCE and config.preference.loss_type not in names.LABEL_LOSSES)
    if of_pairs and rows is not None and rows % 2:
        yield (
            f"{_ACTOR}.ppo_micro_batch_size_per_gpu={rows} counts sequences, and the two of a pair stay together: "
            f"micro-batches have {max(2, rows - 1)}"
        )
