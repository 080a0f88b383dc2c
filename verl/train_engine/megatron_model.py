"""A Megatron-Core model in place of a Hugging Face one: which models, which splits, and how it is built.

Only modules of Megatron-Core's own ("local" specification) are used, so neither Transformer Engine nor Apex is needed.
Two of them are replaced. The norm, because Megatron's wrapper of torch's multiplies by the weight before it rounds,
and Llama's after. The attention kernel, because the local one knows no packed sequences: ours is the packed attention
of :mod:`verl.models.attention`, with shared prompts, which the Hugging Face model uses too.

Nothing of Megatron's global state is used: process groups are handed in.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

from verl.errors import ConfigError, MissingDependencyError
from verl.models.backbone import LAYOUTS
from verl.models.loading import DROPOUT_NAMES
from verl.models.packing import PackedBatch
from verl.models.tensor_parallel import OutputPart, TensorParallelModel
from verl.models.value import ValueModel
from verl.train_engine.fsdp_module import decoder_layers
from verl.train_engine.megatron_layout import Layout, head_size_of, places_of
from verl.train_engine.spread import rows_per_rank

MODEL_TYPES = ("llama", "qwen2")


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


def why_not_split(config: Any, size: int) -> str | None:
    """Why a model with this Hugging Face config cannot be cut over ``size`` ranks by Megatron; None if it can."""
    config = config.get_text_config()
    if config.model_type not in MODEL_TYPES:
        return f"models of the type '{config.model_type}' have no mapping to Megatron ({', '.join(MODEL_TYPES)} have)"
    if config.num_attention_heads % size:
        return f"{size} ranks do not divide its {config.num_attention_heads} attention heads"
    if config.num_key_value_heads % size:
        return f"{size} ranks do not divide its {config.num_key_value_heads} key-value heads"
    if config.intermediate_size % size:
        return f"{size} ranks do not divide its intermediate size {config.intermediate_size}"
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


class _Norm(nn.Module):
    """RMS norm as Llama has it: in float32, rounded, then times the weight."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class _PackedAttention(nn.Module):
    """The packed attention ``name`` over this rank's heads. What Megatron hands on as the mask is the layout."""

    def __init__(self, name: str, config: Any, **kwargs: Any):
        super().__init__()
        self.kernel = AttentionInterface()[name]
        self.scale = config.kv_channels**-0.5

    def forward(self, query, key, value, attention_mask, **kwargs) -> torch.Tensor:
        """(T, 1, H, D) queries, (T, 1, G, D) keys and values to (T, 1, H * D)."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out, _ = self.kernel(self, q, k, v, None, scaling=self.scale, verl_layout=attention_mask)
        return out.flatten(2).transpose(0, 1).contiguous()


class Parts(nn.Module):
    """What one rank holds: its part of a Megatron model, and the head of a value model, of which every rank has all."""

    def __init__(self, gpt: nn.Module, head: nn.Module | None):
        super().__init__()
        self.gpt = gpt
        self.head = head


class MegatronModel(TensorParallelModel):
    """This rank's part of ``module``, whole and equal on all ranks, which stays as it is.

    Args:
        module: a causal LM, or a value model, whose head is shared with it.
        groups: process groups by Megatron's names; ``tp`` are the ranks over which matrices are cut.

    Attributes:
        parts: the parameters of this rank.
        layout: where the weights of ``module`` lie in them.
    """

    def __init__(self, module: PreTrainedModel | ValueModel, groups: dict[str, dist.ProcessGroup]):
        group = groups["tp"]
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        model = backbone_of(module)
        first = next(model.parameters())
        self.make_layout: Callable[[PackedBatch], Any] = LAYOUTS[model.config._attn_implementation]
        head = module.head if isinstance(module, ValueModel) else None
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        self.layout = Layout(places_of(module, head, model.config, rank, size), shapes, rank, size, group)
        tied = head is not None or model.config.get_text_config().tie_word_embeddings
        with warnings.catch_warnings():
            # Megatron says at length that it does without Apex
            warnings.simplefilter("ignore", UserWarning)
            self.gpt = _build(model, groups, size, first.dtype, tied=tied).to(first.device)
        self.parts = Parts(self.gpt, head)
        self.recomputed = [bool(layer.gradient_checkpointing) for layer in decoder_layers(model)]
        self.padding: int | None = model.get_input_embeddings().padding_idx
        rotary = next(m for m in model.modules() if hasattr(m, "inv_freq"))
        self.frequencies = rotary.inv_freq.detach().clone().to(torch.float32)
        vocabulary = model.config.get_text_config().vocab_size
        self.most = rows_per_rank(vocabulary, size)
        self.start = rank * self.most
        self.rows = min(self.most, vocabulary - self.start)
        self._read(module)

    @torch.no_grad()
    def _read(self, module: nn.Module) -> None:
        """Copy this rank's part of every weight."""
        own = dict(self.parts.named_parameters())
        for name, p in module.named_parameters():
            target = own[self.layout.places[name].parameter]
            if target is not p:
                dim, start, number = self.layout.block(name)
                self.layout.scatter(name, p.narrow(dim, start, number), target)

    def hidden_states(self, packed: PackedBatch) -> torch.Tensor:
        layout = self.make_layout(packed)
        angles = packed.position_ids[0, :, None] * self.frequencies
        rotary = torch.cat([angles, angles], -1)[:, None, None]
        hidden = self.gpt.embedding(packed.input_ids, packed.position_ids)
        if self.padding is not None:  # its embedding gets no gradient in the Hugging Face model
            hidden = torch.where((packed.input_ids[0] == self.padding)[:, None, None], hidden.detach(), hidden)
        for layer, again in zip(self.gpt.decoder.layers, self.recomputed, strict=True):
            compute = functools.partial(layer, attention_mask=layout, rotary_pos_emb=rotary)
            if again and torch.is_grad_enabled():
                hidden, _ = checkpoint(compute, hidden, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden, _ = compute(hidden)
        return self.gpt.decoder.final_layernorm(hidden)[:, 0]

    def output(self) -> OutputPart:
        tied = self.gpt.share_embeddings_and_output_weights
        layer = self.gpt.embedding.word_embeddings if tied else self.gpt.output_layer
        return OutputPart(layer.weight[: self.rows], self.start, self.most, self.layout.group)


def backbone_of(module: PreTrainedModel | ValueModel) -> PreTrainedModel:
    return module.model if isinstance(module, ValueModel) else module


def _build(
    model: PreTrainedModel, groups: dict[str, dist.ProcessGroup], size: int, dtype: torch.dtype, *, tied: bool
) -> nn.Module:
    """A Megatron model of the same architecture with weights of no meaning, on the host."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    hf = model.config.get_text_config()
    config = TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=head_size_of(hf),
        ffn_hidden_size=hf.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=hf.model_type == "qwen2",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        tensor_model_parallel_size=size,
        # built on the host without drawing a number: weights are copied over the empty ones
        use_cpu_initialization=True,
        perform_initialization=False,
        # fused forms need Apex or Transformer Engine
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = _Norm
    attention = functools.partial(_PackedAttention, model.config._attn_implementation)
    layer.submodules.self_attention.submodules.core_attention = attention
    block = TransformerBlockSubmodules(layer_specs=[layer] * hf.num_hidden_layers, layer_norm=_Norm)
    gpt = GPTModel(
        config,
        ModuleSpec(module=TransformerBlock, submodules=block),
        vocab_size=rows_per_rank(hf.vocab_size, size) * size,
        max_sequence_length=hf.max_position_embeddings,
        position_embedding_type="none",
        share_embeddings_and_output_weights=tied,  # then there is no output layer of its own
        pg_collection=ProcessGroupCollection(**groups, embd=None),
    )
    with torch.no_grad():
        for p in gpt.parameters():
            p.zero_()  # rows that pad the vocabulary stay 0
    return gpt


def check_model(module: nn.Module, size: int, key: str) -> None:
    """Raises:
    ConfigError: Megatron cannot train this model over ``size`` ranks.
    """
    if not isinstance(module, (PreTrainedModel, ValueModel)):
        raise ConfigError(
            f"{key}=megatron is not possible for {type(module).__name__}, a class of your own, of which nothing is "
            f"known here; use {key}=torch."
        )
    model = backbone_of(module)
    reason = why_not_split(model.config, size)
    if reason is None and model.config._attn_implementation not in LAYOUTS:
        reason = f"it runs padded ({model.config._attn_implementation}), and only packed sequences have a mapping"
    if reason is None and not all(type(p) is nn.Parameter and p.is_floating_point() for p in model.parameters()):
        reason = "it has quantized weights"
    if reason is None and any(".lora_" in name for name, _ in model.named_parameters()):
        reason = "it has adapters (model.lora_rank)"
    if reason is not None:
        raise ConfigError(f"{key}=megatron is not possible for {type(model).__name__}: {reason}; use {key}=fsdp.")
