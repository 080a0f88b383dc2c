"""The engine of ranks that generate together: who gets which rows, who waits for whom, and what must not differ."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from verl.comm import ThreadComm
from verl.errors import RolloutError
from verl.metrics import Metrics
from verl.rollout.base import Completion, Request, RolloutEngine, SamplingParams
from verl.rollout.lockstep import LockstepEngine


class Counting(RolloutEngine):
    """Writes a token a poll for every request: the length so far. ``seen``: the requests in order, and each poll."""

    name = "counting"

    def __init__(self) -> None:
        self.rows: dict[str, tuple[Request, list[int]]] = {}
        self.seen: list[Any] = []
        self.gone: list[Completion] = []
        self.released = 0

    def submit(self, requests):
        for request in requests:
            assert request.id not in self.rows
            self.rows[request.id] = request, []
            self.seen.append((request.id, request.seed))

    def poll(self):
        self.seen.append(sorted(self.rows))
        for name, (request, tokens) in list(self.rows.items()):
            tokens.append(len(tokens))
            if len(tokens) == request.params.max_tokens:
                self._end(name, "length")
        gone, self.gone = self.gone, []
        return gone

    def _end(self, name: str, reason: str) -> None:
        _, tokens = self.rows.pop(name)
        self.gone.append(Completion(name, np.array(tokens), np.zeros(len(tokens), np.float32), reason))

    def abort(self, ids=None):
        for name in list(self.rows) if ids is None else [name for name in ids if name in self.rows]:
            self._end(name, "abort")

    @property
    def pending(self):
        return len(self.rows) + len(self.gone)

    def weights_changed(self):
        pass

    def written(self):
        for name, (_, tokens) in self.rows.items():
            yield name, tokens, [0.0] * len(tokens)

    def release(self):
        self.released += 1

    def take_metrics(self):
        metrics = Metrics()
        metrics.add("rollout/preemptions", 1.0, reduce="sum")
        return metrics


def wanted(name: str, tokens: int) -> Request:
    return Request(name, np.array([5, 6]), SamplingParams(max_tokens=tokens), seed=tokens)


def together(program: Callable[[LockstepEngine], Any], ranks: int = 2) -> tuple[list[Any], list[Counting]]:
    """``program(engine)`` on every rank, in threads; results (or errors) and inner engines."""
    inners, results = [Counting() for _ in range(ranks)], [None] * ranks
    comms = ThreadComm.create(ranks)

    def run(rank: int) -> None:
        try:
            results[rank] = program(LockstepEngine(inners[rank], comms[rank]))
        except Exception as error:
            results[rank] = error
            comms[rank].meeting.abort(f"rank {rank} failed")

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "nobody waits for ever"
    return results, inners


def test_every_rank_does_the_same_and_gets_its_own():
    def program(engine):
        rank = engine.comm.rank
        found = engine.generate([wanted("same/0", 2), *([] if rank else [wanted("more/0", 5)])])
        assert not engine.pending
        engine.release()
        return [(done.request_id, len(done.token_ids)) for done in found], len(engine.take_metrics())

    results, inners = together(program)
    assert results == [([("same/0", 2), ("more/0", 5)], 1), ([("same/0", 2)], 0)], "metrics are the group's, once"
    assert inners[0].seen == inners[1].seen and inners[0].released == inners[1].released == 1
    assert [name for name, *_ in inners[0].seen[:3]] == ["0:same/0", "0:more/0", "1:same/0"]


def test_a_rank_that_has_enough_works_on_for_the_others():
    def program(engine):
        rank = engine.comm.rank
        engine.submit([wanted("a", 50 if rank == 0 else 9), wanted("b", 50)])
        found = engine.poll()
        if rank == 0:
            engine.abort()
            found += engine.poll()
        else:
            engine.abort(["b"])
            while engine.pending:
                found += engine.poll()
        late = []
        if rank == 1:  # rank 0 is waiting for the end
            engine.submit([wanted("c", 3)])
            while engine.pending:
                late += engine.poll()
        engine.release()
        return sorted((done.request_id, len(done.token_ids), done.finish_reason) for done in [*found, *late])

    results, inners = together(program)
    assert results[0] == [("a", 1, "abort"), ("b", 1, "abort")]
    assert results[1] == [("a", 9, "length"), ("b", 1, "abort"), ("c", 3, "length")]
    assert inners[0].seen == inners[1].seen and not inners[0].rows and inners[0].released == 1


def test_a_rank_without_a_request_of_its_own():
    def program(engine):
        found = engine.generate([wanted("a", 4)] if engine.comm.rank == 2 else [])
        engine.release()
        return len(found)

    results, inners = together(program, 3)
    assert results == [0, 0, 1] and len(inners[0].seen) == len(inners[2].seen)


def test_tokens_that_differ_are_an_error_on_every_rank():
    def program(engine):
        engine.submit([wanted("a", 9)])
        engine.poll()
        if engine.comm.rank == 1:
            engine.inner.rows["0:a"][1][-1] = 77
        engine.poll()

    results, _ = together(program)
    assert all(isinstance(error, RolloutError) and "drawn different tokens" in str(error) for error in results)


def test_what_the_engine_refuses_leaves_nobody_waiting():
    class Refusing(Counting):
        def submit(self, requests):
            for request in requests:
                if request.id.endswith("bad"):
                    raise RolloutError("the prompt is empty")

    def program(engine):
        engine.inner.__class__ = Refusing
        engine.submit([wanted("bad", 1)] if engine.comm.rank == 1 else [])
        try:
            with pytest.raises(RolloutError, match="the prompt is empty"):
                engine.poll()
        finally:
            engine.release()
        return "told"

    assert together(program)[0] == ["told", "told"]
