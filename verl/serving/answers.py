"""Answers without a server: many prompts in one batch, or one after the other while the text appears."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from verl.data.messages import Prompt
from verl.rollout.base import SamplingParams, request_seed
from verl.serving.model import ServedModel, request
from verl.serving.text import TextStream, response_text

ANSWER_TOKENS = 512


@dataclass(frozen=True)
class Answer:
    """One response. ``log_prob`` is the sum over its tokens under softmax(logits / temperature)."""

    text: str
    tokens: int
    finish_reason: str
    log_prob: float


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn: the fields of :class:`verl.rollout.base.SamplingParams`, besides ``n`` and ``seed``.

    ``max_tokens`` None: :data:`ANSWER_TOKENS` (or ``min_tokens``), or what the model's context leaves.
    """

    max_tokens: int | None = None
    n: int = 1
    seed: int = 0
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0

    def params(self, max_tokens: int) -> SamplingParams:
        """Raises RolloutError for values that cannot be, or do not go together."""
        names = [item.name for item in fields(SamplingParams) if item.name != "max_tokens"]
        return SamplingParams(max_tokens=max_tokens, **{name: getattr(self, name) for name in names})


def encode(model: ServedModel, prompt: Prompt, *, chat: bool) -> list[int]:
    """Ids of a prompt. ``chat``: a text is one user message; messages always are a conversation."""
    if isinstance(prompt, str) and not chat:
        return model.encode_text(prompt)
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return model.encode_chat(messages)


def _room(model: ServedModel, ids: Sequence[int], sampling: Sampling) -> int:
    if sampling.max_tokens is None:
        return min(max(ANSWER_TOKENS, sampling.min_tokens), model.room_for(ids, None))
    return model.room_for(ids, sampling.max_tokens)


def answer_all(
    model: ServedModel, prompts: Sequence[Prompt], sampling: Sampling, *, chat: bool
) -> Iterator[tuple[int, int, Answer]]:
    """Answer all prompts together; yields (prompt number, sample number, answer) as they finish."""
    requests = []
    for i, prompt in enumerate(prompts):
        ids = encode(model, prompt, chat=chat)
        params = sampling.params(_room(model, ids, sampling))
        seeds = (request_seed(sampling.seed, str(i), k) for k in range(sampling.n))
        requests += [request(f"{i}/{k}", ids, params, seed) for k, seed in enumerate(seeds)]
    engine = model.engine
    engine.submit(requests)
    try:
        while engine.pending:
            for done in engine.poll():
                name, _, sample = done.request_id.partition("/")
                text = response_text(model.tokenizer, done.token_ids.tolist(), sampling.stop)
                yield (
                    int(name),
                    int(sample),
                    Answer(text, len(done.token_ids), done.finish_reason, float(done.log_probs.sum())),
                )
    finally:
        if engine.pending:
            engine.abort()
            engine.poll()


def stream_answer(model: ServedModel, prompt: Prompt, sampling: Sampling, *, chat: bool) -> Generator[str, None, None]:
    """The text of one answer, piece by piece. Closing the generator stops it."""
    ids = encode(model, prompt, chat=chat)
    params = sampling.params(_room(model, ids, sampling))
    stream, seen, engine = TextStream(model.tokenizer, sampling.stop), 0, model.engine
    engine.submit([request("answer", ids, params, request_seed(sampling.seed, "0", 0))])
    try:
        while engine.pending:
            done = engine.poll()
            if done:
                yield stream.push(done[0].token_ids.tolist()[seen:], last=True)
                return
            for _, tokens, _ in engine.written():
                new, seen = tokens[seen:], len(tokens)
                if piece := stream.push(new):
                    yield piece
    finally:
        if engine.pending:
            engine.abort()
            engine.poll()
