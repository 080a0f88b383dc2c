"""The thread that owns the engine: requests of all clients join its running batch, and leave it one by one."""

from __future__ import annotations

import itertools
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from verl.errors import VerlError
from verl.rollout.base import Completion, SamplingParams
from verl.serving.model import Scores, ServedModel, request


class Closing(VerlError):
    """The server ends."""


@dataclass(frozen=True)
class Wanted:
    """One response wanted.

    Attributes:
        params: None asks for no token: the prompt is only scored.
        top: besides the tokens' own log-probs, those of this many likeliest tokens at each place (None: none wanted).
        score_prompt: log-probs of the prompt's tokens too.
        stream: tell new tokens as they come.
    """

    prompt: Sequence[int]
    params: SamplingParams | None
    seed: int
    score_prompt: bool = False
    top: int | None = None
    stream: bool = False


@dataclass(frozen=True)
class Progress:
    """New tokens of response ``index``, with their log-probs."""

    index: int
    tokens: list[int]
    log_probs: list[float]


@dataclass(frozen=True)
class Finished:
    """Response ``index`` is complete. ``rest``: where its not yet told tokens begin.

    ``scores`` and ``prompt_scores`` are there if they were wanted; the prompt's begin with its second token.
    """

    index: int
    completion: Completion
    rest: int
    scores: Scores | None
    prompt_scores: Scores | None


@dataclass(frozen=True)
class Failed:
    """The whole call failed: nothing more comes. A :class:`VerlError` is the client's to put right."""

    error: Exception


Event = Progress | Finished | Failed


@dataclass
class _Row:
    call: _Call
    index: int
    wanted: Wanted
    told: int = 0


@dataclass
class _Call:
    """The responses of one client's call; ``tell`` is called on the engine's thread."""

    number: int
    wanted: Sequence[Wanted]
    tell: Callable[[Event], object]
    names: list[str] = field(default_factory=list)


class EngineLoop:
    """Runs the engine of ``model`` on a thread of its own.

    Nothing else may use the model while it runs. An engine that fails ends all calls with its error, and every later
    one too: ``failure`` is then set.
    """

    def __init__(self, model: ServedModel):
        self.model = model
        self.failure: Exception | None = None
        self._numbers = itertools.count()
        self._lock = threading.Condition()
        self._new: deque[_Call] = deque()
        self._aborted: deque[int] = deque()
        self._rows: dict[str, _Row] = {}  # this thread's own
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="verl-engine", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Responses that are being written or wait for their turn."""
        return len(self._rows)

    def submit(self, wanted: Sequence[Wanted], tell: Callable[[Event], object]) -> int:
        """Ask for responses; ``tell`` gets what happens, on the engine's thread. Returns the number of the call."""
        with self._lock:
            if self.failure is not None or self._closing:
                raise self.failure or Closing("the server is closing")
            call = _Call(next(self._numbers), wanted, tell)
            self._new.append(call)
            self._lock.notify()
        return call.number

    def abort(self, number: int) -> None:
        """Stop a call; it is told nothing more. One that has ended is left alone."""
        with self._lock:
            self._aborted.append(number)
            self._lock.notify()

    def stop_soon(self) -> None:
        """End what is being written, with an error to its clients; for a signal handler, so it takes no lock."""
        self._closing = True

    def close(self) -> None:
        """End the thread; what is being written is dropped."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        self._thread.join()

    # the engine's thread

    def _run(self) -> None:
        try:
            while self._take_in():
                self._work()
            self._end(Closing("the server is closing"))
        except Exception as error:
            traceback.print_exc()
            self._end(error)

    def _end(self, error: Exception) -> None:
        with self._lock:
            self.failure = error
            waiting, self._new = list(self._new), deque()
        calls = {row.call.number: row.call for row in self._rows.values()}
        calls.update((call.number, call) for call in waiting)
        self._rows = {}
        for call in calls.values():
            call.tell(Failed(error))

    def _take_in(self) -> bool:
        """Wait for something to do, hand new calls to the engine, drop aborted ones; False when closing."""
        with self._lock:
            while not (self._new or self._aborted or self._closing or self.model.engine.pending):
                self._lock.wait()
            if self._closing:
                return False
            new, self._new = self._new, deque()
            aborted, self._aborted = set(self._aborted), deque()
        for call in new:
            if call.number not in aborted:
                self._start(call)
        names = [name for name, row in self._rows.items() if row.call.number in aborted]
        if names:
            for name in names:
                del self._rows[name]
            self.model.engine.abort(names)
        return True

    def _start(self, call: _Call) -> None:
        call.names = [f"{call.number}.{i}" for i in range(len(call.wanted))]
        pairs = list(zip(call.names, call.wanted, strict=True))
        requests = [request(name, w.prompt, w.params, w.seed) for name, w in pairs if w.params is not None]
        try:
            self.model.engine.submit(requests)
        except VerlError as error:  # one that the engine refuses; those before it in the call may be in
            self.model.engine.abort(call.names)
            call.tell(Failed(error))
            return
        for i, (name, wanted) in enumerate(pairs):
            row = _Row(call, i, wanted)
            if wanted.params is None:
                nothing = Completion(name, np.zeros(0, np.int64), np.zeros(0, np.float32), "length")
                self._finish(row, nothing)
            else:
                self._rows[name] = row

    def _work(self) -> None:
        engine = self.model.engine
        if not engine.pending:
            return
        for done in engine.poll():
            row = self._rows.pop(done.request_id, None)
            if row is not None:  # else: aborted, nobody waits for it
                self._finish(row, done)
        for name, tokens, log_probs in engine.written():
            row = self._rows.get(name)
            if row is not None and row.wanted.stream and len(tokens) > row.told:
                row.call.tell(Progress(row.index, tokens[row.told :], log_probs[row.told :]))
                row.told = len(tokens)

    def _finish(self, row: _Row, done: Completion) -> None:
        wanted, scores, prompt_scores = row.wanted, None, None
        if wanted.top and wanted.params is not None:
            tokens = done.token_ids.tolist()
            scores = self.model.score(wanted.prompt, tokens, wanted.top, wanted.params.temperature)
        if wanted.score_prompt:
            prompt_scores = self.model.score(wanted.prompt[:1], wanted.prompt[1:], wanted.top or 0)
        row.call.tell(Finished(row.index, done, row.told, scores, prompt_scores))
