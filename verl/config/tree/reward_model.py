"""``reward_model.*``: a sequence-classification model that scores answers, and how one is trained."""

# ruff: noqa: RUF009  (option() and group() make dataclass fields)
from __future__ import annotations

from dataclasses import dataclass

from verl.config.fields import group, option


@dataclass(slots=True)
class RewardModelModel:
    """The scoring model."""

    path: str | None = option(
        None,
        "Folder or hub name of a sequence-classification model with one label.",
        path=True,
        verl="~/models/FsfairX-LLaMA3-RM-v0.1",
    )
    trust_remote_code: bool = option(False, "Allow the model to run code from its repository.")


@dataclass(slots=True)
class RewardModel:
    """Scores answers where `enable`; `center_rewards_coefficient` is for training one (`algorithm.name=rm`)."""

    enable: bool = option(False, "Score answers with `model.path`, in its own tokenizer and chat template.")
    normalize: str = option(
        "none",
        "`sigmoid` brings scores into [0, 1]; `none`: the model's numbers as they are.",
        choices=("none", "sigmoid"),
        verl="(none)",
    )
    micro_batch_size_per_gpu: int | None = option(None, "Answers a forward pass; `null`: 16.", low=1)
    max_length: int | None = option(
        None,
        "Most tokens of an answer with its prompt, of which the end is kept; `null`: the model's positions.",
        low=1,
    )
    center_rewards_coefficient: float = option(
        0.0, "Training: weight of (chosen + rejected)², which keeps scores around 0.", low=0, verl="(none)"
    )
    model: RewardModelModel = group(RewardModelModel, "The scoring model.")
