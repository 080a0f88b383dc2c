"""ThreadComm: the same bits on every rank, in rank order, and no rank ever waits in vain."""

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from verl.comm import CommAbortedError, CommError, SoloComm, ThreadComm

SECONDS = 20


def on_ranks(size: int, program: Callable[[ThreadComm], Any], comms: list[ThreadComm] | None = None) -> list[Any]:
    """Results (or errors) of ``program`` on ``size`` threads; fails when they do not end."""
    comms = comms or ThreadComm.create(size)
    results: list[Any] = [None] * size

    def body(rank: int) -> None:
        try:
            results[rank] = program(comms[rank])
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_sums_are_formed_in_rank_order_with_the_same_bits_everywhere(size):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(257, generator=generator) * 10.0 ** (3 * rank) for rank in range(size)]
    expected = values[0].clone()
    for value in values[1:]:
        expected = expected + value

    def program(comm: ThreadComm) -> list[torch.Tensor]:
        tensors = [values[comm.rank].clone(), torch.tensor(comm.rank, dtype=torch.int64)]
        for _ in range(20):  # again and again, so that a rank that runs ahead would be caught
            tensors = [values[comm.rank].clone(), torch.tensor(comm.rank, dtype=torch.int64)]
            comm.all_reduce_sum(tensors)
        return tensors

    for big, small in on_ranks(size, program):
        assert torch.equal(big, expected) and small.item() == sum(range(size))


def test_a_rank_may_write_to_its_result_at_once():
    def program(comm: ThreadComm) -> float:
        total = torch.ones(1000)
        for _ in range(50):
            total.fill_(1.0)
            comm.all_reduce_sum([total])
            assert total.eq(3).all()
            total.mul_(comm.rank)
        return total[0].item()

    assert on_ranks(3, program) == [0, 3, 6]


def test_sums_of_leaves_that_need_gradients():
    def program(comm: ThreadComm) -> list[float]:
        weight = torch.ones(2, requires_grad=True)
        comm.all_reduce_sum([weight])
        return weight.tolist()

    assert on_ranks(2, program) == [[2, 2], [2, 2]]


def test_gather_and_broadcast():
    def program(comm: ThreadComm) -> tuple[Any, ...]:
        mine = {"rank": comm.rank, "list": []}
        gathered = comm.all_gather_object(mine)
        assert gathered[comm.rank] is mine
        gathered[0]["list"].append(comm.rank)  # must not reach the other ranks
        comm.barrier()
        tensor = torch.full((3,), float(comm.rank))
        comm.broadcast([tensor], src=1)
        tensor += comm.rank
        return [item["rank"] for item in gathered], gathered[0]["list"], tensor.tolist()

    for rank, result in enumerate(on_ranks(3, program)):
        assert result == ([0, 1, 2], [rank], [1.0 + rank] * 3)


def test_abort_ends_every_wait_until_begin():
    comms = ThreadComm.create(3)

    def program(comm: ThreadComm) -> None:
        if comm.rank == 1:
            comm.meeting.abort("rank 1 has had enough")
        else:
            comm.barrier()

    results = on_ranks(3, program, comms)
    assert isinstance(results[0], CommAbortedError) and isinstance(results[2], CommAbortedError)
    assert "had enough" in str(results[0])
    with pytest.raises(CommAbortedError):
        comms[0].barrier()
    comms[0].meeting.begin()
    assert on_ranks(3, lambda comm: comm.all_gather_object(comm.rank), comms) == [[0, 1, 2]] * 3


def test_waiting_for_a_rank_that_is_done_is_an_error():
    def program(comm: ThreadComm) -> None:
        if comm.rank:
            comm.barrier()
        comm.meeting.leave(comm.rank)

    results = on_ranks(2, program)
    assert results[0] is None and type(results[1]) is CommError
    assert "rank(s) [1] wait in barrier for rank(s) [0]" in str(results[1])


def test_ranks_that_call_different_things_get_an_error():
    def program(comm: ThreadComm) -> None:
        comm.barrier() if comm.rank else comm.all_gather_object(1)

    assert all(isinstance(result, CommError) for result in on_ranks(2, program))

    def shapes(comm: ThreadComm) -> None:
        comm.all_reduce_sum([torch.ones(2 + comm.rank)])

    results = on_ranks(2, shapes)
    assert all(isinstance(result, CommError) for result in results) and "(3,)" in "".join(map(str, results))
    with pytest.raises(CommError, match="from rank 2"):
        ThreadComm.create(2)[0].broadcast([], src=2)


def test_solo_comm_changes_nothing():
    comm = SoloComm()
    tensor = torch.ones(2)
    comm.all_reduce_sum([tensor])
    comm.broadcast([tensor])
    comm.barrier()
    assert tensor.tolist() == [1, 1] and comm.all_gather_object("a") == ["a"]
    assert (comm.rank, comm.world_size) == (0, 1)


def test_importing_comm_does_not_import_torch():
    code = "import sys, verl.comm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
