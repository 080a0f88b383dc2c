"""Workers for test_single_controller_ray.py; a module of its own, which the processes import."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from verl.errors import DataError
from verl.notices import notice
from verl.protocol import DataProto
from verl.single_controller import Dispatch, Worker, register


class Player(Worker):
    def __init__(self, fail_on: int = -1):
        if fail_on == -2 - self.rank:
            raise DataError("no such model")
        self.fail_on = fail_on
        self.log: list[str] = []
        self.closed = 0
        self.value = torch.zeros(3)

    @register(Dispatch.ONE_TO_ALL)
    def meet(self) -> int:
        value = torch.tensor(self.rank)
        self.comm.all_reduce_sum([value])
        return value.item()

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, on: int) -> int:
        if self.rank == on:
            raise DataError("row 7 has no answer")
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def fail_while_others_meet(self, on: int) -> None:
        if self.rank == on:
            raise DataError("row 7 has no answer")
        self.comm.barrier()

    @register(Dispatch.ONE_TO_ALL)
    def fail_strangely(self) -> None:
        class Odd(Exception):
            def __init__(self, a: int, b: int):
                super().__init__(f"{a} and {b}")

        raise Odd(1, 2)

    @register(Dispatch.RANK_ZERO)
    def alone_in_a_crowd(self) -> None:
        self.comm.barrier()

    @register(Dispatch.ONE_TO_ALL)
    def die(self, on: int) -> None:
        print(f"rank {self.rank} says goodbye", flush=True)
        if self.rank == on:
            os.kill(os.getpid(), signal.SIGKILL)
        self.comm.barrier()

    @register(Dispatch.ONE_TO_ALL)
    def dawdle(self, on: int, seconds: float) -> None:
        if self.rank == on:
            self._dream(seconds)
        self.comm.barrier()

    def _dream(self, seconds: float) -> None:
        time.sleep(seconds)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def slow_double(self, batch: DataProto) -> DataProto:
        time.sleep(0.3)
        self.log.append("double")
        return DataProto.from_dict({"x": batch.batch["x"] * 2}, {"uid": batch.non_tensor_batch["uid"]})

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def slow_failure(self) -> None:
        raise DataError("too late")

    @register(Dispatch.ONE_TO_ALL)
    def history(self) -> tuple[list[str], int]:
        return self.log, self.closed

    @register(Dispatch.DP_COMPUTE_PROTO, streaming=True, mode="rollout")
    def generate(self, batch: DataProto, pause: float = 0.0, slow_rank: int = -1) -> Iterator[DataProto]:
        try:
            for row in range(len(batch)):
                time.sleep(3.0 if self.rank == slow_rank else pause)
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
    def fails_when_closed(self, batch: DataProto) -> Iterator[DataProto]:
        try:
            yield batch
            while True:
                time.sleep(0.01)
                yield batch
        finally:
            raise DataError("cannot tidy up")

    @register(Dispatch.DP_COMPUTE_PROTO, streaming=True)
    def dies_streaming(self, batch: DataProto) -> Iterator[DataProto]:
        yield batch
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)

    @register(Dispatch.ONE_TO_ALL)
    def environment(self) -> dict[str, str]:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "VERL_TEST")
        return {name: os.environ.get(name, "") for name in names}

    @register(Dispatch.ONE_TO_ALL)
    def process(self) -> int:
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def tell(self) -> None:
        notice("the ranks changed a choice")

    @register(Dispatch.ONE_TO_ALL)
    def keep(self, state: dict[str, Any]) -> None:
        state["nested"][0].add_(1)  # what arrives may be written to
        self.value = state["nested"][0]

    @register(Dispatch.RANK_ZERO)
    def kept(self) -> dict[str, Any]:
        return {"value": self.value, "half": self.value.to(torch.bfloat16), "array": np.arange(5)}

    @register(Dispatch.ONE_TO_ALL)
    def large(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)


class Second(Worker):
    """Another role in the same processes."""

    @register(Dispatch.ONE_TO_ALL)
    def process(self) -> int:
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def meet(self) -> list[int]:
        return self.comm.all_gather_object(self.rank)
