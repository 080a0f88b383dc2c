"""Reading tool calls out of what a model wrote."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

FORMATS = ("hermes", "llama3_json")

_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """``problem`` says what is wrong with a call that cannot be made; it is answered to the model."""

    name: str
    arguments: dict[str, Any]
    problem: str | None = None


def parse_tool_calls(text: str, style: str) -> list[ToolCall]:
    """The calls in a turn, in order.

    ``hermes``: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of them (Hermes, Qwen).
    ``llama3_json``: the whole turn is ``{"name": ..., "parameters": {...}}``, several with ``;`` between (Llama 3).
    """
    if style == "hermes":
        return [_call(found) for found in _HERMES.findall(text)]
    stripped = text.strip().removeprefix("<|python_tag|>").strip()
    if not stripped.startswith("{") or '"name"' not in stripped:
        return []
    return [_call(part) for part in _objects(stripped)]


def _objects(text: str) -> list[str]:
    """The JSON objects of a text that are separated by ``;`` or blanks; the rest, if it is none, as it is."""
    decoder, parts = json.JSONDecoder(), []
    while text:
        try:
            _, end = decoder.raw_decode(text)
        except ValueError:
            return [*parts, text]
        parts.append(text[:end])
        text = text[end:].lstrip("; \n\t")
    return parts


def _call(text: str) -> ToolCall:
    try:
        value = json.loads(text)
    except ValueError as error:
        return ToolCall("", {}, f"the call is no JSON: {error}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, 'a call needs "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return ToolCall(value["name"], {}, "the arguments of a call are an object with one value a name")
    return ToolCall(value["name"], arguments)
