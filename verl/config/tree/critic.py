"""``critic.*``: the value model of PPO. What is ``null`` follows the actor."""

# ruff: noqa: RUF009  (option() and group() make dataclass fields)
from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from verl.config import names
from verl.config.fields import group, option
from verl.config.tree.actor_rollout import Optim


@dataclass(slots=True)
class CriticModel:
    """The value model: by default the policy's model with a fresh value head."""

    path: str | None = option(
        None, "Model folder or hub name; `null`: the policy's.", path=True, verl="~/models/deepseek-llm-7b-chat"
    )
    trust_remote_code: bool | None = option(None, "Allow code from its repository; `null`: as the policy.", verl=False)
    override_config: dict[str, Any] = option({}, "Values written over the model's own config before it is built.")
    enable_gradient_checkpointing: bool | None = option(
        None, "Recompute activations; `null`: as the policy.", verl=True
    )
    external_lib: str | None = option(None, "Python module imported before the model is built; `null`: as the policy.")
    attn_implementation: str | None = option(None, "Attention; `null`: as the policy.", choices=names.ATTENTION)


@dataclass(slots=True)
class CriticOptim(Optim):
    """As the actor's, with a higher rate."""

    lr: float = option(1e-5, "Peak learning rate.", low=0, below=inf)


@dataclass(slots=True)
class Critic:
    """The update of the value model."""

    enable: bool | None = option(None, "Train a value model; `null`: only if the estimator needs one (gae).")
    ppo_mini_batch_size: int | None = option(None, "Prompts an optimizer step; `null`: as the actor.", low=1)
    ppo_micro_batch_size_per_gpu: int | None = option(
        None, "Sequences a micro-batch; `null`: by memory (or by tokens with `use_dynamic_bsz`).", low=1
    )
    forward_micro_batch_size_per_gpu: int | None = option(
        None, "Sequences a forward pass without gradient; `null`: `ppo_micro_batch_size_per_gpu`.", low=1
    )
    use_dynamic_bsz: bool | None = option(None, "Cut micro-batches by tokens; `null`: as the actor.")
    ppo_max_token_len_per_gpu: int | None = option(
        None, "Most tokens a micro-batch; `null`: as the actor.", low=1, verl=32768
    )
    ppo_epochs: int | None = option(None, "Passes over each rollout; `null`: as the actor.", low=1)
    shuffle: bool | None = option(None, "Shuffle before mini-batches are cut; `null`: as the actor.")
    cliprange_value: float = option(0.5, "How far a value may move from its old one before its loss is clipped.", low=0)
    grad_clip: float = option(1.0, "Largest norm of the gradient; 0: no clipping.", low=0)
    loss_agg_mode: str | None = option(
        None, "How token losses become one number; `null`: as the actor.", choices=names.LOSS_AGG_MODES
    )
    model: CriticModel = group(CriticModel, "The value model.")
    optim: CriticOptim = group(CriticOptim, "Optimizer of the value model.")
