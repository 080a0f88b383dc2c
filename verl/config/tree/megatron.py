"""``megatron.*`` of a role: how Megatron-Core lays its model over the processes."""

# ruff: noqa: RUF009  (option() and group() make dataclass fields)
from __future__ import annotations

from dataclasses import dataclass

from verl.config import names
from verl.config.fields import group, option


@dataclass(slots=True)
class MegatronSplit:
    """Read where `strategy` is `megatron`."""

    tensor_model_parallel_size: int | None = option(
        None,
        "Neighbouring processes over which every matrix is cut; `null`: 1 for the actor, the actor's for other roles.",
        low=1,
        verl=1,
    )
    pipeline_model_parallel_size: int | None = option(
        None,
        "Processes over which the layers lie, one behind the other; `null`: 1 for the actor, the actor's for others.",
        low=1,
        verl=1,
    )
    virtual_pipeline_model_parallel_size: int | None = option(
        None,
        "Runs of layers on each of these (interleaved pipeline); `null`: 1 for the actor, the actor's for others.",
        low=1,
    )
    context_parallel_size: int | None = option(
        None,
        "Processes that share the tokens of each micro-batch; `null`: 1 for the actor, the actor's for other roles.",
        low=1,
        verl=1,
    )
    sequence_parallel: bool = option(
        True, "The processes of a cut matrix share the tokens between the matrices too, and keep less of them."
    )


@dataclass(slots=True)
class TransformerOverride:
    """Which activations are computed again in the backward pass, by Megatron's names."""

    recompute_granularity: str | None = option(
        None,
        "`full`: whole layers; `selective`: `recompute_modules` of every layer; `null`: as "
        "`model.enable_gradient_checkpointing` says.",
        choices=("full", "selective"),
    )
    recompute_method: str | None = option(
        None,
        "Of whole layers, `uniform`: all, `recompute_num_layers` neighbours at a time; `block`: the first "
        "`recompute_num_layers` of each run of layers; `null`: `uniform`.",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = option(None, "See `recompute_method`; `null`: 1.", low=1)
    recompute_modules: list[str] = option(
        ["core_attn"], "Some of `core_attn`, `mlp`, `layernorm`.", choices=names.RECOMPUTED_MODULES
    )


@dataclass(slots=True)
class MegatronConfig(MegatronSplit):
    """Read where `strategy` is `megatron`."""

    use_distributed_optimizer: bool = option(
        True, "Copies of the weights share float32 masters and moments, instead of each keeping all."
    )
    override_transformer_config: TransformerOverride = group(TransformerOverride, "Recomputing under Megatron-Core.")
