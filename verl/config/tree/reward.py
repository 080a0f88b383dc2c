"""``reward.*``: where the numbers come from that training raises."""

# ruff: noqa: RUF009  (option() and group() make dataclass fields)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.fields import group, option


@dataclass(slots=True)
class CustomRewardFunction:
    """A user's scorer in a Python file."""

    path: str | None = option(
        None, "Python file with the scorer; `null`: the built-in rules by data source.", path=True
    )
    name: str = option("compute_score", "Name of the function in that file.")
    reward_kwargs: dict[str, Any] = option({}, "Extra keyword arguments of every call.")


@dataclass(slots=True)
class OverlongBuffer:
    """Soft penalty for answers near the length limit (DAPO)."""

    enable: bool = option(False, "Penalise answers that enter the last `len` tokens.")
    len: int | None = option(
        None,
        "Length of that zone, in tokens before `data.max_response_length`; `null`: a fifth of it.",
        low=0,
        verl=0,
    )
    penalty_factor: float = option(1.0, "Penalty at the limit; it grows linearly from 0.", low=0)


@dataclass(slots=True)
class Judge:
    """A chat model behind an OpenAI-compatible endpoint that rates answers."""

    url: str | None = option(None, "Base address, such as `http://localhost:8000/v1`; `null`: no judge.", verl="(none)")
    model: str = option("default", "Name of the model there.", verl="(none)")
    prompt: str | None = option(
        None,
        "What it is asked, a text with `{prompt}`, `{response}` and, if wanted, `{ground_truth}`; `null`: a mark from "
        "0 to 10 for how well the answer serves the question. The last number of the reply is the mark.",
        verl="(none)",
    )
    scale: float = option(10.0, "The best mark; scores are marks divided by it.", above=0, verl="(none)")
    concurrency: int = option(8, "Calls at a time.", low=1, verl="(none)")
    api_key_variable: str = option(
        "OPENAI_API_KEY", "Environment variable with the key; none is sent where it is not set.", verl="(none)"
    )


@dataclass(slots=True)
class Reward:
    """Scoring."""

    reward_fn: Any = option(
        None, "A Python function (only from Python): `fn(batch)` or verl's `compute_score`.", verl="(none)"
    )
    num_workers: int | None = option(None, "Scorers at work at a time; `null`: by the number of cores.", low=1, verl=8)
    timeout_s: float | None = option(
        None,
        "Seconds a row may take, or a call of a batch function; `null`: 60 for a row, 600 for a call.",
        above=0,
        verl="(none)",
    )
    on_error: str = option(
        "exclude",
        "A row whose scorer failed: leave it out of its group's statistics (`exclude`), score 0 and count it (`zero`), "
        "or stop (`raise`).",
        choices=("exclude", "zero", "raise"),
        verl="(none)",
    )
    custom_reward_function: CustomRewardFunction = group(CustomRewardFunction, "A user's scorer.")
    judge: Judge = group(Judge, "A generative judge.")
    overlong_buffer: OverlongBuffer = group(OverlongBuffer, "The soft length penalty.")
