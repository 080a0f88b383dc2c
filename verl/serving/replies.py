"""Answers in OpenAI's format: whole ones, and the pieces of streamed ones."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.serving.loop import Finished
from verl.serving.model import Scores

Json = dict[str, Any]


@dataclass
class Reply:
    """What is the same in every piece of one answer."""

    kind: str  # "chat.completion" or "text_completion"
    model: str
    prompt_tokens: int
    completion_tokens: int = 0
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        prefix = "chatcmpl" if self.chat else "cmpl"
        self.id = self.id or f"{prefix}-{uuid.uuid4().hex}"

    @property
    def chat(self) -> bool:
        return self.kind == "chat.completion"

    @property
    def usage(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    def _head(self, object_name: str) -> Json:
        return {"id": self.id, "object": object_name, "created": self.created, "model": self.model}

    def whole(self, choices: list[Json]) -> Json:
        return {**self._head(self.kind), "choices": choices, "usage": self.usage}

    def choice(self, index: int, text: str, logprobs: Json | None, reason: str) -> Json:
        content = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def piece(self, choices: list[Json], *, usage: bool = False) -> Json:
        """``usage``: the last piece, with the token counts and no choice."""
        name = "chat.completion.chunk" if self.chat else self.kind
        return {**self._head(name), "choices": choices, **({"usage": self.usage} if usage else {})}

    def part(self, index: int, text: str, logprobs: Json | None, reason: str | None, *, first: bool = False) -> Json:
        """New text of one choice."""
        if not self.chat:
            return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        delta = {"role": "assistant", "content": text} if first else {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


class LogProbs:
    """Log-probs in the two forms that the API has."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer

    def _text(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))

    def chat(self, tokens: Sequence[int], log_probs: Sequence[float], scores: Scores | None) -> Json:
        """``{"content": [...]}`` of the chat endpoint."""
        rows = []
        for i, (token, value) in enumerate(zip(tokens, log_probs, strict=True)):
            top = scores.top[i] if scores else []
            rows.append({**self._entry(token, value), "top_logprobs": [self._entry(t, v) for t, v in top]})
        return {"content": rows, "refusal": None}

    def _entry(self, token: int, value: float) -> Json:
        text = self._text(token)
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    def text(
        self, tokens: Sequence[int], log_probs: Sequence[float | None], scores: Sequence[Any] | None, offset: int = 0
    ) -> Json:
        """``{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`` of the completions endpoint.

        Args:
            log_probs: None for a token that nothing precedes. scores: the likeliest at each place, or None.
            offset: characters before the first token.
        """
        texts = [self._text(token) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        top = None
        if scores is not None:
            top = [None if row is None else {self._text(t): v for t, v in row} for row in scores]
        return {"tokens": texts, "token_logprobs": list(log_probs), "top_logprobs": top, "text_offset": offsets}


def text_log_probs(log_probs: LogProbs, prompt: Sequence[int], done: Finished, *, echo: bool, top: int) -> Json:
    """Of a finished completion, with its prompt in front where that is echoed."""
    tokens: list[int] = done.completion.token_ids.tolist()
    values: list[float | None] = list(done.completion.log_probs.tolist())
    best: list[Any] = list(done.scores.top) if done.scores else [[] for _ in tokens]
    if done.scores:
        values = list(done.scores.chosen)
    if echo and done.prompt_scores is not None:
        tokens = [*prompt, *tokens]
        values = [None, *done.prompt_scores.chosen, *values]
        best = [None, *done.prompt_scores.top, *best]
    return log_probs.text(tokens, values, best if top else None)
