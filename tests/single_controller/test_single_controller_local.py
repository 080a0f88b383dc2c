"""LocalWorkerGroup: attributes, errors that carry rank and method and never hang, futures, streams."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from verl.comm import CommError
from verl.errors import ConfigError, DataError, DataflowError
from verl.protocol import DataProto
from verl.single_controller import (
    ClassWithInitArgs,
    Dispatch,
    LocalWorkerGroup,
    NotRegisteredError,
    ResourcePool,
    Worker,
    register,
)
from verl.single_controller.ranks import add_note_to_message

RANKS = pytest.mark.parametrize("world_size", [1, 2, 3])
SECONDS = 20


def within(call: Callable[[], Any]) -> Any:
    """The result of ``call``, or a failure when it does not end."""
    outcome: dict[str, Any] = {}

    def body() -> None:
        try:
            outcome["value"] = call()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "the call hangs"
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


def prompts(count: int, ids: bool = True) -> DataProto:
    return DataProto.from_dict(
        {"x": torch.arange(count)}, {"uid": [f"u{row}" for row in range(count)]} if ids else None
    )


class Player(Worker):
    def __init__(self, fail_on: int = -1):
        self.fail_on = fail_on
        self.closed = 0
        self.log: list[str] = []
        self.thread = threading.get_ident()
        self.gate = threading.Event()
        self.gate.set()

    def plain(self) -> int:
        return 1

    @register(Dispatch.ONE_TO_ALL)
    def meet(self) -> int:
        """Meets the others."""
        if self.rank == self.fail_on:
            raise DataError("row 7 has no answer")
        value = torch.tensor(self.rank)
        self.comm.all_reduce_sum([value])
        return value.item()

    @register(Dispatch.ONE_TO_ALL)
    def deserted(self) -> None:
        if self.rank:
            self.comm.barrier()

    @register(Dispatch.RANK_ZERO)
    def alone_in_a_crowd(self) -> None:
        self.comm.barrier()

    @register(Dispatch.ONE_TO_ALL)
    def same_thread(self) -> bool:
        return threading.get_ident() == self.thread

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def slow_double(self, batch: DataProto) -> DataProto:
        assert self.gate.wait(SECONDS)
        self.log.append("double")
        return DataProto.from_dict({"x": batch.batch["x"] * 2}, {"uid": batch.non_tensor_batch["uid"]})

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def slow_failure(self) -> None:
        raise DataError("too late")

    @register(Dispatch.ONE_TO_ALL)
    def history(self) -> list[str]:
        return self.log

    @register(Dispatch.ONE_TO_ALL, materialize_futures=False)
    def kind_of(self, value: Any) -> str:
        return type(value).__name__

    @register(Dispatch.DP_COMPUTE_PROTO, streaming=True, mode="rollout")
    def generate(self, batch: DataProto, meet: bool = False, pause: float = 0.0) -> Iterator[DataProto]:
        self.log.append("start")
        try:
            for row in range(len(batch)):
                if meet:
                    self.comm.barrier()
                assert self.gate.wait(SECONDS)
                time.sleep(pause)
                if self.rank == self.fail_on and row == 1:
                    raise DataError("no more words")
                self.log.append("piece")
                yield batch[row : row + 1]
        finally:
            self.closed += 1

    @register(Dispatch.DP_COMPUTE_PROTO, streaming=True)
    def not_a_generator(self, batch: DataProto) -> list[DataProto]:
        return [batch]

    @register(Dispatch.DP_COMPUTE_PROTO, streaming=True)
    def anonymous_pieces(self, batch: DataProto) -> Iterator[DataProto]:
        yield batch.select(["x"], [])

    @register(Dispatch.DP_COMPUTE_PROTO, streaming=True)
    def fails_when_closed(self, batch: DataProto) -> Iterator[DataProto]:
        try:
            yield batch
            while True:
                time.sleep(0.01)
                yield batch
        finally:
            raise DataError("cannot tidy up")


def group(world_size: int, **kwargs) -> LocalWorkerGroup:
    return LocalWorkerGroup(Player, world_size=world_size, **kwargs)


def uids(pieces: list[DataProto]) -> list[str]:
    return sorted(uid for piece in pieces for uid in piece.non_tensor_batch["uid"])


def test_registered_methods_are_attributes_and_others_are_explained():
    workers = group(2)
    assert workers.meet.__name__ == "meet" and workers.meet.__doc__ == "Meets the others."
    with pytest.raises(NotRegisteredError, match=r"Player.plain exists, but is not marked with @register"):
        workers.plain()
    with pytest.raises(AttributeError, match=r"no method 'gnerate'; registered are: .*generate"):
        workers.gnerate()
    assert not hasattr(workers, "gnerate")


def test_names_that_the_group_uses_are_refused():
    class Clash(Worker):
        @register()
        def shutdown(self) -> None: ...

    class OtherClash(Worker):
        @register()
        def workers(self) -> None: ...

    for worker_cls in (Clash, OtherClash):
        with pytest.raises(ConfigError, match="another name"):
            LocalWorkerGroup(worker_cls)


def test_making_groups():
    pool = ResourcePool([2, 1], name="gpus")
    assert pool.local_world_size_list() == [2, 2, 1] and pool.local_rank_list() == [0, 1, 0]
    with LocalWorkerGroup(ClassWithInitArgs(Player, fail_on=1), resource_pool=pool) as workers:
        assert workers.world_size == 3 and workers.workers[2].fail_on == 1 and workers.resource_pool is pool
    with pytest.raises(ConfigError, match="world_size=2 does not fit"):
        LocalWorkerGroup(Player, world_size=2, resource_pool=pool)
    with pytest.raises(ConfigError, match="not of 3"):
        LocalWorkerGroup(3)
    with pytest.raises(ConfigError, match="at least one process"):
        LocalWorkerGroup(Player, world_size=0)
    assert ClassWithInitArgs(Player, 5)().fail_on == 5
    assert (Player().rank, Player().world_size) == (0, 1)


@RANKS
def test_init_may_use_collectives_and_its_errors_name_the_rank(world_size):
    class Starter(Worker):
        def __init__(self, fail_on: int):
            if self.rank == fail_on:
                raise DataError("no such model")
            self.ranks = self.comm.all_gather_object(self.rank)

    workers = within(lambda: LocalWorkerGroup(Starter, fail_on=-1, world_size=world_size))
    assert [worker.ranks for worker in workers.workers] == [list(range(world_size))] * world_size
    with pytest.raises(DataError, match="no such model") as caught:
        within(lambda: LocalWorkerGroup(Starter, fail_on=world_size - 1, world_size=world_size))
    assert f"in Starter.__init__ on rank {world_size - 1} of {world_size}" in caught.value.__notes__[0]


@RANKS
def test_an_error_is_the_original_with_rank_and_method_and_nobody_hangs(world_size):
    for fail_on in range(world_size):
        with group(world_size, fail_on=fail_on) as workers:
            with pytest.raises(DataError, match="row 7 has no answer") as caught:
                within(workers.meet)
            assert caught.value.__notes__ == [f"in Player.meet on rank {fail_on} of {world_size}"]
            for worker in workers.workers:
                worker.fail_on = -1
            assert within(workers.meet) == [sum(range(world_size))] * world_size, "the group works on after an error"


def test_a_rank_that_leaves_early_is_an_error_not_a_hang():
    with group(3) as workers:
        with pytest.raises(CommError, match=r"for rank\(s\) \[0\], which are done"):
            within(workers.deserted)
        with pytest.raises(CommError, match="wait in barrier"):
            within(workers.alone_in_a_crowd)
        assert within(workers.meet) == [3, 3, 3]


def test_notes_on_python_310_join_the_message():
    error = ValueError("bad row", 3)
    add_note_to_message(error, "on rank 1")
    assert error.args == ("bad row\non rank 1", 3) and error.__notes__ == ["on rank 1"]
    silent = ValueError()
    add_note_to_message(silent, "on rank 1")
    assert silent.args == () and silent.__notes__ == ["on rank 1"]


@RANKS
def test_every_call_of_a_rank_runs_in_the_same_thread(world_size):
    with group(world_size) as workers:
        assert all(workers.same_thread()) and all(workers.same_thread())


@RANKS
def test_futures_chain_and_keep_the_order_of_calls(world_size):
    with group(world_size) as workers:
        for worker in workers.workers:
            worker.gate.clear()
        first = workers.slow_double(prompts(5))
        second = workers.slow_double(first)
        third = workers.slow_double(batch=second)
        assert not first.done() and not third.done(), "the calls returned before anything was computed"
        for worker in workers.workers:
            worker.gate.set()
        assert workers.kind_of(third) == ["DataProtoFuture"] * world_size
        assert third.done(), "a blocking call comes after the calls made before it"
        assert third.get().batch["x"].tolist() == [0, 8, 16, 24, 32]
        workers.slow_double(prompts(5))
        assert within(workers.history) == [["double"] * 4] * world_size


@RANKS
def test_errors_of_non_blocking_calls_wait_in_their_future(world_size):
    with group(world_size) as workers:
        future = workers.slow_failure()
        assert within(workers.meet)[0] == sum(range(world_size))
        with pytest.raises(DataError, match="too late"):
            future.get()
        with pytest.raises(DataError, match="too late"):
            workers.slow_double(future).get(timeout=SECONDS)


@RANKS
@pytest.mark.parametrize("meet", [False, True])
def test_streams_give_every_row_once(world_size, meet):
    with group(world_size) as workers:
        pieces = within(lambda: list(workers.generate(prompts(10), meet=meet)))
        assert uids(pieces) == sorted(f"u{row}" for row in range(10)) and all(len(piece) for piece in pieces)
        assert [worker.closed for worker in workers.workers] == [1] * world_size


def test_pieces_arrive_as_they_come():
    with group(2) as workers:
        workers.workers[0].gate.clear()
        stream = workers.generate(prompts(4))
        assert within(lambda: uids([next(stream), next(stream)])) == ["u2", "u3"], "rank 1 need not wait for rank 0"
        workers.workers[0].gate.set()
        assert within(lambda: uids(list(stream))) == ["u0", "u1"]
    with group(1) as workers:
        stream = workers.generate(prompts(4))
        next(stream)
        assert workers.workers[0].log == ["start", "piece"], "one rank passes its pieces straight through"
        stream.close()


@RANKS
def test_a_failing_rank_ends_the_stream_with_its_error(world_size):
    for meet in (False, True):
        with group(world_size, fail_on=world_size - 1) as workers:
            with pytest.raises(DataError, match="no more words") as caught:
                within(lambda workers=workers, meet=meet: list(workers.generate(prompts(10), meet=meet)))
            assert caught.value.__notes__ == [f"in Player.generate on rank {world_size - 1} of {world_size}"]
            assert [worker.closed for worker in workers.workers] == [1] * world_size
            assert within(lambda workers=workers: workers.history())


@RANKS
@pytest.mark.parametrize("meet", [False, True])
def test_closing_a_stream_early_stops_every_rank(world_size, meet):
    with group(world_size) as workers:
        stream = workers.generate(prompts(3000), meet=meet, pause=0.002)
        next(stream)
        within(stream.close)
        assert [worker.closed for worker in workers.workers] == [1] * world_size
        assert all(worker.log.count("piece") < 1000 for worker in workers.workers)
        assert uids(within(lambda: list(workers.generate(prompts(2))))) == ["u0", "u1"]


@RANKS
def test_no_other_call_may_cut_into_a_stream(world_size):
    with group(world_size) as workers:
        stream = workers.generate(prompts(4))
        assert workers.history() == [[]] * world_size, "a stream begins when it is first asked for a piece"
        next(stream)
        with pytest.raises(DataflowError, match=r"Player.history was called while the group still streams Player.gen"):
            workers.history()
        assert len(list(stream)) == 3
        workers.history()


@RANKS
def test_an_error_while_closing_is_not_lost(world_size):
    with group(world_size) as workers:
        stream = workers.fails_when_closed(prompts(world_size))
        next(stream)
        with pytest.raises(DataError, match="cannot tidy up"):
            within(stream.close)
        assert len(workers.history()) == world_size, "the group works on"


def test_streams_say_what_they_cannot_do():
    with group(3) as workers:
        with pytest.raises(DataflowError, match="a uid column"):
            workers.generate(prompts(4, ids=False))
        with pytest.raises(DataflowError, match="without uid or sample_id"):
            list(workers.anonymous_pieces(prompts(4)))
        with pytest.raises(DataflowError, match="registered as streaming, but returned"):
            list(workers.not_a_generator(prompts(3)))
        assert len(list(workers.anonymous_pieces(prompts(6)))) == 3
