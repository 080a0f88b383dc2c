"""From a reply to the token ids that the model sees of it, without encoding anything again that it saw before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.data.templating import PromptTemplate
from verl.errors import RolloutError

Message = dict[str, Any]
_MARK = "assistant-said-this-7f3a"


class TurnTemplate:
    """What a chat template writes between the end of an assistant's turn and the beginning of its next one.

    The conversation is templated as a whole, with a marker in place of the turn; what stands after the marker is
    encoded by itself and appended to the ids that are there. So the ids are those of the whole conversation, except for
    the policy's own tokens, which stay as they were sampled (verl issue 6921: pieces templated one by one lose the line
    end after each turn).

    Args:
        mode, kwargs, chat_template, tools: as the prompts were made, see :class:`verl.data.templating.PromptTemplate`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        mode: Any = "auto",
        kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ):
        self.tokenizer = tokenizer
        self.prompts = PromptTemplate(tokenizer, mode=mode, kwargs=kwargs, chat_template=chat_template, tools=tools)
        added = tokenizer.added_tokens_decoder.items()
        self._special = {number for number, token in added if token.special} | set(tokenizer.all_special_ids)

    def conversation(self, prompt: str | Sequence[Message]) -> list[Message]:
        """The prompt as messages."""
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]

    def continuation(self, prompt: str | Sequence[Message], messages: list[Message], last_token: int) -> list[int]:
        """The ids to put after a turn whose last token was ``last_token``.

        Args:
            prompt: the row's prompt as it is, text or messages: a plain text stays plain.
            messages: the conversation: the prompt's messages, turns and replies; the newest reply stands at the end.

        Raises:
            RolloutError: the template cannot show such a conversation.
        """
        if not self._templated(prompt):
            text = "".join(message["content"] for message in self._reply(messages))
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        ids = list(self.tokenizer(self._after_turn(messages), add_special_tokens=False)["input_ids"])
        # the turn's end, if it was sampled, stands there already: the template's own, or another in its place
        if ids and ids[0] in self._special and last_token in self._special:
            return ids[1:]
        return ids

    def _templated(self, prompt: str | Sequence[Message]) -> bool:
        mode = self.prompts.mode
        return mode is not False and self.prompts.has_template and (mode is True or not isinstance(prompt, str))

    @staticmethod
    def _reply(messages: list[Message]) -> list[Message]:
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        return messages[last + 1 :]

    def _after_turn(self, messages: list[Message]) -> str:
        reply = self._reply(messages)
        before = messages[: len(messages) - len(reply) - 1]
        marked = [*before, {"role": "assistant", "content": _MARK}, *reply]
        try:
            text = self.tokenizer.apply_chat_template(marked, tokenize=False, **self.prompts.kwargs)
        except Exception as error:  # whatever a template raises
            roles = ", ".join(sorted({message["role"] for message in reply}))
            raise RolloutError(
                f"The chat template cannot continue a conversation with messages of role {roles} "
                f"({type(error).__name__}: {error}): set actor_rollout_ref.model.custom_chat_template to one that can."
            ) from error
        head, found, tail = text.rpartition(_MARK)
        if not found or _MARK in head:
            raise RolloutError(
                "The chat template does not write an assistant's turn once and as it is, so a conversation cannot be "
                "continued: set actor_rollout_ref.model.custom_chat_template to one that does."
            )
        return tail
