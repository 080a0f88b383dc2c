"""What each role is given: plain settings, read once out of the configuration by the trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl.models.settings import ModelSettings
from verl.rollout.multi_turn.settings import MultiTurnSettings
from verl.rollout.remote.settings import RemoteSettings
from verl.train_engine.parallel import ParallelSettings
from verl.train_engine.torch_engine import OptimizerSettings


@dataclass(frozen=True)
class Cut:
    """How rows become micro-batches: by tokens, by rows, or both. ``key``: the configuration key that says so."""

    max_tokens: int | None = None
    max_rows: int | None = None
    key: str = ""


@dataclass(frozen=True)
class RolloutSettings:
    """The engine, and what a run fixes about sampling. ``tensor_size``: neighbouring ranks that generate together, each
    with its part of every matrix."""

    engine: str = "hf"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.5
    response_width: int = 512
    seed: int = 0
    tensor_size: int = 1
    multi_turn: MultiTurnSettings | None = None
    remote: RemoteSettings | None = None


@dataclass(frozen=True)
class ActorSettings:
    """``loss`` is the ``actor_rollout_ref.actor`` group, as the policy losses read it. Not ``generates``: a group of
    its own does, with a copy of the weights."""

    model: ModelSettings
    optimizer: OptimizerSettings
    rollout: RolloutSettings
    loss: Any
    temperature: float = 1.0
    tokenizer_path: str | None = None
    chat_template: str | None = None
    update_cut: Cut = field(default_factory=Cut)
    log_prob_cut: Cut = field(default_factory=Cut)
    use_rollout_log_probs: bool = False
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    generates: bool = True


@dataclass(frozen=True)
class ReferenceSettings:
    model: ModelSettings
    temperature: float = 1.0
    cut: Cut = field(default_factory=Cut)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)


@dataclass(frozen=True)
class CriticSettings:
    model: ModelSettings
    optimizer: OptimizerSettings
    cliprange_value: float = 0.5
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None
    update_cut: Cut = field(default_factory=Cut)
    forward_cut: Cut = field(default_factory=Cut)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
