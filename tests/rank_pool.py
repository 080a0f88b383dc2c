"""Ranks that are processes of a gloo group, kept from test to test: what they import is imported once.

A program is a module-level function ``program(comm, *args)``; what it returns comes back by rank.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

_COUNT = itertools.count()


class RankFailed(AssertionError):
    """A rank raised; the message is its traceback."""


def _serve(pipe, path: list[str], device: str) -> None:
    sys.path[:] = path
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    from verl.comm import TorchDistComm

    torch.set_num_threads(1)
    while (order := pipe.recv()) is not None:
        rank, world, file, program, args = order
        try:
            backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}[device]
            if device == "cuda":
                torch.cuda.set_device(rank)
            dist.init_process_group(backend, store=dist.FileStore(file, world), rank=rank, world_size=world)
            try:
                pipe.send((True, program(TorchDistComm(), *args)))
            finally:
                dist.destroy_process_group()
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class RankPool:
    """Up to ``size`` ranks; make it with :func:`rank_pool`."""

    def __init__(self, size: int, modules: list[str], device: str):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "transformers", "verl.workers.actor", *modules])
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, list(sys.path), device), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, world: int, program: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
        """``program(comm, *args)`` on ``world`` ranks; the results by rank."""
        file = os.path.join(self._folder.name, f"store{next(_COUNT)}")
        for rank in range(world):
            self._pipes[rank].send((rank, world, file, program, args))
        results, failures = [], []
        for rank in range(world):
            # where one rank has failed the others wait for it in vain
            if not self._pipes[rank].poll(timeout_s if not failures else 3):
                failures.append(f"rank {rank} does not answer")
                continue
            good, value = self._pipes[rank].recv()
            (results if good else failures).append(value if good else f"rank {rank}:\n{value}")
        if failures:
            self.close()
            raise RankFailed("\n".join(failures))
        return results

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


@contextlib.contextmanager
def rank_pool(size: int, *modules: str, device: str = "cpu") -> Iterator[RankPool]:
    """``device``: "cuda" gives every rank a GPU of its own, and nccl."""
    pool = RankPool(size, list(modules), device)
    try:
        yield pool
    finally:
        pool.close()


def pool_of(size: int, *modules: str, device: str = "cpu"):
    """A module's fixture: its tests share these ranks."""

    @pytest.fixture(scope="module")
    def pool():
        with rank_pool(size, *modules, device=device) as ranks:
            yield ranks

    return pool
