"""What a rollout of several turns is allowed to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.rollout.multi_turn.parsing import FORMATS

CUTS = ("left", "middle", "right")


@dataclass(frozen=True)
class MultiTurnSettings:
    """
    Attributes:
        tools: a Python file whose public functions are the tools; environment: a function of one's own in its place.
        format: how the model writes a tool call, one of ``FORMATS``.
        max_assistant_turns, max_user_turns: limits of a conversation (None: only the response length limits it).
        max_parallel_calls: of the calls in one turn, so many are run; the others are answered by an error.
        max_response_chars: of one reply; ``cut`` says which part of a longer one goes.
        timeout_s: seconds for one reply of the environment.
        template_kwargs, chat_template: as the prompts were made.
    """

    tools: str | None = None
    environment: Any = None
    format: str = FORMATS[0]
    max_assistant_turns: int | None = None
    max_user_turns: int | None = None
    max_parallel_calls: int = 1
    max_response_chars: int = 256
    cut: str = "middle"
    timeout_s: float = 60.0
    template_mode: Any = "auto"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
