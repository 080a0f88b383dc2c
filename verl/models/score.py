"""Reward models: a Hugging Face sequence-classification model with one label, run over packed rows.

The score of a text is read at its last token that is not the model's pad token, which is where
``AutoModelForSequenceClassification`` reads it. So what is saved scores as it was trained, also if pad equals eos.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from verl.errors import ModelError
from verl.models.backbone import use_packed_attention
from verl.models.loading import (
    LOAD_ERRORS,
    building_models,
    disable_dropout,
    enable_gradient_checkpointing,
    load_config,
    resolve_model_path,
)
from verl.models.lora import add_adapters
from verl.models.settings import ModelSettings
from verl.models.value import HEAD_NAMES, ValueModel
from verl.notices import notice
from verl.protocol import DataProto


def load_score_model(settings: ModelSettings, tokenizer: PreTrainedTokenizerBase) -> ValueModel:
    """Load a reward model to train, from a policy's folder (fresh zero head, with a notice) or from a reward model's.

    Raises:
        ModelError: there is no such class for the family, or it does not score by a linear layer at one token.
    """
    path = resolve_model_path(settings.path)
    with building_models():
        config = load_config(path, trust_remote_code=settings.trust_remote_code, override=settings.override_config)
        had_head = any(
            "SequenceClassification" in (name or "") for name in getattr(config, "architectures", None) or []
        )
        config.num_labels = 1
        config.pad_token_id = config.get_text_config().pad_token_id = int(tokenizer.pad_token_id)
        try:
            model = AutoModelForSequenceClassification.from_pretrained(
                path, config=config, dtype=settings.torch_dtype, trust_remote_code=settings.trust_remote_code
            )
        except LOAD_ERRORS as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(f"{path} cannot be loaded as a reward model: {reason}") from error
        if not any(isinstance(getattr(model, name, None), nn.Linear) for name in HEAD_NAMES):
            raise ModelError(f"{type(model).__name__} has no linear scoring layer, so it cannot be trained here")
        score = ValueModel(model)
        if not had_head:
            # zero: before the first update all texts score 0, whatever the head's random seed
            for p in score.head.parameters():
                nn.init.zeros_(p)
            notice(f"The reward model starts from {settings.path} with a fresh scoring head.")
        disable_dropout(model, keep=settings.override_config)
        score = score.to(settings.device)
        use_packed_attention(model, explicit=settings.attention, kernel=settings.kernel)
        if settings.lora is not None:
            head = next(name for name in HEAD_NAMES if isinstance(getattr(model, name, None), nn.Linear))
            add_adapters(model, settings.lora, head=head)
    if settings.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return score.train()


def at_the_end(batch: DataProto, pad_id: int) -> DataProto:
    """The rows of a sample batch, with a token more and only that one trained: the state before it is that of the
    last token that is not ``pad_id``, where a reward model scores."""
    tensors = batch.batch
    width = tensors["prompts"].shape[1]
    responses, attention = tensors["responses"], tensors["attention_mask"].bool()
    place = torch.arange(responses.shape[1] + 1, device=responses.device)
    real = attention[:, width:] & (responses != pad_id)
    end = (real * (place[:-1] + 1)).amax(1, keepdim=True)  # (B, 1) tokens up to the last one that counts
    added = responses.new_zeros(len(responses), 1)
    found = {
        "prompts": tensors["prompts"],
        "responses": torch.cat([responses, added], 1),
        "response_mask": (place == end).to(tensors["attention_mask"].dtype),
        "attention_mask": torch.cat([attention[:, :width], place <= end], 1).to(tensors["attention_mask"].dtype),
    }
    columns = {name: batch.non_tensor_batch[name] for name in ("uid", "sample_id")}
    return DataProto(batch=TensorDict(found, batch_size=[len(batch)]), non_tensor_batch=columns, meta_info={})
