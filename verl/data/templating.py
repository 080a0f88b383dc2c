"""From a prompt to token ids: one piece of code for training, for filtering and for validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from verl.data.messages import Message, Prompt
from verl.errors import DataError
from verl.notices import notice

TemplateMode = Literal["auto"] | bool

# Rows given to the tokenizer at once; its own threads share such a group.
GROUP = 512


class PromptTemplate:
    """Turns prompts into token ids with a tokenizer's chat template.

    A conversation always goes through the template as a whole (many templates refuse single turns or put the
    system text in front). ``mode`` is ``data.apply_chat_template``: "auto" templates messages and takes plain text as
    it is, as base models want it; True also templates plain text, as one user message; False writes messages as
    plain text. Plain text gets the tokenizer's beginning-of-sequence token once, and never an end-of-sequence token.

    ``kwargs`` go to the template (``data.apply_chat_template_kwargs``), ``chat_template`` replaces the tokenizer's
    own, ``tools`` are the tool schemas that the template shows.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        mode: TemplateMode = "auto",
        kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ):
        self.tokenizer = tokenizer
        self.mode = mode
        self.kwargs: dict[str, Any] = {"add_generation_prompt": True}
        if chat_template is not None:
            self.kwargs["chat_template"] = chat_template
        if tools is not None:
            self.kwargs["tools"] = list(tools)
        self.kwargs.update(kwargs or {})
        self.has_template = "chat_template" in self.kwargs or bool(tokenizer.chat_template)
        if mode is True and not self.has_template:
            raise DataError(
                "data.apply_chat_template=true, but the tokenizer has no chat template: set "
                "actor_rollout_ref.model.custom_chat_template, or leave data.apply_chat_template at auto"
            )
        bos = tokenizer.bos_token_id
        self.bos: list[int] = [bos] if bos is not None and tokenizer("")["input_ids"][:1] == [bos] else []

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of one prompt. Whatever the template raises comes through."""
        return self._encode_group([prompt])[0]

    def encode_many(self, prompts: Sequence[Prompt]) -> list[list[int] | Exception]:
        """Token ids of each prompt, or the exception that its template raised."""
        encoded: list[list[int] | Exception] = []
        for start in range(0, len(prompts), GROUP):
            group = prompts[start : start + GROUP]
            try:
                encoded.extend(self._encode_group(group))
            except Exception:  # a template may raise anything; find out which rows, and keep what each one said
                encoded.extend(self._encode_or_exception(prompt) for prompt in group)
        return encoded

    def _encode_or_exception(self, prompt: Prompt) -> list[int] | Exception:
        try:
            return self.encode(prompt)
        except Exception as error:
            return error

    def _encode_group(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        numbered = list(enumerate(prompts))
        texts = [(number, self._as_text(prompt)) for number, prompt in numbered if not self._templated(prompt)]
        chats = [(number, self._as_messages(prompt)) for number, prompt in numbered if self._templated(prompt)]
        encoded: list[list[int]] = [[] for _ in prompts]
        if texts:
            output = self.tokenizer([text for _, text in texts], add_special_tokens=False)
            for (number, _), ids in zip(texts, output["input_ids"], strict=True):
                encoded[number] = list(ids) if not self.bos or ids[:1] == self.bos else self.bos + list(ids)
        if chats:
            for (number, _), ids in zip(chats, self._apply_template([chat for _, chat in chats]), strict=True):
                encoded[number] = list(ids)
        return encoded

    def _apply_template(self, chats: list[list[Message]]) -> list[list[int]]:
        # transformers 5 returns a dict by default and 4 a list; asked for a dict, both give one. A tokenizer class
        # of a model's own may still return the bare list.
        output = self.tokenizer.apply_chat_template(chats, tokenize=True, return_dict=True, **self.kwargs)
        return output["input_ids"] if isinstance(output, Mapping) else output

    def _templated(self, prompt: Prompt) -> bool:
        if isinstance(prompt, str):
            return self.mode is True
        return self.mode is not False and self.has_template

    @staticmethod
    def _as_messages(prompt: Prompt) -> list[Message]:
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt

    def _as_text(self, prompt: Prompt) -> str:
        if isinstance(prompt, str):
            return prompt
        if self.mode is not False:
            notice("the tokenizer has no chat template: conversations are given to the model as plain text")
        return messages_as_text(prompt)


def messages_as_text(messages: Sequence[Message]) -> str:
    """Plain text for a model without a chat template.

    One user message is its own text (after the system text, if any); a longer conversation is written with
    ``User:`` and ``Assistant:`` and ends where the assistant speaks next.
    """
    turns = [message for message in messages if message["role"] != "system"]
    system = [message["content"] for message in messages if message["role"] == "system"]
    if len(turns) == 1 and turns[0]["role"] == "user":
        return "\n\n".join([*system, turns[0]["content"]])
    lines = [f"{message['role'].capitalize()}: {message['content']}" for message in turns]
    return "\n\n".join([*system, *lines, "Assistant:"])


def truncate(ids: np.ndarray, limit: int, how: str) -> np.ndarray:
    """Cut ``ids`` (length,) to ``limit`` tokens: ``left`` keeps the end, ``right`` the start, ``middle`` both ends."""
    if len(ids) <= limit:
        return ids
    if how == "left":
        return ids[-limit:]
    if how == "right":
        return ids[:limit]
    if how == "middle":
        head = limit // 2
        return np.concatenate([ids[:head], ids[-(limit - head) :]])
    raise AssertionError(f"unknown truncation {how!r}")
