"""The rollout twin: a second model object over the same weight storages, with its own attention and its own mode."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from verl.models.lora import mirror_adapters

ROLLOUT_ATTENTION = "sdpa"


def make_twin(
    model: PreTrainedModel,
    attention: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    parameters: Mapping[str, nn.Parameter] | None = None,
) -> PreTrainedModel:
    """Build ``model``'s class on the meta device and let every parameter be the live one of ``model``.

    The twin has its own copy of the config (so the attention implementation differs), no hooks and no gradient
    checkpointing, and stays in eval mode. Buffers are copied: they are constants such as rope's inverse frequencies.
    Because the parameters are the same objects, an optimizer step in place is seen by the twin at once.

    Args:
        dtype: in which the twin computes; default: that of the parameters of ``model``.
        parameters: by name, in place of the live ones (weights that are spread over ranks have no whole live ones).
    """
    config = copy.deepcopy(model.config)
    if attention is None:
        attention = (
            ROLLOUT_ATTENTION if getattr(model, "_supports_sdpa", False) and not _soft_capped(config) else "eager"
        )
    config._attn_implementation = attention
    with torch.device("meta"):
        twin = type(model)._from_config(config, dtype=dtype or next(model.parameters()).dtype)
        mirror_adapters(model, twin)
    replaced = {} if parameters is None else {id(p): parameters[name] for name, p in model.named_parameters()}
    for source, target in zip(model.modules(), twin.modules(), strict=True):
        for name, parameter in source._parameters.items():
            target._parameters[name] = replaced.get(id(parameter), parameter)
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
