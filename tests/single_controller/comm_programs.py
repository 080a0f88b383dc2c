"""What the ranks of test_single_controller_processes.py do; a module of its own, which their processes import."""

import os
import signal
import time
from typing import Any

import torch

from verl.comm import Comm, CommError, init_process_group_from


def values(rank: int) -> list[torch.Tensor]:
    """Several small tensors, one large, of several types; some not contiguous, some empty."""
    generator = torch.Generator().manual_seed(rank)
    big = torch.randn(300, 200, generator=generator) * 10.0 ** (3 * rank)
    return [
        big[:, 3:].t(),
        torch.randn(257, generator=generator),
        torch.randn(5, generator=generator, dtype=torch.float64),
        torch.zeros(0),
        torch.tensor(rank + 1),
        torch.randn(1000, generator=generator),
    ]


def collectives(comm: Comm) -> Any:
    """Every call once; what came out."""
    summed, spread = values(comm.rank), values(comm.rank)
    leaf = torch.ones(3, requires_grad=True)
    comm.all_reduce_sum([*summed, leaf])
    comm.broadcast(spread, src=1)
    comm.barrier()
    mine = {"rank": comm.rank}
    gathered = comm.all_gather_object(mine)
    return summed, spread, leaf.detach(), gathered, gathered[comm.rank] is mine


def disagreements(comm: Comm) -> Any:
    """Different calls, shapes and types; then a call that works."""
    found = []
    first = comm.rank == 0
    for call in (
        lambda: comm.barrier() if first else comm.all_gather_object(1),
        lambda: comm.all_reduce_sum([torch.zeros(2 if first else 3)]),
        lambda: comm.broadcast([torch.zeros(2, dtype=torch.float32 if first else torch.float64)]),
        lambda: comm.broadcast([], src=7),
    ):
        try:
            call()
        except CommError as error:
            found.append(str(error))
    total = torch.tensor(comm.rank)
    comm.all_reduce_sum([total])
    return found, total.item()


def one_dies(comm: Comm) -> Any:
    """The last rank ends without a word."""
    if comm.rank == comm.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return _error_of(comm.barrier), _error_of(comm.barrier)


def one_sleeps(comm: Comm) -> Any:
    """The last rank does not come."""
    if comm.rank == comm.world_size - 1:
        time.sleep(5)
        return None
    return _error_of(lambda: comm.all_gather_object(1))


def _error_of(call) -> str:
    try:
        call()
    except CommError as error:
        return str(error)
    return "no error"


def run(rank: int, program: str, world_size: int, port: int, timeout_s: float, folder: str) -> None:
    torch.set_num_threads(1)
    comm = init_process_group_from(rank, world_size, "127.0.0.1", port, timeout_s=timeout_s)
    torch.save(globals()[program](comm), f"{folder}/{rank}.pt")
    if timeout_s < 60:
        os._exit(0)  # the group is in pieces: nothing is left to be torn down in order
    torch.distributed.destroy_process_group()
