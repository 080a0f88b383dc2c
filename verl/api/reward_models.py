"""A reward model as a reward function: its own tokenizer, its own chat template, one number a response."""

from __future__ import annotations

import os
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from verl.errors import ModelError, RewardError
from verl.hardware import decide
from verl.models.loading import building_models, disable_dropout, load_config, load_tokenizer, resolve_model_path
from verl.notices import notice
from verl.rewards import BatchView

_ROWS = 16  # of one forward pass


class RewardModel:
    """Scores responses with a sequence-classification model of one label.

    Args:
        model: folder, hub name, or a loaded model with ``name_or_path`` of a tokenizer.
        normalize: ``sigmoid`` gives scores in [0, 1]; ``none`` gives the raw logits, which have no bounds: advantages
            that are not normalised and the balance with a KL penalty then depend on the model's scale.
        device: default: the device that training uses.

    Raises:
        ModelError: it cannot be loaded. RewardError: the object is not such a model.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | PreTrainedModel,
        *,
        normalize: Literal["sigmoid", "none"] = "sigmoid",
        device: str | None = None,
        trust_remote_code: bool = False,
    ):
        if normalize not in ("sigmoid", "none"):
            raise RewardError(f"normalize={normalize!r} does not exist: use 'sigmoid' or 'none'")
        self.normalize = normalize
        if isinstance(model, (str, os.PathLike)):
            model = _load(os.fspath(model), device, trust_remote_code)
        elif not isinstance(model, PreTrainedModel):
            hint = " (a bare .score is only its last linear layer)" if isinstance(model, nn.Linear) else ""
            raise RewardError(
                f"the reward is a {type(model).__name__}, which is no reward model{hint}: give the whole model, its "
                "folder, or a function of the batch"
            )
        if getattr(model.config, "num_labels", 1) != 1:
            raise RewardError(
                f"the reward model {model.name_or_path} has {model.config.num_labels} labels; a reward is one number: "
                "score with a function of the batch that picks what counts"
            )
        if not model.name_or_path:
            raise RewardError("the reward model does not know the folder or hub name that its tokenizer comes from")
        self.model = model.eval()
        self.tokenizer = load_tokenizer(model.name_or_path, trust_remote_code=trust_remote_code)

    @torch.inference_mode()
    def __call__(self, batch: BatchView) -> list[float]:
        """B scores; texts go through the reward model's own tokenizer, so the policy's may differ."""
        texts = [
            self._text(prompt, shown, response)
            for prompt, shown, response in zip(batch["raw_prompt"], batch["prompts"], batch["responses"], strict=True)
        ]
        logits = torch.cat([self._logits(texts[i : i + _ROWS]) for i in range(0, len(texts), _ROWS)])
        return (torch.sigmoid(logits) if self.normalize == "sigmoid" else logits).tolist()

    def _text(self, prompt: Any, shown: str, response: str) -> str:
        if isinstance(prompt, str) or not self.tokenizer.chat_template:
            return shown + response
        messages = [*prompt, {"role": "assistant", "content": response}]
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False))

    def _logits(self, texts: list[str]) -> torch.Tensor:
        device = next(self.model.parameters()).device
        limit = getattr(self.model.config, "max_position_embeddings", None)
        encoded = self.tokenizer(
            texts, return_tensors="pt", padding=True, truncation=limit is not None, max_length=limit
        )
        inputs = {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}
        return self.model(**inputs).logits[:, 0].float()


def _load(path: str, device: str | None, trust_remote_code: bool) -> PreTrainedModel:
    choice = decide(device)
    with building_models():
        config = load_config(path, trust_remote_code=trust_remote_code)
        trained = any("SequenceClassification" in name for name in config.architectures or [])
        trained = trained or bool(getattr(config, "auto_map", None))
        if not trained:
            notice(
                f"{path} is no reward model ({config.architectures}): its head is fresh and its scores mean nothing."
            )
        config.num_labels = 1 if not trained else config.num_labels
        try:
            model = AutoModelForSequenceClassification.from_pretrained(
                resolve_model_path(path), config=config, dtype=choice.dtype, trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            raise ModelError(f"The reward model {path} cannot be loaded: {str(error).splitlines()[0]}") from error
    if model.config.pad_token_id is None:
        model.config.pad_token_id = load_tokenizer(path, trust_remote_code=trust_remote_code).pad_token_id
    disable_dropout(model)
    return model.to(choice.device.kind)
