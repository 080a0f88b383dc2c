"""The interface of every rollout engine: submit requests, poll for finished ones, abort, or generate a whole batch."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from verl.errors import RolloutError
from verl.metrics import Metrics

FINISH_REASONS = ("stop", "length", "abort")


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn.

    Attributes:
        max_tokens: at most this many response tokens.
        temperature: divides the logits; 0 means greedy.
        top_k: keep the k most likely tokens (-1 = all). top_p: keep the smallest set with this probability (1 = all).
        min_p: keep tokens with at least this fraction of the best token's probability (0 = all).
        stop: strings that end a response; the token that completes one is the last of the response.
        stop_token_ids: ids that end a response, besides the model's eos ids; they are part of it.
        ignore_eos: eos ids do not end a response.
        repetition_penalty: logits of tokens that the prompt or the response holds already are divided by this where
            they are positive and multiplied by it elsewhere (Keskar et al. 2019), before the temperature; 1 = none.
        min_tokens: before so many tokens are written, ids that would end the response are not drawn, and a stop
            string does not end it.

    The trainer's forward knows nothing of penalty, minimum and filters: what it compares with are the log-probs under
    softmax(logits / temperature), :attr:`Completion.log_probs`. Those under the distribution really drawn from are
    :attr:`Completion.sampled_log_probs`.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RolloutError(f"max_tokens is {self.max_tokens}; a response needs room for at least one token.")
        if (
            self.temperature < 0
            or not 0 < self.top_p <= 1
            or not 0 <= self.min_p <= 1
            or self.top_k == 0
            or self.top_k < -1
        ):
            raise RolloutError(
                f"Sampling needs temperature >= 0, 0 < top_p <= 1, 0 <= min_p <= 1 and top_k -1 or > 0; "
                f"got {self.temperature}, {self.top_p}, {self.min_p}, {self.top_k}."
            )
        if not self.repetition_penalty > 0:
            raise RolloutError(f"repetition_penalty is {self.repetition_penalty}; it must be above 0 (1: none).")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise RolloutError(
                f"min_tokens is {self.min_tokens}; it must be between 0 and max_tokens ({self.max_tokens})."
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """True if the sampled distribution is not the plain temperature distribution."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.adjusted)

    @property
    def adjusted(self) -> bool:
        """True if logits depend on what was written: by a repetition penalty, or a minimal length."""
        return self.repetition_penalty != 1 or self.min_tokens > 0


@dataclass(frozen=True)
class Request:
    """One response wanted. ``seed`` alone decides its noise: rows do not depend on the batch around them."""

    id: str
    prompt_ids: np.ndarray
    params: SamplingParams
    seed: int = 0


@dataclass
class Completion:
    """A finished response.

    Attributes:
        token_ids: (L,) int64; log_probs: (L,) float32 under softmax(logits / temperature) (temperature 1 if greedy).
        sampled_log_probs: (L,) under the distribution really drawn from, where it is not the plain one; else
            None (greedy rows too).
        finish_reason: one of ``FINISH_REASONS``.
        trained: (L,) bool, False at tokens that the policy was given and did not sample (a tool's output); None where
            it sampled all of them.
    """

    request_id: str
    token_ids: np.ndarray
    log_probs: np.ndarray
    finish_reason: str
    sampled_log_probs: np.ndarray | None = None
    trained: np.ndarray | None = None
    extra: dict[str, object] = field(default_factory=dict)


def request_seed(run_seed: int, uid: str, sample: int) -> int:
    """31-bit seed of one response. ``uid`` names the draw of a prompt, so it differs from step to step."""
    digest = hashlib.blake2b(f"{run_seed}|{uid}|{sample}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF


class RolloutEngine(ABC):
    """What every engine offers. An engine works on the calling thread, inside :meth:`poll`.

    Attributes:
        meets_others: ranks generate together, so this one must be polled even while it has nothing pending.
    """

    name: str
    meets_others = False

    @abstractmethod
    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests; ids must be new."""

    @abstractmethod
    def poll(self) -> list[Completion]:
        """Do some work and return what has finished since. An empty list while ``pending`` means: call again."""

    @abstractmethod
    def abort(self, ids: Iterable[str] | None = None) -> None:
        """Stop these requests (all if None); they come out of :meth:`poll` with what they have and reason ``abort``."""

    @property
    @abstractmethod
    def pending(self) -> int:
        """Requests submitted and not yet returned."""

    @abstractmethod
    def weights_changed(self) -> None:
        """The weights were written to: forget everything computed from the old ones."""

    def written(self) -> Iterator[tuple[str, list[int], list[float]]]:
        """(request id, tokens, log-probs so far) of the rows being written, for showing text while it is made.

        The lists are the engine's own and grow. An engine that cannot look into its rows gives none.
        """
        return iter(())

    def release(self) -> None:  # noqa: B027  (an engine without memory of its own has nothing to give back)
        """Give back memory that is only needed while generating."""

    def close(self) -> None:  # noqa: B027  (an engine in this process ends with it)
        """End what the engine has started, such as a process. It generates no more; a second call does nothing."""

    def take_metrics(self) -> Metrics:
        """What was measured since the last call."""
        return Metrics()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Run ``requests`` to the end; results in their order."""
        self.submit(requests)
        done: dict[str, Completion] = {}
        while self.pending:
            done.update((c.request_id, c) for c in self.poll())
        return [done[r.id] for r in requests]
