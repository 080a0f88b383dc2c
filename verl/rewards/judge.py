"""A generative judge: a chat model behind an OpenAI-compatible endpoint says how good an answer is."""

from __future__ import annotations

import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from verl.errors import RewardError
from verl.rewards.contract import RewardResult

PROMPT = """Rate how well the answer serves the question, from 0 (useless or wrong) to 10 (correct and clear).

Question:
{prompt}

Answer:
{response}

Reply with the number only."""
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
PLACES = ("prompt", "response", "ground_truth")
IN_PROMPT = re.compile("|".join(re.escape(f"{{{place}}}") for place in PLACES))
AGAIN = (408, 409, 429, 500, 502, 503, 504)
"""Statuses after which the same question is asked again."""


@dataclass
class Judge:
    """``judge(batch)`` gives a score in [0, 1] for each answer of a `BatchView`; the calls run at the same time.

    The score is the last number of the reply, divided by ``scale``. A reply without a number from 0 to ``scale``, or an
    endpoint that does not answer, makes the row fail; it is never a score of 0.

    Attributes:
        url: base address, such as ``http://localhost:8000/v1``.
        model: name of the model there.
        prompt: text with ``{prompt}``, ``{response}`` and, if wanted, ``{ground_truth}``.
        scale: the best mark.
        api_key_variable: environment variable with the key; none is sent where it is not set.
        max_tokens: most tokens of a reply. timeout_s: seconds of one call. retries: further calls after a failure.
        concurrency: calls at a time.

    Raises:
        RewardError: the address or the prompt cannot be used.
    """

    url: str
    model: str
    prompt: str = PROMPT
    scale: float = 10.0
    api_key_variable: str = "OPENAI_API_KEY"
    max_tokens: int = 64
    timeout_s: float = 60.0
    concurrency: int = 8
    retries: int = 2

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise RewardError(f"reward.judge.url={self.url}: give the base address, such as http://localhost:8000/v1")
        if "{response}" not in self.prompt:
            raise RewardError("reward.judge.prompt has no {response}, so the judge would not see the answer")

    def __call__(self, batch: Mapping[str, Any]) -> list[RewardResult]:
        rows = list(zip(batch["prompts"], batch["responses"], batch["ground_truth"], strict=True))
        with ThreadPoolExecutor(min(self.concurrency, max(len(rows), 1))) as pool:
            return list(pool.map(self._row, rows))

    def _row(self, row: tuple[str, str, Any]) -> RewardResult:
        values = {f"{{{place}}}": str(value) for place, value in zip(PLACES, row, strict=True)}
        text = IN_PROMPT.sub(lambda found: values[found[0]], self.prompt)  # in one pass: an answer fills in nothing
        try:
            reply = self._ask(text)
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            return RewardResult(None, error=f"the judge at {self.url} did not answer: {type(error).__name__}: {error}")
        found = NUMBER.findall(reply)
        if not found or not 0 <= float(found[-1]) <= self.scale:
            return RewardResult(None, error=f"the judge gave no number from 0 to {self.scale:g}: {reply!r:.200}")
        return RewardResult(float(found[-1]) / self.scale)

    def _ask(self, text: str) -> str:
        """The reply to one message, asked again where that may help."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self.max_tokens,
            "temperature": 0,
        }
        headers = {"Content-Type": "application/json"}
        key = os.environ.get(self.api_key_variable)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        address = f"{self.url.rstrip('/')}/chat/completions"
        request = urllib.request.Request(address, json.dumps(body).encode(), headers)
        for attempt in range(self.retries + 1):
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                    return str(json.load(answer)["choices"][0]["message"]["content"])
            except urllib.error.HTTPError as error:
                if error.code not in AGAIN or attempt == self.retries:
                    raise
            except OSError:
                if attempt == self.retries:
                    raise
            time.sleep(min(0.5 * 2**attempt, 8))
        raise AssertionError("a last attempt returns or raises")
