"""From conversations, prompts with completions, and texts to token ids with a mask of the trained ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from verl.data.messages import Message, Prompt
from verl.data.spans import Span, assistant_spans, assistant_turns
from verl.data.templating import PromptTemplate, TemplateMode, messages_as_text
from verl.errors import DataError
from verl.notices import notice

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\b")


class RowProblem(DataError):
    """A row that cannot be used; ``reason`` names its kind, for counts."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


Encoded = tuple[np.ndarray, np.ndarray]
"""ids (length,) int32 and mask (length,) bool, True where the token is trained; ends with the last trained one."""


class ConversationTemplate:
    """Encodes what is to be learned with the same template as prompts of rollouts (`PromptTemplate`, same arguments).

    Trained are the assistant's texts with the token that ends them, so that stopping is learned: the template's
    end-of-turn token, or the tokenizer's eos where a template or a plain text has none. Errors are `RowProblem`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        mode: TemplateMode = "auto",
        kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ):
        self.tokenizer = tokenizer
        self.prompts = PromptTemplate(tokenizer, mode=mode, kwargs=kwargs, chat_template=chat_template)
        self._kwargs = {key: value for key, value in self.prompts.kwargs.items() if key != "add_generation_prompt"}
        self._bos = self.prompts.bos
        added = tokenizer.added_tokens_decoder.items()
        self._special = {number for number, token in added if token.special} | set(tokenizer.all_special_ids)

    @property
    def templates_messages(self) -> bool:
        return self.prompts.mode is not False and self.prompts.has_template

    def encode_conversation(
        self, messages: list[Message], where: str, *, first: int = 0, tools: Sequence[Any] | None = None
    ) -> Encoded:
        """A conversation of which the assistant's messages from number ``first`` on are trained."""
        turns = assistant_turns(messages)
        count = sum(turn >= first for turn in turns)
        if not count:
            raise RowProblem("no assistant message", f"{where}: no assistant message to learn from")
        messages = messages[: turns[-1] + 1]  # what follows the last one is never seen by it
        if not self.templates_messages:
            return self._encode_untemplated(messages, count, where)
        kwargs = dict(self._kwargs) if not tools else {**self._kwargs, "tools": list(tools)}
        if self._has_generation_tag(tools):
            ids, spans = self._by_generation_tag(messages, kwargs, where)
        else:
            ids, spans = self._by_spans(messages, kwargs, where)
        if len(spans) != len(turns) and first:
            raise RowProblem(
                "template", f"{where}: the chat template marks {len(spans)} of {len(turns)} assistant messages"
            )
        ids, spans = self._close_turns(ids, spans, where)
        return _masked(ids, spans[-count:] if first else spans)

    def encode_completion(
        self, prompt: Prompt, completion: str | list[Message], where: str, *, tools: Sequence[Any] | None = None
    ) -> Encoded:
        """A prompt and what is to be learned after it.

        Two plain texts stay plain (unless ``data.apply_chat_template=true``) and are put together as they are; any
        other pair is a conversation.
        """
        if isinstance(prompt, str) and isinstance(completion, str) and self.prompts.mode is not True:
            return self._encode_plain(prompt, completion, where)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        return self.encode_conversation([*messages, *answer], where, first=len(messages), tools=tools)

    def encode_text(self, text: str, where: str) -> Encoded:
        """A plain text: every token is trained but the first, which nothing predicts."""
        ids = self._plain_ids(text)
        ids = [*ids, *([] if ids[-1:] == [self._eos(where)] else [self._eos(where)])]
        return _masked(ids, [(1, len(ids))])

    def _encode_untemplated(self, messages: list[Message], count: int, where: str) -> Encoded:
        if count > 1 or len(messages) == 1:
            raise RowProblem(
                "template",
                f"{where}: without a chat template only a prompt and one answer can be put together, this is "
                f"{len(messages)} messages with {count} answers: set custom_chat_template",
            )
        notice("the tokenizer has no chat template in use: conversations are given to the model as plain text")
        text = messages_as_text(messages[:-1])
        return self._encode_plain(text, (" " if text.endswith(":") else "\n") + messages[-1]["content"], where)

    def _encode_plain(self, prompt: str, completion: str, where: str) -> Encoded:
        context, answer = self._split_tokens([prompt, completion], where)
        context = context if not self._bos or context[:1] == self._bos else [*self._bos, *context]
        if answer[-1:] != [self._eos(where)]:
            answer = [*answer, self._eos(where)]
        return _masked([*context, *answer], [(len(context), len(context) + len(answer))])

    def _plain_ids(self, text: str) -> list[int]:
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return ids if not self._bos or ids[:1] == self._bos else [*self._bos, *ids]

    def _eos(self, where: str) -> int:
        if self.tokenizer.eos_token_id is None:
            raise RowProblem("no eos token", f"{where}: the tokenizer has no eos_token, so no end can be learned")
        return self.tokenizer.eos_token_id

    def _has_generation_tag(self, tools: Sequence[Any] | None) -> bool:
        template = self._kwargs.get("chat_template") or self.tokenizer.get_chat_template(None, tools or None)
        return self.tokenizer.is_fast and bool(_GENERATION_TAG.search(template))

    def _by_generation_tag(
        self, messages: list[Message], kwargs: dict[str, Any], where: str
    ) -> tuple[list[int], list[Span]]:
        """The template itself marks what the assistant writes."""
        try:
            output = self.tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **kwargs
            )
        except Exception as error:  # whatever a template raises is this row's problem
            raise _template_problem(error, where) from error
        mask = np.asarray([0, *output["assistant_masks"], 0])
        edges = np.flatnonzero(np.diff(mask))
        if not len(edges):
            raise RowProblem("template", f"{where}: the chat template's generation tags mark nothing")
        return list(output["input_ids"]), [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]

    def _by_spans(self, messages: list[Message], kwargs: dict[str, Any], where: str) -> tuple[list[int], list[Span]]:
        """Spans of characters are proven by comparing renderings, then the text is cut there in token space."""

        def render(part: list[Message], generation_prompt: bool) -> str:
            return self.tokenizer.apply_chat_template(
                part, tokenize=False, add_generation_prompt=generation_prompt, **kwargs
            )

        try:
            full = render(messages, False)
        except Exception as error:  # whatever a template raises is this row's problem
            raise _template_problem(error, where) from error
        spans = assistant_spans(messages, render, full)
        if spans is None:
            raise RowProblem(
                "template",
                f"{where}: it cannot be proven which part of the templated conversation the assistant wrote, as the "
                "chat template changes the messages: set custom_chat_template to one with {% generation %} tags",
            )
        borders = [0, *(border for span in spans for border in span), len(full)]
        pieces = [full[a:b] for a, b in pairwise(borders)]
        ids: list[int] = []
        token_spans = []
        for number, piece in enumerate(self._split_tokens(pieces, where)):
            if number % 2:
                token_spans.append((len(ids), len(ids) + len(piece)))
            ids.extend(piece)
        return ids, token_spans

    def _split_tokens(self, pieces: list[str], where: str) -> list[list[int]]:
        """Token ids of each piece of a text; together they are the text's own, unless a token spans a border."""
        encode = self.tokenizer
        apart = [list(encode(piece, add_special_tokens=False)["input_ids"]) if piece else [] for piece in pieces]
        whole = encode("".join(pieces), add_special_tokens=False, return_offsets_mapping=encode.is_fast)
        if [token for piece in apart for token in piece] == list(whole["input_ids"]):
            return apart
        borders = np.cumsum([0, *map(len, pieces)])
        if encode.is_fast:
            cuts = [_cut_at(np.asarray(whole["offset_mapping"]), int(border)) for border in borders]
            if all(cut is not None for cut in cuts):
                return [list(whole["input_ids"][a:b]) for a, b in pairwise(cuts)]
        notice(
            f"{where}: the tokenizer merges characters across the border of prompt and completion; such rows are "
            "split there and both sides tokenised by themselves (a prompt that ends with a space is the usual cause)",
            key="data.token_across_border",
        )
        return apart

    def _blank(self, token: int) -> bool:
        return token not in self._special and not self.tokenizer.decode([token]).strip()

    def _close_turns(self, ids: list[int], spans: list[Span], where: str) -> tuple[list[int], list[Span]]:
        """Make each span end with the special token that ends the turn, and the last one with eos if there is none."""
        trimmed, closing = [], []
        for start, end in spans:
            last = end
            while last > start and self._blank(ids[last - 1]):
                last -= 1
            closed = last > start and ids[last - 1] in self._special
            trimmed.append((start, last if closed else end))
            closing.append(ids[last - 1] if closed else None)

        def following(end: int) -> int:
            while end < len(ids) and self._blank(ids[end]):
                end += 1
            return end

        start, end = trimmed[-1]
        if closing[-1] is None:
            after = following(end)
            if after == len(ids):
                ids = [*ids[:end], self._eos(where)]
                return ids, [*trimmed[:-1], (start, end + 1)]
            if ids[after] in self._special:
                trimmed[-1], closing[-1] = (start, after + 1), ids[after]
        for number, (start, end) in enumerate(trimmed[:-1]):
            after = following(end)
            if closing[number] is None and after < len(ids) and ids[after] == closing[-1]:
                trimmed[number] = (start, after + 1)
        return ids, trimmed


def _template_problem(error: Exception, where: str) -> RowProblem:
    text = f"{type(error).__name__}: {str(error).strip() or '(no message)'}"
    return RowProblem("template", f"{where}: the chat template failed on this conversation: {text}")


def _cut_at(offsets: np.ndarray, border: int) -> int | None:
    """The number of tokens before character ``border``, if tokens end and start exactly there; else None."""
    if not len(offsets):
        return None
    before = int((offsets[:, 1] <= border).sum())
    left, right = offsets[:before], offsets[before:]
    ends_there = left[:, 1].max() == border if len(left) else border == 0
    starts_there = right[:, 0].min() == border if len(right) else offsets[:, 1].max() == border
    return before if ends_there and starts_there else None


def _masked(ids: list[int], spans: list[Span]) -> Encoded:
    """The ids up to the last trained token. The very first token is never trained: nothing predicts it."""
    mask = np.zeros(len(ids), dtype=bool)
    for start, end in spans:
        mask[start:end] = True
    mask[:1] = False
    length = int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else 0
    return np.asarray(ids[:length], dtype=np.int32), mask[:length]
