"""The loop of a rollout of several turns: engine and environments work at the same time."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import Any

import numpy as np

from verl.errors import RolloutError
from verl.metrics import Metrics
from verl.protocol import DataProto
from verl.rollout.base import Completion, Request, RolloutEngine, request_seed
from verl.rollout.multi_turn.environment import Environment, check_reply, cut_text, load_environment, schemas_of
from verl.rollout.multi_turn.settings import MultiTurnSettings
from verl.rollout.multi_turn.turns import TurnTemplate
from verl.rollout.rows import sample_rows

MAX_THREADS = 32
_NAP_S = 0.005


@dataclass
class _Conversation:
    """One sample: what was said, as messages and as tokens."""

    request: Request  # the first turn's
    prompt: Any
    row: Mapping[str, Any]
    messages: list[dict[str, Any]]
    seeds: Callable[[int], int]
    ids: list[np.ndarray] = field(default_factory=list)
    trained: list[np.ndarray] = field(default_factory=list)
    log_probs: list[np.ndarray] = field(default_factory=list)
    turns: int = 0
    replies: int = 0
    finish_reason: str = "stop"

    @property
    def length(self) -> int:
        return sum(map(len, self.ids))

    def add(self, ids: Sequence[int], log_probs: np.ndarray | None) -> None:
        """Tokens that the policy sampled, with their log-probs, or that it was given (None)."""
        sampled = log_probs is not None
        self.ids.append(np.asarray(ids, dtype=np.int64))
        self.trained.append(np.full(len(ids), sampled))
        self.log_probs.append(log_probs if log_probs is not None else np.zeros(len(ids), np.float32))

    def next_request(self) -> Request:
        """The next turn: everything so far is its prompt; its noise is its own."""
        budget = self.request.params.max_tokens - self.length
        return Request(
            f"{self.request.id}#{self.turns}",
            np.concatenate([self.request.prompt_ids, *self.ids]),
            replace(self.request.params, max_tokens=budget),
            self.seeds(self.turns),
        )

    def completion(self) -> Completion:
        return Completion(
            self.request.id,
            np.concatenate(self.ids),
            np.concatenate(self.log_probs),
            self.finish_reason,
            trained=np.concatenate(self.trained),
            extra={"num_turns": self.turns + self.replies},
        )


class _Talks:
    """All conversations of a call: which wait for the engine, which for their environment."""

    def __init__(self, engine, environment: Environment, template: TurnTemplate, settings: MultiTurnSettings):
        self.engine, self.environment, self.template, self.settings = engine, environment, template, settings
        self.speaking: dict[str, _Conversation] = {}  # by id of the request in the engine
        self.waiting: dict[Future, tuple[_Conversation, float]] = {}
        self.metrics = Metrics()

    @property
    def pending(self) -> bool:
        return bool(self.speaking or self.waiting)

    def start(self, conversations: Sequence[_Conversation]) -> None:
        self.speaking.update((c.request.id, c) for c in conversations)
        self.engine.submit([c.request for c in conversations])

    def advance(self, pool: ThreadPoolExecutor) -> list[_Conversation]:
        """Do some work; the conversations that ended."""
        ended = []
        if self.engine.pending or self.engine.meets_others:
            for done in self.engine.poll():
                talk = self.speaking.pop(done.request_id)
                if self._goes_on(talk, done):
                    ask = partial(_answer, self.environment, [dict(m) for m in talk.messages], talk.row)
                    self.waiting[pool.submit(ask)] = talk, monotonic()
                else:
                    ended.append(talk)
        if self.waiting and not self.engine.pending:
            wait(self.waiting, timeout=_NAP_S, return_when=FIRST_COMPLETED)
        return ended + self._answered()

    def _goes_on(self, talk: _Conversation, done: Completion) -> bool:
        """Take in a turn; whether the environment is asked after it."""
        talk.add(done.token_ids, done.log_probs)
        talk.turns += 1
        talk.finish_reason = done.finish_reason
        text = self.template.tokenizer.decode(done.token_ids, skip_special_tokens=True)
        talk.messages.append({"role": "assistant", "content": text})
        limits = self.settings
        return (
            done.finish_reason == "stop"
            and (limits.max_assistant_turns is None or talk.turns < limits.max_assistant_turns)
            and (limits.max_user_turns is None or talk.replies < limits.max_user_turns)
        )

    def _answered(self) -> list[_Conversation]:
        """Conversations whose environment ended them; those that it answered go back to the engine."""
        ended, going = [], []
        now = monotonic()
        for future in list(self.waiting):
            talk, since = self.waiting[future]
            if not future.done():
                if now - since <= self.settings.timeout_s:
                    continue
                raise RolloutError(
                    f"The environment took longer than {self.settings.timeout_s:g} s for {talk.request.id}: make it "
                    "faster, or raise actor_rollout_ref.rollout.multi_turn.timeout_s."
                )
            del self.waiting[future]
            self.metrics.add("rollout/environment_s", now - since)
            reply = self._reply_of(future, talk)
            (going if reply is not None and self._append(talk, reply) else ended).append(talk)
        requests = []
        for talk in going:
            request = talk.next_request()
            self.speaking[request.id] = talk
            requests.append(request)
        if requests:
            self.engine.submit(requests)
        return ended

    @staticmethod
    def _reply_of(future: Future, talk: _Conversation) -> list[dict[str, Any]] | None:
        try:
            return check_reply(future.result())
        except RolloutError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise RolloutError(
                f"The environment failed on {talk.request.id}: {type(error).__name__}: {error}"
            ) from error

    def _append(self, talk: _Conversation, reply: list[dict[str, Any]]) -> bool:
        """Put a reply after the policy's turn; False if there is no room for it and a token more."""
        limit, cut = self.settings.max_response_chars, self.settings.cut
        shown = [{**message, "content": cut_text(message["content"], limit, cut)} for message in reply]
        messages = [*talk.messages, *shown]
        ids = self.template.continuation(talk.prompt, messages, int(talk.ids[-1][-1]))
        if talk.length + len(ids) >= talk.request.params.max_tokens:
            talk.finish_reason = "length"
            return False
        talk.messages = messages
        talk.add(ids, None)
        talk.replies += 1
        return True


class Conversations:
    """What every rollout of several turns of a run has in common: environment, template and limits."""

    def __init__(self, settings: MultiTurnSettings, tokenizer: Any):
        self.settings = settings
        self.environment = load_environment(settings)
        self.template = TurnTemplate(
            tokenizer,
            mode=settings.template_mode,
            kwargs=settings.template_kwargs,
            chat_template=settings.chat_template,
            tools=schemas_of(self.environment),
        )

    def stream(
        self, engine: RolloutEngine, requests: Sequence[Request], batch: DataProto, run_seed: int, shape: dict[str, int]
    ) -> Iterator[DataProto]:
        """See :func:`stream_conversations`; ``shape``: the widths and the pad id of the rows."""
        return stream_conversations(
            engine, requests, batch, self.environment, self.template, self.settings,
            run_seed=run_seed, rows_of=partial(sample_rows, **shape),
        )  # fmt: skip


def stream_conversations(
    engine: RolloutEngine,
    requests: Sequence[Request],
    batch: DataProto,
    environment: Environment,
    template: TurnTemplate,
    settings: MultiTurnSettings,
    *,
    run_seed: int,
    rows_of: Callable[[Sequence[Request], Sequence[Completion]], DataProto],
) -> Iterator[DataProto]:
    """Run conversations and yield pieces of finished rows as they come. Closing the generator aborts what is left.

    Args:
        requests: the first turns, named ``{uid}/{k}``, with the length of the whole response as their limit.
        batch: the prompt rows, with ``raw_prompt`` beside the columns that the environment may read.
        rows_of: makes the padded rows, see :func:`verl.rollout.rows.sample_rows`.
    """
    place = {str(uid): i for i, uid in enumerate(batch.non_tensor_batch["uid"])}
    talks = _Talks(engine, environment, template, settings)
    pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="verl-environment")
    try:
        talks.start([_conversation(request, batch, place, template, run_seed) for request in requests])
        while talks.pending:
            ended = talks.advance(pool)
            if ended:
                piece = rows_of([talk.request for talk in ended], [talk.completion() for talk in ended])
                yield _with_turns(piece, ended, talks)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        if engine.pending:
            engine.abort()
            engine.poll()


def _answer(environment: Environment, messages: list[dict[str, Any]], row: Mapping[str, Any]) -> Any:
    reply = environment(messages, row)
    return asyncio.run(_awaited(reply)) if inspect.isawaitable(reply) else reply


async def _awaited(value: Any) -> Any:
    return await value


def _conversation(
    request: Request, batch: DataProto, place: Mapping[str, int], template: TurnTemplate, run_seed: int
) -> _Conversation:
    uid, sample = request.id.rsplit("/", 1)
    row = {name: column[place[uid]] for name, column in batch.non_tensor_batch.items() if name != "prompt_ids"}
    prompt = row["raw_prompt"]

    def seeds(turn: int) -> int:
        return request_seed(run_seed, f"{uid}#{turn}", int(sample))

    return _Conversation(request, prompt, row, template.conversation(prompt), seeds)


def _with_turns(piece: DataProto, ended: Sequence[_Conversation], talks: _Talks) -> DataProto:
    turns = np.array([talk.turns + talk.replies for talk in ended], dtype=object)
    piece.non_tensor_batch["__num_turns__"] = turns
    metrics, talks.metrics = talks.metrics, Metrics()
    for count in turns:
        metrics.add("num_turns/mean", float(count))
        metrics.add("num_turns/max", float(count), reduce="max")
        metrics.add("num_turns/min", float(count), reduce="min")
    piece.meta_info["metrics"] = metrics
    return piece
