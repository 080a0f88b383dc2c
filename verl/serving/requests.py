"""What clients may ask for, in OpenAI's words, and what they are told if it cannot be had."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from verl.rollout.base import SamplingParams, request_seed

MAX_TOP, MAX_CHOICES = 20, 128
IGNORED = ("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
"""Fields of the API that change no answer of ours."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "functions": (None, []),
    "tool_choice": (None, "none", "auto"),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "verbosity": (None,),
}
"""Fields that are not offered: these values of theirs ask for nothing."""


class ApiError(Exception):
    """An answer in OpenAI's error format."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class StreamOptions(BaseModel):
    include_usage: bool = False
    include_obfuscation: bool = False


class _Common(BaseModel):
    """The fields that both endpoints share. ``top_k``, ``min_p``, ``repetition_penalty``, ``min_tokens``,
    ``ignore_eos``, ``stop_token_ids`` and ``skip_special_tokens`` are vLLM's additions."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = -1
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    min_tokens: int = Field(0, ge=0)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stop: list[str] = []
    stop_token_ids: list[int] = []
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    @field_validator("temperature", "top_p", "n", "stream", mode="before")
    @classmethod
    def _null_is_default(cls, value: Any, info: Any) -> Any:
        return cls.model_fields[info.field_name].default if value is None else value

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        texts = [] if value is None else [value] if isinstance(value, str) else value
        if isinstance(texts, list) and "" in texts:
            raise ValueError("a stop text may not be empty")
        return texts

    @field_validator("top_k", mode="before")
    @classmethod
    def _no_top_k(cls, value: Any) -> Any:
        return -1 if value in (None, 0) else value

    def refuse_unknown(self) -> None:
        """Raise for a field that is not ours, unless it asks for nothing."""
        for name, value in (self.model_extra or {}).items():
            if name in IGNORED or value in _NEUTRAL.get(name, ()):
                continue
            if name in _NEUTRAL:
                raise ApiError(f"{name} is not offered here.", param=name, code="unsupported_parameter")
            raise ApiError(f"Unrecognized request argument: {name}", param=name, code="unknown_parameter")

    def params(self, max_tokens: int) -> SamplingParams:
        """Raises RolloutError for values that do not go together."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            min_tokens=self.min_tokens,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )

    def seeds(self, count: int) -> list[int]:
        """A seed for every response: derived from the request's, else drawn."""
        if self.seed is None:
            return [secrets.randbits(31) for _ in range(count)]
        return [request_seed(self.seed, "request", k) for k in range(count)]

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(_Common):
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(16, ge=0)  # OpenAI's default; 0 with echo scores the prompt
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    echo: bool = False
    best_of: int | None = None

    @field_validator("echo", mode="before")
    @classmethod
    def _echo_null(cls, value: Any) -> Any:
        return bool(value)

    def prompts(self) -> list[str | list[int]]:
        """One prompt an entry."""
        given = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return [given]  # type: ignore[list-item]
        if not given:
            raise ApiError("prompt is empty.", param="prompt")
        return list(given)  # type: ignore[arg-type]

    @property
    def top(self) -> int | None:
        return self.logprobs


class Part(BaseModel):
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[Part] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of the {self.role} needs content")
        return self

    def plain(self) -> dict[str, Any]:
        """For the chat template: the content is one text."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content or ())
        role = "system" if self.role == "developer" else self.role
        return {**(self.model_extra or {}), "role": role, "content": text}


class ChatRequest(_Common):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)

    @field_validator("logprobs", mode="before")
    @classmethod
    def _logprobs_null(cls, value: Any) -> Any:
        return bool(value)

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs needs logprobs=true.", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


def flat_problem(errors: Sequence[Any]) -> tuple[str, str | None]:
    """Message and field of the first problem that pydantic found."""
    place = [str(part) for part in errors[0]["loc"] if part != "body"]
    name = ".".join(place) or None
    more = f" ({len(errors) - 1} more problems)" if len(errors) > 1 else ""
    return f"{name or 'the request'}: {errors[0]['msg']}{more}", place[0] if place else None
