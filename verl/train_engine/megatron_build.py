"""How a run of layers is built as a Megatron-Core model.

Only modules of Megatron-Core's own ("local" specification) are used, so neither Transformer Engine nor Apex is needed.
Three of them are replaced. The norm, because Megatron's wrapper of torch's multiplies by the weight before it rounds,
and Llama's after. The attention kernel, because the local one knows no packed sequences: ours is the packed attention
of :mod:`verl.models.attention`, with shared prompts, which the Hugging Face model uses too. And in a mixture of experts
the experts (:mod:`verl.train_engine.megatron_experts`), whose weights lie as the Hugging Face model's do.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from verl.models.sequence_parallel import SequenceGroup, SplitLayout, around
from verl.train_engine.megatron_experts import experts_of
from verl.train_engine.megatron_grid import Grid, Stages
from verl.train_engine.megatron_layout import head_size_of
from verl.train_engine.spread import rows_per_rank


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


@dataclass
class Tokens:
    """What the attention of one pass is told: the layout of all ``tokens``, and who shares them."""

    layout: Any
    tokens: int
    sequence: SequenceGroup | None


class _PackedAttention(nn.Module):
    """The packed attention ``name`` over this rank's heads. What Megatron hands on as the mask are the tokens.

    With context parallelism tokens are traded for heads around it (Ulysses, see :mod:`verl.models.sequence_parallel`).
    """

    def __init__(self, name: str, config: Any, **kwargs: Any):
        super().__init__()
        self.kernel = around(AttentionInterface()[name])
        self.scale = config.kv_channels**-0.5

    def forward(self, query, key, value, attention_mask: Tokens, **kwargs) -> torch.Tensor:
        """(T, 1, H, D) queries, (T, 1, G, D) keys and values to (T, 1, H * D); the last rows may be padding."""
        given = attention_mask
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if given.sequence is not None:
            layout: Any = SplitLayout(given.layout, given.sequence, given.tokens)
        else:
            layout = given.layout
            q, k, v = (x[:, :, : given.tokens] for x in (q, k, v))
        out, _ = self.kernel(self, q, k, v, None, scaling=self.scale, verl_layout=layout)
        out = nn.functional.pad(out, (0, 0, 0, 0, 0, len(query) - out.shape[1]))
        return out.flatten(2).transpose(0, 1).contiguous()


def build_chunk(
    model: PreTrainedModel, grid: Grid, stages: Stages, number: int, scattered: bool, valued: bool
) -> nn.Module:
    """One of this rank's runs of layers, as a Megatron model with weights of no meaning, on the host.

    To Megatron it is a whole model: how it lies in a pipeline is nothing that it needs to know.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules

    if scattered and parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()  # scratch memory of the gathered tokens; the one global thing
    hf = model.config.get_text_config()
    here, size = grid.pipeline.rank, grid.tensor.world_size
    layers = len(stages.run(here, number))
    first = here == 0 and number == 0
    last = here == stages.ranks - 1 and number == stages.chunks - 1
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = _Norm
    attention = functools.partial(_PackedAttention, model.config._attn_implementation)
    layer.submodules.self_attention.submodules.core_attention = attention
    if hasattr(hf, "num_local_experts"):
        layer.submodules.mlp = experts_of(hf, grid.tensor.group)
    block = TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=_Norm)
    with warnings.catch_warnings():
        # Megatron says at length that it does without Apex
        warnings.simplefilter("ignore", UserWarning)
        gpt = GPTModel(
            _config_of(hf, layers, size, next(model.parameters()).dtype, scattered),
            ModuleSpec(module=TransformerBlock, submodules=block),
            vocab_size=rows_per_rank(hf.vocab_size, size) * size,
            max_sequence_length=hf.max_position_embeddings,
            position_embedding_type="none",
            pre_process=first,
            post_process=last,
            # then there is no output layer of its own beside the embedding
            share_embeddings_and_output_weights=valued or hf.tie_word_embeddings,
            pg_collection=ProcessGroupCollection(tp=grid.tensor.group, pp=grid.alone, cp=grid.alone, embd=None),
        )
    if valued and last and not first:
        gpt.output_layer = None
    with torch.no_grad():
        for p in gpt.parameters():
            p.zero_()  # rows that pad the vocabulary stay 0
    return gpt


def _config_of(hf: Any, layers: int, size: int, dtype: torch.dtype, scattered: bool) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=layers,
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
        sequence_parallel=scattered,
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
