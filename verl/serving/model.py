"""A model ready to answer: weights, tokenizer, chat template and rollout engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.checkpoint.models import ModelSource, locate_model
from verl.data.templating import PromptTemplate
from verl.errors import DataError, ModelError
from verl.export.kinds import require_language_model
from verl.hardware import check_explicit, decide
from verl.hybrid import make_twin
from verl.models.loading import building_models, load_causal_lm, load_tokenizer, stop_token_ids
from verl.models.settings import DTYPES
from verl.rollout.base import Request, RolloutEngine, SamplingParams
from verl.rollout.registry import make_engine


@dataclass(frozen=True)
class LoadOptions:
    """How to load a model for answering.

    Attributes:
        step: of a run folder, see :func:`verl.checkpoint.models.locate_model`.
        device, dtype, engine: "auto" is what the hardware table says.
        max_num_seqs: responses written together; more wait.
        max_model_len: most tokens of prompt and response together; None is what the model was made for.
        gpu_memory_utilization: share of the free GPU memory that the cache may take.
    """

    step: str | int | None = None
    device: str = "auto"
    dtype: str = "auto"
    engine: str = "auto"
    max_num_seqs: int = 64
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.85
    trust_remote_code: bool = False


@dataclass
class ServedModel:
    """A loaded model. ``model`` computes as transformers does; ``engine`` generates from the same weights.

    Attributes:
        context: most tokens of prompt and response together; None where the model sets no limit.
        described: name, size, dtype, device and engine, for people.
    """

    source: ModelSource
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    engine: RolloutEngine
    template: PromptTemplate
    context: int | None
    described: str

    @property
    def name(self) -> str:
        """``run-7/global_step_40``, or the last part of the path."""
        if self.source.run is not None:
            return f"{self.source.run.resolve().name}/global_step_{self.source.step}"
        return self.source.path.rstrip("/").rsplit("/", 1)[-1] if Path(self.source.path).is_dir() else self.source.path

    @property
    def vocabulary(self) -> int:
        return len(self.model.get_input_embeddings().weight)  # type: ignore[arg-type]

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text, with the tokenizer's beginning-of-sequence token where it has one."""
        return self._checked(PromptTemplate(self.tokenizer).encode(text))

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Ids of a conversation, ready for the assistant's next words; plain text (notice) without a chat template.

        Raises:
            DataError: the template refuses the conversation.
        """
        try:
            return self._checked(self.template.encode(messages))
        except DataError:
            raise
        except Exception as error:  # a template may raise anything
            raise DataError(f"the chat template refuses the conversation: {error}") from error

    def check_ids(self, ids: Sequence[int]) -> list[int]:
        """Ids that came from outside. Raises DataError for those that the model does not have."""
        wrong = [i for i in ids if not 0 <= i < self.vocabulary]
        if wrong:
            raise DataError(f"token id {wrong[0]} is not among the model's {self.vocabulary}")
        return self._checked(list(ids))

    def _checked(self, ids: list[int]) -> list[int]:
        if not ids:
            raise DataError("the prompt is empty: there is nothing to continue")
        return ids

    def room_for(self, prompt: Sequence[int], max_tokens: int | None) -> int:
        """How many tokens the response may have: what was asked for, else what is left.

        Raises:
            DataError: it does not fit.
        """
        if self.context is None:
            return max_tokens or DEFAULT_TOKENS
        left = self.context - len(prompt)
        if left < max(1, max_tokens or 1):
            asked = f" and {max_tokens} of the response" if max_tokens else ""
            raise DataError(
                f"the model takes {self.context} tokens; {len(prompt)} of the prompt{asked} do not fit: shorten the "
                "prompt or lower max_tokens"
            )
        return left if max_tokens is None else max_tokens

    @torch.inference_mode()
    def score(self, prompt: Sequence[int], response: Sequence[int], top: int, temperature: float = 1.0) -> Scores:
        """Log-probs of a response's tokens under softmax(logits / temperature), and the ``top`` best at each place."""
        ids = torch.tensor([[*prompt, *response]], device=self.model.device)
        logits = self.model(input_ids=ids, logits_to_keep=len(response) + 1).logits[0, :-1].float()
        log_probs = (logits / (temperature or 1.0)).log_softmax(-1)
        chosen = log_probs.gather(1, ids[0, -len(response) :, None])[:, 0] if response else log_probs.new_zeros(0)
        best = log_probs.topk(min(top, log_probs.shape[-1]), -1)
        pairs = [list(zip(i, v, strict=True)) for i, v in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
        return Scores(chosen.tolist(), pairs)


DEFAULT_TOKENS = 1024  # of a response where neither the request nor the model sets a limit


@dataclass(frozen=True)
class Scores:
    """``chosen[i]``: log-prob of token i; ``top[i]``: (id, log-prob) of the likeliest there, best first."""

    chosen: list[float]
    top: list[list[tuple[int, float]]]


def load_model(path: str, options: LoadOptions | None = None) -> ServedModel:
    """Load a model from a run folder, a checkpoint, a Hugging Face folder or a hub name.

    Raises:
        ModelError, CheckpointError: there is none. ConfigError: this machine cannot do what was asked.
    """
    options = options or LoadOptions()
    source = locate_model(path, options.step)
    choice = check_explicit(
        decide(None if options.device == "auto" else options.device),
        dtype=options.dtype,
        rollout_engine=options.engine,
    )
    tokenizer = load_tokenizer(source.path, trust_remote_code=options.trust_remote_code)
    require_language_model(source.path, trust_remote_code=options.trust_remote_code)
    with building_models():
        model = load_causal_lm(
            source.path,
            dtype=DTYPES[choice.dtype],
            device=choice.device.kind,
            trust_remote_code=options.trust_remote_code,
        )
        model.requires_grad_(False).eval()
        engine = make_engine(
            choice.rollout_engine,
            make_twin(model),
            tokenizer,
            stop_token_ids(model, tokenizer),
            max_num_seqs=options.max_num_seqs,
            gpu_memory_utilization=options.gpu_memory_utilization,
        )
    context = _context(model, options.max_model_len)
    count = sum(p.numel() for p in model.parameters())
    size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.3g}M"
    described = f"{size} parameters, {choice.dtype}, {choice.device.described}, engine {engine.name}"
    return ServedModel(source, model, tokenizer, engine, PromptTemplate(tokenizer), context, described)


def _context(model: PreTrainedModel, asked: int | None) -> int | None:
    own = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if asked is not None and own is not None and asked > own:
        raise ModelError(f"--max_model_len {asked} is more than the model's {own} positions.")
    return asked or own


def request(name: str, prompt: Sequence[int], params: SamplingParams, seed: int) -> Request:
    return Request(name, np.asarray(prompt, dtype=np.int64), params, seed)
