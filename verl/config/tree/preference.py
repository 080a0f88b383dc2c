"""``preference.*``, ``sft.*``, ``distillation.*``: learning from pairs, labels, answers and a teacher."""

# ruff: noqa: RUF009  (option() and group() make dataclass fields)
from __future__ import annotations

from dataclasses import dataclass

from verl.config import names
from verl.config.fields import option

_NONE = "(none)"


@dataclass(slots=True)
class Preference:
    """Losses over pairs (DPO and its family) and over labelled answers (KTO); see `docs/preference.md`."""

    loss_type: str = option("sigmoid", "The loss.", choices=names.PREFERENCE_LOSSES, verl=_NONE)
    beta: float = option(0.1, "Strength of the pull to the reference.", above=0, verl=_NONE)
    label_smoothing: float = option(
        0.0, "Assumed probability that a pair is labelled the wrong way round.", low=0, below=0.5, verl=_NONE
    )
    rpo_alpha: float | None = option(
        None, "Weight of an added SFT term on the chosen answers; `null`: none.", low=0, verl=_NONE
    )
    cpo_alpha: float = option(1.0, "cpo: weight of its SFT term.", low=0, verl=_NONE)
    ld_alpha: float | None = option(
        None,
        "Weight of what an answer has beyond the length of the shorter one; `null`: counts in full.",
        low=0,
        high=1,
        verl=_NONE,
    )
    use_weighting: bool = option(
        False, "Weigh each pair by how likely the policy itself would write it (WPO).", verl=_NONE
    )
    length_normalize: bool = option(False, "Log-probs a token in place of sums, whatever the loss.", verl=_NONE)
    simpo_gamma: float = option(0.5, "simpo: margin to be reached.", low=0, verl=_NONE)
    discopop_tau: float = option(0.05, "discopop: temperature of its mixture.", above=0, verl=_NONE)
    desirable_weight: float = option(1.0, "Labelled answers: weight of desirable ones.", low=0, verl=_NONE)
    undesirable_weight: float = option(1.0, "Labelled answers: weight of the others.", low=0, verl=_NONE)
    ref_model_path: str | None = option(
        None, "The reference, a model folder or hub name; `null`: the policy as it starts.", path=True, verl=_NONE
    )
    precompute_ref_log_probs: bool = option(
        False, "Ask the reference about all data once, before training, and then let it go.", verl=_NONE
    )
    sync_ref_model: bool = option(False, "Let the reference follow the policy (TR-DPO).", verl=_NONE)
    ref_model_sync_steps: int = option(512, "sync_ref_model: every so many training steps.", low=1, verl=_NONE)
    ref_model_mixup_alpha: float = option(
        0.6, "sync_ref_model: share of the policy in the new reference.", above=0, high=1, verl=_NONE
    )


@dataclass(slots=True)
class SFT:
    """SFT steps between the steps of another algorithm (mixed training)."""

    train_files: str | list[str] | None = option(
        None, "Data of the SFT steps, as `data.train_files`; `null`: none.", path=True, verl=_NONE
    )
    ratio: float = option(
        0.3, "Share of the training steps that are SFT steps, evenly spread.", above=0, below=1, verl=_NONE
    )
    train_batch_size: int | None = option(None, "Rows of an SFT step; `null`: `data.train_batch_size`.", low=1)


@dataclass(slots=True)
class Distillation:
    """On-policy distillation: the student writes, the teacher's log-probs are what it learns."""

    teacher_path: str | None = option(
        None, "The teacher, a model folder or hub name with the student's vocabulary.", path=True, verl=_NONE
    )
