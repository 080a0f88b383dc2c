"""A reward model as a reward function: its own tokenizer, its own chat template, one number a response.

The policy's tokens are never given to it: what they say is, templated as the reward model was trained.
"""

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

ROWS = 16
"""Of one forward pass, where nothing is said."""


class RewardModel:
    """Scores responses with a sequence-classification model of one label.

    Args:
        model: folder, hub name, or a loaded model with ``name_or_path`` of a tokenizer.
        normalize: ``sigmoid`` gives scores in [0, 1]; ``none`` gives the raw logits, which have no bounds: advantages
            that are not normalised and the balance with a KL penalty then depend on the model's scale.
        device: default: the device that training uses.
        rows: answers of one forward pass.
        template_texts: a prompt that is a text becomes one user message, as ``data.apply_chat_template=true`` does it.
        max_length: most tokens of prompt and answer, of which the last are kept; None: the model's positions.

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
        rows: int = ROWS,
        max_length: int | None = None,
        template_texts: bool = False,
    ):
        if normalize not in ("sigmoid", "none"):
            raise RewardError(f"normalize={normalize!r} does not exist: use 'sigmoid' or 'none'")
        self.normalize, self.rows, self.max_length = normalize, rows, max_length
        self.template_texts = template_texts
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
        config = model.config.get_text_config()
        self.pad_id = int(self.tokenizer.pad_token_id if config.pad_token_id is None else config.pad_token_id)

    @torch.inference_mode()
    def __call__(self, batch: BatchView) -> list[float]:
        """B scores; texts go through the reward model's own tokenizer, so the policy's may differ."""
        rows = [
            self.encode(prompt, shown, response)
            for prompt, shown, response in zip(batch["raw_prompt"], batch["prompts"], batch["responses"], strict=True)
        ]
        logits = torch.cat([self._logits(rows[i : i + self.rows]) for i in range(0, len(rows), self.rows)])
        return (torch.sigmoid(logits) if self.normalize == "sigmoid" else logits).tolist()

    def encode(self, prompt: Any, shown: str, response: str) -> list[int]:
        """The reward model's ids of messages and an answer in its chat template, or of a text.

        Args:
            prompt: messages, or a text. shown: the prompt as a text, where the model has no template.
        """
        if isinstance(prompt, str) and self.template_texts:
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, str) or not self.tokenizer.chat_template:
            return list(self.tokenizer((prompt if isinstance(prompt, str) else shown) + response)["input_ids"])
        messages = [*prompt, {"role": "assistant", "content": response}]
        text = str(self.tokenizer.apply_chat_template(messages, tokenize=False))
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _logits(self, rows: list[list[int]]) -> torch.Tensor:
        """(B,) of rows of ids cut at their beginning: what is scored stands at the end."""
        device = next(self.model.parameters()).device
        limits = [self.max_length, getattr(self.model.config, "max_position_embeddings", None)]
        limit = min((number for number in limits if number is not None), default=None)
        pad = self.pad_id
        ids = [row[-limit:] if limit else row for row in rows]
        width = max(map(len, ids))
        padded = torch.tensor([row + [pad] * (width - len(row)) for row in ids], device=device)
        attention = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids], device=device)
        return self.model(input_ids=padded, attention_mask=attention).logits[:, 0].float()


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
