"""Chat messages as datasets hold them, made plain: a list of dicts with a role and a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl.errors import DataError

Message = dict[str, Any]
Prompt = list[Message] | str


def plain(value: Any) -> Any:
    """numpy, OmegaConf and tuple containers as new Python dicts, lists and scalars, at every depth."""
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    return value


def check_messages(value: Any, where: str) -> list[Message]:
    """A conversation as a list of ``{"role": str, "content": str, ...}``.

    Lists, tuples and numpy arrays of messages are accepted. Fields that are null are dropped: columnar files give
    every message the fields of all the others. A null or missing content is the empty text only for an assistant
    turn that calls tools; anywhere else it would be trained on as the word "None", so it is an error. ``where``
    is the row's place for the error.
    """
    if isinstance(value, Mapping) or not isinstance(value, Sequence | np.ndarray):
        raise DataError(f"{where}: a prompt is text or a list of messages, got {type(value).__name__}")
    messages = [_check_message(message, f"{where}, message {number}") for number, message in enumerate(plain(value))]
    if not messages:
        raise DataError(f"{where}: the prompt has no messages")
    return messages


def _check_message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise DataError(f"{where}: a message is a dict with role and content, got {type(message).__name__}")
    message = {key: value for key, value in message.items() if value is not None}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise DataError(f"{where}: the message has no role; its fields are {', '.join(message) or 'all null'}")
    content = message.get("content")
    if content is None:
        if role != "assistant" or not message.get("tool_calls"):
            raise DataError(f"{where}: the {role} message has no content (null or missing)")
        message["content"] = ""
    elif isinstance(content, list):
        message["content"] = "".join(_part_text(part, where) for part in content)
    elif not isinstance(content, str):
        raise DataError(f"{where}: content must be text, got {type(content).__name__}")
    return message


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise DataError(f"{where}: only text parts can be read, got a part of type '{kind}'")
    return part["text"]


def common_prefix(first: list[Message], second: list[Message]) -> list[Message]:
    """The longest run of equal messages at the start of both: the prompt of two rival conversations."""
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return first[:length]
