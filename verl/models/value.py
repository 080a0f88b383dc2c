"""Value models: a Hugging Face backbone with one number per token, in fp32.

Saved as ``AutoModelForTokenClassification`` with one label where the family has such a class, else as the backbone's
folder with the head in ``value_head.safetensors``.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForTokenClassification, PreTrainedModel

from verl.errors import ModelError
from verl.models.backbone import hidden_states, may_share_prompts, use_packed_attention
from verl.models.custom_value import CustomValueModel, load_custom_value
from verl.models.host_linear import use_host_products
from verl.models.loading import (
    LOAD_ERRORS,
    building_models,
    disable_dropout,
    enable_gradient_checkpointing,
    load_config,
    resolve_model_path,
    save_pretrained,
)
from verl.models.packing import pack
from verl.models.sequence_parallel import sequence_of
from verl.models.settings import ModelSettings
from verl.notices import notice
from verl.protocol import DataProto

HEAD_FILE = "value_head.safetensors"
HEAD_NAMES = ("score", "classifier")


class ValueModel(nn.Module):
    """(B, R) values of the states before each response token.

    Args:
        model: a token-classification model with one label, or a bare backbone with ``head`` beside it.
    """

    def __init__(self, model: PreTrainedModel, head: nn.Linear | None = None):
        super().__init__()
        self.model = model
        self.own_head = head

    @property
    def head(self) -> nn.Linear:
        if self.own_head is not None:
            return self.own_head
        return next(getattr(self.model, name) for name in HEAD_NAMES if hasattr(self.model, name))

    def forward(self, batch: DataProto) -> torch.Tensor:
        """Values for every trained token (0 elsewhere), fp32; the value of a token belongs to the state before it."""
        head = self.head
        packed = pack(batch, share_prompts=may_share_prompts(self.model), device=head.weight.device)
        if not len(packed.target):
            return torch.zeros(packed.shape, device=head.weight.device)
        hidden = hidden_states(self.model, packed)[packed.source]
        sequence = sequence_of(self.model)
        if sequence is not None:
            hidden = hidden[sequence.share(len(hidden), hidden.device)]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        bias = None if head.bias is None else head.bias.to(wide)
        values = nn.functional.linear(hidden.to(wide), head.weight.to(wide), bias)[:, 0]
        if sequence is not None:
            values = sequence.join(values, len(packed.target))
        return packed.to_grid(values)

    def save_pretrained(self, folder: str | os.PathLike, tokenizer=None) -> None:
        save_pretrained(self.model, tokenizer, folder)
        if self.own_head is not None:
            save_file(
                {f"head.{k}": v.detach().cpu() for k, v in self.own_head.state_dict().items()}, Path(folder) / HEAD_FILE
            )


def load_value_model(settings: ModelSettings) -> ValueModel | CustomValueModel:
    """Load a critic from a policy's folder (fresh zero head, with a notice) or from one that has a value head.

    With ``custom_class`` it is the user's own.
    """
    if settings.custom_class is not None:
        return load_custom_value(settings)
    path = resolve_model_path(settings.path)
    with building_models():
        config = load_config(path, trust_remote_code=settings.trust_remote_code, override=settings.override_config)
        had_head = any("TokenClassification" in (name or "") for name in getattr(config, "architectures", None) or [])
        config.num_labels = 1
        try:
            value = _build(path, config, dtype=settings.torch_dtype, trust_remote_code=settings.trust_remote_code)
        except LOAD_ERRORS as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(f"The critic cannot be loaded from {path}: {reason}") from error
        saved_head = Path(path) / HEAD_FILE
        if value.own_head is not None and saved_head.is_file():
            value.own_head.load_state_dict({k.removeprefix("head."): v for k, v in load_file(saved_head).items()})
        elif not had_head:
            # zero: before its first update the critic predicts 0 everywhere, whatever the head's random seed
            for p in value.head.parameters():
                nn.init.zeros_(p)
            notice(f"The critic starts from {settings.path} with a fresh value head.")
        disable_dropout(value.model, keep=settings.override_config)
        value = value.to(settings.device)
        use_packed_attention(value.model, explicit=settings.attention, kernel=settings.kernel)
        use_host_products(value.model)
    if settings.gradient_checkpointing:
        enable_gradient_checkpointing(value.model, settings.checkpoint_every)
    return value.train()


def _build(path: str, config, **options) -> ValueModel:
    if type(config) in AutoModelForTokenClassification._model_mapping:
        return ValueModel(AutoModelForTokenClassification.from_pretrained(path, config=config, **options))
    backbone = AutoModel.from_pretrained(path, config=config, **options)
    width = getattr(config, "word_embed_proj_dim", None) or config.hidden_size
    return ValueModel(backbone, nn.Linear(width, 1, dtype=options["dtype"]))
