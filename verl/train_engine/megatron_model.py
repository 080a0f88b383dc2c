"""A Megatron-Core model in place of a Hugging Face one: which models, which splits, and how it computes.

Nothing of Megatron's global state is used but scratch memory: process groups are handed in.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from verl.errors import ConfigError, MissingDependencyError
from verl.models.backbone import LAYOUTS
from verl.models.loading import DROPOUT_NAMES
from verl.models.packing import PackedBatch
from verl.models.sequence_parallel import SequenceGroup
from verl.models.tensor_parallel import OutputPart, TensorParallelModel
from verl.models.value import ValueModel
from verl.train_engine.fsdp_module import decoder_layers
from verl.train_engine.megatron_build import Tokens, build_chunk
from verl.train_engine.megatron_grid import Grid, Stages
from verl.train_engine.megatron_layout import Layout, places_of, scatter, tied_output
from verl.train_engine.megatron_pipeline import Pipeline
from verl.train_engine.megatron_recompute import Run, runs_of, wrap_modules
from verl.train_engine.parallel import ParallelSettings
from verl.train_engine.spread import rows_per_rank

MODEL_TYPES = ("llama", "qwen2", "mixtral")


def require_megatron() -> None:
    """Raises:
    MissingDependencyError: megatron-core is not installed.
    """
    try:
        found = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise MissingDependencyError("megatron-core", "strategy=megatron", "megatron-core")


def why_not_split(config: Any, size: int, *, context: int = 1, stages: int = 1) -> str | None:
    """Why a model with this Hugging Face config cannot be cut over ``size`` ranks by Megatron; None if it can.

    Args:
        context: ranks that share the tokens of a micro-batch.
        stages: runs of layers behind each other.
    """
    config = config.get_text_config()
    if config.model_type not in MODEL_TYPES:
        return f"models of the type '{config.model_type}' have no mapping to Megatron ({', '.join(MODEL_TYPES)} have)"
    if config.num_attention_heads % size:
        return f"{size} ranks do not divide its {config.num_attention_heads} attention heads"
    if config.num_key_value_heads % size:
        return f"{size} ranks do not divide its {config.num_key_value_heads} key-value heads"
    experts = getattr(config, "num_local_experts", None)
    if experts is not None and experts % size:
        return f"{size} ranks do not divide its {experts} experts"
    if experts is None and config.intermediate_size % size:
        return f"{size} ranks do not divide its intermediate size {config.intermediate_size}"
    if getattr(config, "router_jitter_noise", 0):
        return "its router is noisy (router_jitter_noise)"
    if getattr(config, "output_router_logits", False):
        return "its router has a loss of its own (output_router_logits)"
    if getattr(config, "sliding_window", None) and config.model_type == "mixtral":
        return "some of its layers attend to a window"
    if config.num_attention_heads % (size * context):
        return f"{size} times {context} ranks do not divide its {config.num_attention_heads} attention heads"
    if config.num_hidden_layers < stages:
        return f"its {config.num_hidden_layers} layers are fewer than the {stages} stages of the pipeline"
    if rows_per_rank(config.vocab_size, size) * (size - 1) >= config.vocab_size:
        return f"{size} ranks are too many for its {config.vocab_size} tokens"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, and only silu has a mapping"
    biased = [name for name in ("attention_bias", "mlp_bias") if getattr(config, name, False)]
    if biased:
        return f"it has {' and '.join(biased)}, which have no mapping"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "some of its layers attend to a window"
    if _rope_type(config) not in ("default", "linear", "llama3"):
        return f"rotary positions of the type '{_rope_type(config)}' have no mapping"
    dropout = [name for name in DROPOUT_NAMES if getattr(config, name, None)]
    return f"it has dropout ({', '.join(dropout)})" if dropout else None


def _rope_type(config: Any) -> str:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return parameters.get("rope_type", parameters.get("type", "default"))


class _GatherTokens(torch.autograd.Function):
    """(t, D) of every rank to (T, D). What follows is computed alike on all ranks, so each keeps its rows' gradient."""

    @staticmethod
    def forward(ctx, states: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.mine = slice(dist.get_rank(group) * len(states), (dist.get_rank(group) + 1) * len(states))
        out = states.new_empty(len(states) * dist.get_world_size(group), *states.shape[1:])
        dist.all_gather_into_tensor(out, states.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad[ctx.mine].contiguous(), None


class Parts(nn.Module):
    """What one rank holds: its runs of layers, and the head of a value model, of which every rank has all."""

    def __init__(self, chunks: list[nn.Module], head: nn.Module | None):
        super().__init__()
        self.chunks = nn.ModuleList(chunks)
        self.head = head


class MegatronModel(TensorParallelModel):
    """This rank's part of ``module``, whole and equal on all ranks, which stays as it is.

    Args:
        module: a causal LM, or a value model, whose head is shared with it.

    Attributes:
        parts: the parameters of this rank.
        layout: where the weights of ``module`` lie in them.
        pipeline: the stage of the present pass.
        sequence: the ranks that share the tokens of a micro-batch; None: each has all.
    """

    def __init__(self, module: PreTrainedModel | ValueModel, grid: Grid, settings: ParallelSettings):
        self.grid = grid
        rank, size = grid.tensor.rank, grid.tensor.world_size
        model = backbone_of(module)
        hf = model.config.get_text_config()
        first = next(model.parameters())
        self.pipeline = Pipeline(grid, settings.virtual_size, first.device)
        self.sequence = SequenceGroup(grid.context.group) if grid.context.world_size > 1 else None
        self.scattered = settings.sequence_parallel and size > 1
        self.make_layout: Callable[[PackedBatch], Any] = LAYOUTS[model.config._attn_implementation]
        head = module.head if isinstance(module, ValueModel) else None
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        stages = Stages(hf.num_hidden_layers, settings.pipeline_size, settings.virtual_size)
        places = places_of(module, head, model.config, rank, size, stages)
        self.tied = head is None and hf.tie_word_embeddings
        further = tied_output(places, stages) if self.tied and stages.ranks > 1 else {}
        self.layout = Layout(places, further, shapes, grid)
        chunks = [build_chunk(model, grid, stages, n, self.scattered, head is not None) for n in range(stages.chunks)]
        self.parts = Parts([chunk.to(first.device) for chunk in chunks], head)
        kept = [bool(layer.gradient_checkpointing) for layer in decoder_layers(model)]
        here = grid.pipeline.rank
        self.runs: list[list[Run]] = []
        for number, chunk in enumerate(chunks):
            wrap_modules(chunk.decoder.layers, settings.recompute)
            checkpointed = [kept[i] for i in stages.run(here, number)]
            self.runs.append(runs_of(chunk.decoder.layers, checkpointed, settings.recompute))
        self.padding: int | None = model.get_input_embeddings().padding_idx
        rotary = next(m for m in model.modules() if hasattr(m, "inv_freq"))
        self.frequencies = rotary.inv_freq.detach().clone().to(torch.float32)
        self.width, self.dtype = hf.hidden_size, first.dtype
        self.most = rows_per_rank(hf.vocab_size, size)
        self.start = rank * self.most
        self.rows = min(self.most, hf.vocab_size - self.start)
        self._read(module)

    @torch.no_grad()
    def _read(self, module: nn.Module) -> None:
        """Copy this rank's part of every weight."""
        own, weights = dict(self.parts.named_parameters()), dict(module.named_parameters())
        for name, place in self.layout.held():
            target, p = own[place.parameter], weights[name]
            if target is not p:
                dim, start, number = self.layout.block(name)
                scatter(place, p.narrow(dim, start, number), target)

    def hidden_states(self, packed: PackedBatch) -> torch.Tensor:
        tokens, pipeline = packed.num_tokens, self.pipeline
        size = self.grid.tensor.world_size if self.scattered else 1
        context = self.grid.context
        part = rows_per_rank(tokens, context.world_size * size) * size
        mine = slice(context.rank * part, (context.rank + 1) * part)
        pad = part * context.world_size - tokens
        ids, positions = (nn.functional.pad(x, (0, pad))[:, mine] for x in (packed.input_ids, packed.position_ids))
        angles = positions[0, :, None] * self.frequencies
        rotary = torch.cat([angles, angles], -1)[:, None, None]
        given = Tokens(self.make_layout(packed), tokens, self.sequence)
        if pipeline.first:
            hidden = self._embed(ids)
        else:
            hidden = pipeline.enter((part // size, 1, self.width), self.dtype)
        for run in self.runs[pipeline.chunk]:
            hidden = run(hidden, attention_mask=given, rotary_pos_emb=rotary)
        hidden = pipeline.leave(hidden)
        hidden = self.parts.chunks[-1].decoder.final_layernorm(hidden)[:, 0]
        if self.scattered:
            hidden = _GatherTokens.apply(hidden, self.grid.tensor.group)
        return hidden[:tokens] if self.sequence is None else self.sequence.gather(hidden)[:tokens]

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        """(1, T) ids to (T, 1, D), or to this rank's share of the rows."""
        hidden = self.parts.chunks[0].embedding.word_embeddings(ids)
        if not self.scattered:
            hidden = hidden.transpose(0, 1)
        if self.padding is None:
            return hidden
        # its embedding gets no gradient in the Hugging Face model
        rows = slice(self.grid.tensor.rank * len(hidden), (self.grid.tensor.rank + 1) * len(hidden))
        mine = ids[0, rows] if self.scattered else ids[0]
        return torch.where((mine == self.padding)[:, None, None], hidden.detach(), hidden)

    def output(self) -> OutputPart:
        chunk = self.parts.chunks[-1]
        layer = chunk.embedding.word_embeddings if self.tied and not self.layout.tied else chunk.output_layer
        return OutputPart(layer.weight[: self.rows], self.start, self.most, self.grid.tensor.group)


def backbone_of(module: PreTrainedModel | ValueModel) -> PreTrainedModel:
    return module.model if isinstance(module, ValueModel) else module


def check_model(module: nn.Module, settings: ParallelSettings) -> None:
    """Raises:
    ConfigError: Megatron cannot train this model over ranks like these.
    """
    key = settings.key
    if not isinstance(module, (PreTrainedModel, ValueModel)):
        raise ConfigError(
            f"{key}=megatron is not possible for {type(module).__name__}, a class of your own, of which nothing is "
            f"known here; use {key}=torch."
        )
    model = backbone_of(module)
    stages = settings.pipeline_size * settings.virtual_size
    reason = why_not_split(model.config, settings.tensor_size, context=settings.context_size, stages=stages)
    if reason is None and model.config._attn_implementation not in LAYOUTS:
        reason = f"it runs padded ({model.config._attn_implementation}), and only packed sequences have a mapping"
    if reason is None and not all(type(p) is nn.Parameter and p.is_floating_point() for p in model.parameters()):
        reason = "it has quantized weights"
    if reason is None and any(".lora_" in name for name, _ in model.named_parameters()):
        reason = "it has adapters (model.lora_rank)"
    if reason is not None:
        raise ConfigError(f"{key}=megatron is not possible for {type(model).__name__}: {reason}; use {key}=fsdp.")
