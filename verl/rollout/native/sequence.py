"""One response being written, as the scheduler and the runners see it."""

from __future__ import annotations

import numpy as np

from verl.rollout.base import Completion, Request
from verl.rollout.sampling import Written


class Sequence:
    """A request with what it has so far.

    Attributes:
        order: place in the order of arrival; earlier ones are preempted last.
        stops: ids that end the response.
        pages: its pages of the cache, in order of position.
        computed: positions whose keys and values are in the cache.
        shared_pages: how many of its first pages it shares with the other samples of its ``group``.
        followers: samples of the same prompt that take over this one's pages once its prompt is computed.
    """

    def __init__(self, request: Request, order: int):
        self.request = request
        self.order = order
        self.prompt = np.asarray(request.prompt_ids, dtype=np.int64)
        self.prompt_key = self.prompt.tobytes()
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.sampled: list[float] = []
        self.finish_reason: str | None = None
        self.stops: frozenset[int] = frozenset()
        self.pages: list[int] = []
        self.computed = 0
        self.group: object | None = None
        self.shared_pages = 0
        self.followers: list[Sequence] = []

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    def ids(self) -> np.ndarray:
        """(length,) prompt and response so far."""
        return np.concatenate([self.prompt, np.array(self.tokens, dtype=np.int64)]) if self.tokens else self.prompt

    def written(self) -> Written:
        """What its adjusted logits depend on."""
        return Written(self.ids(), len(self.tokens), self.stops)

    @property
    def last_token(self) -> int:
        return self.tokens[-1] if self.tokens else int(self.prompt[-1])

    @property
    def remaining(self) -> int:
        """Tokens it may still write."""
        return self.request.params.max_tokens - len(self.tokens)

    def completion(self) -> Completion:
        return Completion(
            self.request.id,
            np.array(self.tokens, np.int64),
            np.array(self.log_probs, np.float32),
            self.finish_reason or "abort",
            np.array(self.sampled, np.float32) if self.sampled else None,
        )
