"""TorchDistComm between processes: the results of ThreadComm, and errors that name the rank instead of hangs."""

import socket
from pathlib import Path
from typing import Any

import comm_programs
import pytest
import torch
from test_single_controller_comm import on_ranks

from verl.comm import CommError, init_process_group_from


def on_processes(world_size: int, program: str, folder: Path, timeout_s: float = 60.0, dies: bool = False) -> list[Any]:
    """Results by rank; None where a rank died."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = (program, world_size, port, timeout_s, str(folder))
    context = torch.multiprocessing.spawn(comm_programs.run, arguments, nprocs=world_size, join=False)
    for process in context.processes:
        process.join(60)
        assert not process.is_alive(), "a rank hangs"
    assert dies or all(process.exitcode == 0 for process in context.processes)
    files = [folder / f"{rank}.pt" for rank in range(world_size)]
    return [torch.load(file, weights_only=False) if file.exists() else None for file in files]


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_are_those_of_threads(world_size, tmp_path):
    found = on_processes(world_size, "collectives", tmp_path)
    expected = on_ranks(world_size, comm_programs.collectives)
    for (summed, spread, leaf, gathered, same), (t_summed, t_spread, t_leaf, t_gathered, t_same) in zip(
        found, expected, strict=True
    ):
        for ours, first, threads in zip(summed, found[0][0], t_summed, strict=True):
            assert torch.equal(ours, first), "all ranks hold the same bits"
            if world_size == 2:  # with more ranks the order of a sum may differ
                assert torch.equal(ours, threads)
            else:
                torch.testing.assert_close(ours, threads)
        assert all(torch.equal(a, b) for a, b in zip(spread, t_spread, strict=True))
        assert torch.equal(leaf, t_leaf) and gathered == t_gathered and same and t_same


def test_different_calls_are_an_error_on_every_rank_and_the_next_call_works(tmp_path):
    for found, total in on_processes(2, "disagreements", tmp_path):
        assert total == 1
        calls, shapes, types, source = found
        assert "rank 1 calls all_gather_object while rank 0 is in barrier" in calls
        assert "all_reduce_sum: rank 0 brings [((2,), 'torch.float32')], rank 1 brings [((3,)," in shapes
        assert "float64" in types and "broadcast from rank 7, but the ranks are 0 to 1" in source


def test_a_rank_that_died_is_named(tmp_path):
    *living, dead = on_processes(3, "one_dies", tmp_path, timeout_s=20, dies=True)
    assert dead is None
    for rank, (first, second) in enumerate(living):
        assert f"rank {rank} in barrier: rank(s) [2] are gone or did not come" in first
        assert "cannot call barrier: rank(s) [2] are gone" in second


def test_a_rank_that_does_not_come_is_named_after_the_timeout(tmp_path):
    living, _ = on_processes(2, "one_sleeps", tmp_path, timeout_s=2)
    assert "rank 0 in all_gather_object: rank(s) [1] are gone or did not come" in living


def test_a_meeting_to_which_nobody_comes_is_an_error():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(CommError, match=r"rank 1 of 2 did not meet the others at 127\.0\.0\.1"):
        init_process_group_from(1, 2, "127.0.0.1", port, timeout_s=1)
