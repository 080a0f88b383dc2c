"""``critic.*``: the value model of PPO. What is ``null`` follows the actor."""

# ruff: noqa: RUF009  (option() and group() make dataclass fields)
from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from verl.config import names
from verl.config.fields import group, option
from verl.config.tree.actor_rollout import Optim
from verl.config.tree.data import CustomClass
from verl.config.tree.megatron import MegatronConfig
from verl.config.tree.sharding import FSDPConfig


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
    custom_cls: CustomClass = group(CustomClass, "A value model class of your own.")


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
    enable_resource_pool: bool = option(False, "Devices of its own, so that it works beside the others.", verl="(none)")
    n_gpus_per_node: int | None = option(None, "How many on a machine; `null`: as the trainer.", low=1, verl="(none)")
    nnodes: int = option(1, "Machines that it has for itself.", low=1, verl="(none)")
    param_offload: bool | None = option(
        None,
        "Its weights lie in host memory while it has nothing to do (for GPUs); `null`: where the memory plan needs it.",
        verl="false",
    )
    strategy: str | None = option(
        None,
        "As `actor.strategy`; `null`: the actor's.",
        choices=names.STRATEGIES,
        normalise=names.strategy_name,
        verl="fsdp",
    )
    ulysses_sequence_parallel_size: int | None = option(
        None, "Processes that share the tokens of each micro-batch; `null`: as the actor.", low=1, verl=1
    )
    fsdp_config: FSDPConfig = group(FSDPConfig, "Sharding of the value model.")
    megatron: MegatronConfig = group(MegatronConfig, "Megatron-Core under the value model.")
    model: CriticModel = group(CriticModel, "The value model.")
    optim: CriticOptim = group(CriticOptim, "Optimizer of the value model.")
