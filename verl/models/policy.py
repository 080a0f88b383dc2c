"""The policy as training sees it: log-probs and entropy of the trained tokens of a sample batch."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from verl.models.backbone import hidden_states, lm_head, may_share_prompts, use_packed_attention
from verl.models.host_linear import use_host_products
from verl.models.linear_logprob import linear_log_prob
from verl.models.loading import (
    LOAD_ERRORS,
    building_models,
    compile_layers,
    disable_dropout,
    enable_gradient_checkpointing,
    load_causal_lm,
    load_config,
    resolve_model_path,
)
from verl.models.lora import add_adapters
from verl.models.packing import pack
from verl.models.pending import build_pending, pending_of
from verl.models.sequence_parallel import sequence_of
from verl.models.settings import ModelSettings
from verl.models.tensor_parallel import tensor_parallel_of, vocab_parallel_log_prob
from verl.notices import notice
from verl.protocol import DataProto


def load_policy(settings: ModelSettings, *, frozen: bool = False, spread: bool = False) -> PreTrainedModel:
    """Load a causal LM for training (or as a frozen reference), packed where it can.

    Args:
        spread: its weights will be spread over ranks, each of which reads its own rows then
            (:mod:`verl.models.pending`), where the files can be read so. All ranks give the same.
    """
    with building_models():
        model = _load_pending(settings) if spread else None
        if model is None:
            model = load_causal_lm(
                settings.path,
                dtype=settings.torch_dtype,
                device=settings.device,
                trust_remote_code=settings.trust_remote_code,
                override_config=settings.override_config,
                quantization=settings.quantization,
            )
        return prepare_policy(model, settings, frozen=frozen)


def _load_pending(settings: ModelSettings) -> PreTrainedModel | None:
    """The model without weights; None, with a notice, where every rank must load all of them."""
    if settings.quantization is not None:
        return None  # no weights that can be spread
    reason = "its adapters are made beside whole weights" if settings.lora is not None else ""
    if not reason:
        options = {"trust_remote_code": settings.trust_remote_code}
        config = load_config(settings.path, override=settings.override_config, **options)
        path = resolve_model_path(settings.path)
        try:
            model, reason = build_pending(path, config, dtype=settings.torch_dtype, device=settings.device, **options)
        except LOAD_ERRORS:
            return None  # loading the whole says what is wrong
        if model is not None:
            disable_dropout(model, keep=settings.override_config)
            return model
    notice(f"Every process loads all weights of {settings.path} before they are spread, for {reason}.")
    return None


def prepare_policy(model: PreTrainedModel, settings: ModelSettings, *, frozen: bool = False) -> PreTrainedModel:
    """Choose the attention, and make the model ready for training or freeze it."""
    pending = pending_of(model)
    compiled = settings.compile_layers and not frozen

    def attention() -> None:
        use_packed_attention(model, explicit=settings.attention, kernel=settings.kernel)

    def settle() -> None:
        attention()
        if compiled:
            compile_layers(model)

    if pending is None:
        attention()
    else:
        pending.settle = settle
    if frozen:
        use_host_products(model)
        return model.requires_grad_(False).eval()
    if settings.lora is not None:
        add_adapters(model, settings.lora)
    use_host_products(model)
    if settings.gradient_checkpointing:
        enable_gradient_checkpointing(model, settings.checkpoint_every)
    if compiled and pending is None:
        compile_layers(model)
    return model.train()


def log_probs(
    model: PreTrainedModel,
    batch: DataProto,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_gradient: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(B, R) log-probs of the trained tokens under softmax(logits / temperature), 0 elsewhere, and their entropy.

    Differentiable in the model's weights. Tokens with ``response_mask`` 0 are context: they are fed, not scored.
    ``entropy_gradient=False``: the entropy is only looked at.
    """
    device = next(model.parameters()).device
    packed = pack(batch, share_prompts=may_share_prompts(model), device=device)
    if not len(packed.target):
        dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
        zeros = torch.zeros(packed.shape, device=device, dtype=dtype)
        return zeros, zeros if with_entropy else None
    hidden, target = hidden_states(model, packed)[packed.source], packed.target
    sequence = sequence_of(model)
    if sequence is not None:
        mine = sequence.share(len(target), device)
        hidden, target = hidden[mine], target[mine]
    options: dict[str, Any] = {
        "temperature": temperature,
        "with_entropy": with_entropy,
        "entropy_gradient": entropy_gradient,
    }
    parallel = tensor_parallel_of(model)
    if parallel is not None:
        log_prob, entropy = vocab_parallel_log_prob(hidden, target, parallel.output(), **options)
    else:
        weight, bias, softcap = lm_head(model)
        log_prob, entropy = linear_log_prob(hidden, weight, target, bias=bias, softcap=softcap, **options)
    if sequence is not None:
        log_prob = sequence.join(log_prob, len(packed.target))
        entropy = None if entropy is None else sequence.join(entropy, len(packed.target))
    return packed.to_grid(log_prob), None if entropy is None else packed.to_grid(entropy)
