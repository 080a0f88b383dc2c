"""How one role's weights are spread over the ranks of its group."""

from __future__ import annotations

from dataclasses import dataclass

STRATEGIES = ("auto", "torch", "fsdp", "megatron")


@dataclass(frozen=True)
class Recompute:
    """What Megatron's layers compute again in the backward pass instead of keeping it.

    Attributes:
        granularity: ``full``: whole layers; ``selective``: the ``modules`` of every layer; None: the layers that
            gradient checkpointing chose.
        method: of whole layers: ``uniform``: all of them, ``num_layers`` neighbours at a time; ``block``: the first
            ``num_layers`` of each run of layers.
        modules: some of ``core_attn``, ``mlp`` and ``layernorm``.
    """

    granularity: str | None = None
    method: str = "uniform"
    num_layers: int = 1
    modules: tuple[str, ...] = ("core_attn",)


@dataclass(frozen=True)
class ParallelSettings:
    """Attributes:
    strategy: ``torch``: every rank holds all weights and gradients are summed; ``fsdp``: every rank holds a shard;
        ``megatron``: Megatron-Core cuts matrices over neighbouring ranks;
        ``auto``: ``fsdp`` where the ranks are several processes.
    key: the configuration key that chose the strategy, for messages.
    fsdp_size: ranks that a copy of the weights is spread over; -1: all of them. With fewer, there are several
        copies, each spread over neighbouring ranks (hybrid sharding).
    offload: shards, gradients and moments lie in host memory, and the optimizer runs there (CUDA).
    reshard_after_forward: give a layer's gathered weights back after its forward pass and gather them again in the
        backward pass.
    forward_prefetch: ask for the next layer's weights one layer earlier.
    sequence_size: neighbouring ranks that share the tokens of each micro-batch (sequence parallelism).
    tensor_size: with ``megatron``, neighbouring ranks over which every matrix is cut (tensor parallelism).
    pipeline_size: with ``megatron``, ranks over which the layers lie, one behind the other (pipeline parallelism).
    virtual_size: runs of layers on each of these (interleaved pipeline).
    context_size: with ``megatron``, ranks that share the tokens of each micro-batch (context parallelism).
    sequence_parallel: with ``megatron``, the ranks of a cut matrix share the tokens between matrices too.
    distributed_optimizer: with ``megatron``, copies of the weights share masters and moments.
    recompute: with ``megatron``, what is computed again.
    """

    strategy: str = "auto"
    key: str = "actor_rollout_ref.actor.strategy"
    fsdp_size: int = -1
    offload: bool = False
    reshard_after_forward: bool = True
    forward_prefetch: bool = False
    sequence_size: int = 1
    tensor_size: int = 1
    pipeline_size: int = 1
    virtual_size: int = 1
    context_size: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    recompute: Recompute = Recompute()
