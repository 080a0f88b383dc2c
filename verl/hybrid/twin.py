"""The rollout twin: a second model object over the same weight storages, with its own attention and its own mode."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel

from verl.models.lora import mirror_adapters

ROLLOUT_ATTENTION = "sdpa"


def make_twin(model: PreTrainedModel, attention: str | None = None) -> PreTrainedModel:
    """Build ``model``'s class on the meta device and let every parameter be the live one of ``model``.

    The twin has its own copy of the config (so the attention implementation differs), no hooks and no gradient
    checkpointing, and stays in eval mode. Buffers are copied: they are constants such as rope's inverse frequencies.
    Because the parameters are the same objects, an optimizer step in place is seen by the twin at once.
    """
    config = copy.deepcopy(model.config)
    if attention is None:
        attention = (
            ROLLOUT_ATTENTION if getattr(model, "_supports_sdpa", False) and not _soft_capped(config) else "eager"
        )
    config._attn_implementation = attention
    with torch.device("meta"):
        twin = type(model)._from_config(config, dtype=next(model.parameters()).dtype)
        mirror_adapters(model, twin)
    for source, target in zip(model.modules(), twin.modules(), strict=True):
        for name, parameter in source._parameters.items():
            target._parameters[name] = parameter
        for name, buffer in source._buffers.items():
            target._buffers[name] = None if buffer is None else buffer.clone()
        # a few families keep rope tables and the like as plain attributes
        for name, value in vars(source).items():
            if isinstance(value, torch.Tensor):
                setattr(target, name, value.clone())
    twin.generation_config = copy.deepcopy(getattr(model, "generation_config", None))
    return twin.eval()


def _soft_capped(config) -> bool:
    return getattr(config, "attn_logit_softcapping", None) is not None
