"""What a run has started ends with it: the rollout engine's process too."""

from __future__ import annotations

import pytest
from trainer_helpers import make_trainer

from verl.rollout.base import RolloutEngine
from verl.single_controller import Dispatch, LocalWorkerGroup, Worker, register
from verl.workers import generating


class Starts(RolloutEngine):
    """The native engine, as if it were one that has a process to end."""

    name = "starts"

    def __init__(self, inner: RolloutEngine, closed: list[Starts]):
        self.inner, self.closed = inner, closed

    def __getattribute__(self, name):
        if name in ("inner", "closed", "close", "name"):
            return object.__getattribute__(self, name)
        return getattr(self.inner, name)

    def submit(self, requests): ...

    def poll(self): ...

    def abort(self, ids=None): ...

    @property
    def pending(self): ...

    def weights_changed(self): ...

    def close(self) -> None:
        if self not in self.closed:
            self.closed.append(self)


@pytest.fixture
def engines(monkeypatch) -> tuple[list[Starts], list[Starts]]:
    """(engines made, engines closed)."""
    made, closed = [], []
    make = generating.make_engine

    def start(*args, **kwargs):
        made.append(Starts(make(*args, **kwargs), closed))
        return made[-1]

    monkeypatch.setattr(generating, "make_engine", start)
    return made, closed


def test_a_run_ends_its_engine(tiny_model_dir, tmp_path, engines):
    made, closed = engines
    trainer = make_trainer(tiny_model_dir, tmp_path)
    assert made and not closed
    metrics = trainer.fit()
    assert closed == made and trainer.roles.actor.describe()["rollout_engine"] == "starts"
    assert metrics["timing_s/reshard"] > 0
    trainer.close()
    assert closed == made


def test_so_does_a_run_that_fails_while_it_begins(tiny_model_dir, tmp_path, engines, monkeypatch):
    made, closed = engines

    def fail(*args):
        raise RuntimeError("no")

    monkeypatch.setattr("verl.trainer.base.Trainer._load", fail)
    with pytest.raises(RuntimeError, match="no"):
        make_trainer(tiny_model_dir, tmp_path)
    assert made and closed == made


class Holder(Worker):
    def __init__(self, closed: list[int]):
        self.seen = closed

    @register(Dispatch.ONE_TO_ALL)
    def work(self) -> int:
        return self.rank

    def close(self) -> None:
        self.seen.append(self.rank)


@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_of_a_group_is_closed(size):
    closed: list[int] = []
    group = LocalWorkerGroup(Holder, closed, world_size=size)
    group.work()
    group.shutdown()
    assert sorted(closed) == list(range(size))
