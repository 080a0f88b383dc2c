"""Who answers the policy: tools, or a function of the user's own."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from verl.errors import ConfigError, RolloutError
from verl.rewards.loading import load_module
from verl.rollout.multi_turn.parsing import ToolCall, parse_tool_calls
from verl.rollout.multi_turn.settings import MultiTurnSettings

Message = dict[str, Any]


class Environment(Protocol):
    """Answers a turn of the policy.

    ``messages`` is the conversation so far, the policy's turn last; ``row`` the dataset row's columns. Returns what
    follows (messages of role ``tool``, ``user`` or ``system``), or None when the conversation is over. It runs in
    threads, several conversations at once; an exception ends the run.
    """

    def __call__(self, messages: Sequence[Message], row: Mapping[str, Any]) -> Sequence[Message] | None: ...


class ToolEnvironment:
    """Python functions as tools. Their schemas come from type hints and docstrings (Google style).

    Args:
        functions: the tools by name; ``async def`` too.
        style: see :func:`~verl.rollout.multi_turn.parsing.parse_tool_calls`.
        max_parallel_calls: calls of one turn that are run.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], style: str, max_parallel_calls: int = 1):
        self.functions, self.style, self.max_parallel_calls = dict(functions), style, max_parallel_calls

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates show them."""
        from transformers.utils import get_json_schema

        schemas = []
        for name, function in self.functions.items():
            try:
                schemas.append(get_json_schema(function))
            except Exception as error:  # transformers raises several kinds, all about hints and docstring
                raise ConfigError(
                    f"The tool '{name}' cannot be described to the model: {str(error).splitlines()[0]}"
                ) from error
        return schemas

    def __call__(self, messages: Sequence[Message], row: Mapping[str, Any]) -> list[Message] | None:
        calls = parse_tool_calls(messages[-1]["content"], self.style)
        if not calls:
            return None
        return [
            {"role": "tool", "name": call.name, "content": self._answer(call, number)}
            for number, call in enumerate(calls)
        ]

    def _answer(self, call: ToolCall, number: int) -> str:
        """The tool's result as a text. What the model did wrong is told to the model; it is part of the task."""
        if call.problem is not None:
            return f"Error: {call.problem}"
        if number >= self.max_parallel_calls:
            return f"Error: only {self.max_parallel_calls} call(s) a turn are run"
        function = self.functions.get(call.name)
        if function is None:
            return f"Error: there is no tool {call.name!r}; there are {', '.join(sorted(self.functions))}"
        try:
            inspect.signature(function).bind(**call.arguments)
            value = function(**call.arguments)
            if inspect.isawaitable(value):
                value = asyncio.run(_awaited(value))
        except Exception as error:  # a tool may raise anything
            return f"Error: {type(error).__name__}: {error}"
        return value if isinstance(value, str) else _as_text(value)


def load_environment(settings: MultiTurnSettings) -> Environment:
    """The user's function, or the tools of a file.

    Raises:
        ConfigError: the file is missing or defines no public function.
    """
    if settings.environment is not None:
        return settings.environment
    return ToolEnvironment(_functions(settings.tools), settings.format, settings.max_parallel_calls)


def schemas_of(environment: Environment) -> list[dict[str, Any]] | None:
    """What the prompts' template is told of the tools; None where an environment of the user's own answers."""
    return environment.schemas if isinstance(environment, ToolEnvironment) else None


def cut_text(text: str, limit: int, where: str) -> str:
    """At most ``limit`` characters: ``left`` and ``right`` cut there, ``middle`` keeps both ends."""
    if len(text) <= limit:
        return text
    if where == "left":
        return "(cut)..." + text[-limit:]
    if where == "right":
        return text[:limit] + "...(cut)"
    half = limit // 2
    return text[: limit - half] + "...(cut)..." + text[len(text) - half :]


def check_reply(reply: Any) -> list[Message] | None:
    """The environment's answer, or a RolloutError that says what it has to be."""
    if reply is None:
        return None
    if not isinstance(reply, Sequence) or isinstance(reply, (str, bytes)):
        raise RolloutError(f"An environment returns a list of messages or None, not {type(reply).__name__}.")
    for message in reply:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str) or "role" not in message:
            raise RolloutError(f"A message of an environment needs 'role' and a text 'content'; got {message!r:.80}.")
        if message["role"] == "assistant":
            raise RolloutError("An environment may not speak as the assistant: that is the policy's role.")
    return [dict(message) for message in reply] or None


def _functions(path: str | None) -> dict[str, Callable[..., Any]]:
    key = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
    if path is None or not Path(path).is_file():
        raise ConfigError(f"{key}={path} does not exist: give a Python file whose public functions are the tools.")
    if Path(path).suffix != ".py":
        raise ConfigError(
            f"{key}={path}: tools are the public functions of a Python file here, with type hints and a docstring "
            "each; write yours as such."
        )
    module = load_module(str(path))
    found = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and not name.startswith("_") and value.__module__ == module.__name__
    }
    if not found:
        raise ConfigError(f"{key}={path} defines no public function, so there is no tool.")
    return found


def _as_text(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


async def _awaited(value: Any) -> Any:
    return await value
