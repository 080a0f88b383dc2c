"""``algorithm.*``: advantages, KL, filtering and off-policy correction."""

# ruff: noqa: RUF009  (option() and group() make dataclass fields)
from __future__ import annotations

from dataclasses import dataclass

from verl.config import names
from verl.config.fields import group, option


@dataclass(slots=True)
class KLControl:
    """The coefficient of the KL in the reward."""

    type: str = option("fixed", "`adaptive` steers the coefficient towards `target_kl`.", choices=names.KL_CONTROLLERS)
    kl_coef: float = option(0.001, "The coefficient. Given and above 0, it turns `use_kl_in_reward` on.", low=0)
    horizon: int = option(10000, "adaptive: samples over which the coefficient follows.", low=1)
    target_kl: float = option(0.1, "adaptive: the KL to aim for.", above=0)


@dataclass(slots=True)
class FilterGroups:
    """Dynamic sampling (DAPO): groups whose answers all score the same teach nothing and are replaced."""

    enable: bool = option(False, "Drop such groups and draw more prompts until the batch is full.")
    metric: str | None = option(
        None,
        "What is compared: `score` (the reward function's), `acc` (as it reports it), `seq_reward` (score and penalty "
        "on length), `seq_final_reward` (with the KL in the reward too, which is refused: it is not known yet); "
        "`null`: the score.",
        choices=names.FILTER_METRICS,
    )
    max_num_gen_batches: int = option(0, "Most draws a step; 0: no limit.", low=0)
    carry: bool = option(
        False,
        "Keep surplus groups for the next step (then one step old, so this needs `rollout_correction`); "
        "false: drop and count them.",
        verl="(false)",
    )
    on_limit: str = option(
        "error",
        "At the limit: stop (`error`), or train on the `smaller` batch with a notice.",
        choices=("error", "smaller"),
        verl="(error)",
    )


@dataclass(slots=True)
class RolloutCorrection:
    """Importance weights and rejection for the gap between the engine that sampled and the model that trains."""

    rollout_is: str | None = option(
        None, "Importance weights a token or a sequence at a time; `null`: none.", choices=names.ROLLOUT_IS
    )
    rollout_is_threshold: float = option(2.0, "Largest importance weight.", above=0)
    rollout_is_batch_normalize: bool = option(False, "Divide the weights by their mean over the batch.")
    rollout_rs: str | None = option(None, "Rejection rule, or several with commas; `null`: none.")
    rollout_rs_threshold: str | None = option(None, "Bounds of each rule: `high`, or `low_high`; several with commas.")
    bypass_mode: bool = option(False, "Take the engine's log-probs as the old ones.")
    loss_type: str = option("ppo_clip", "Loss in bypass mode.", choices=names.CORRECTION_LOSSES)


@dataclass(slots=True)
class Algorithm:
    """What is optimised."""

    name: str | None = option(
        None, "A preset, for example `grpo` or `dapo`: several options at once, below everything given.", verl="(none)"
    )
    adv_estimator: str = option("gae", "Advantage estimator.", choices=names.ESTIMATORS)
    gamma: float = option(1.0, "Discount.", low=0, high=1)
    lam: float = option(1.0, "GAE's lambda.", low=0, high=1)
    norm_adv_by_std_in_grpo: bool = option(True, "Divide group advantages by the group's standard deviation.")
    use_kl_in_reward: bool = option(False, "Subtract the KL against the reference from the reward (PPO style).")
    kl_penalty: str = option(
        "kl",
        "KL estimator in the reward. A number is the coefficient; 0 means no reference model.",
        choices=names.KL_ESTIMATORS,
    )
    custom_path: str | None = option(
        None, "Python file that registers estimators or losses of your own.", path=True, verl="(none)"
    )
    kl_ctrl: KLControl = group(KLControl, "Coefficient of the KL in the reward.")
    filter_groups: FilterGroups = group(FilterGroups, "Dynamic sampling.")
    rollout_correction: RolloutCorrection = group(RolloutCorrection, "Off-policy correction.")
