"""How fast weights get to a rollout with devices of its own (``trainer.schedule=one_step_off``), over Ray.

    python benchmarks/send_weights.py --gigabytes 1 --receivers 1

Two pools of processes on this machine: one rank that has the weights and some that take them, called as the trainer
calls them (``Roles.send_weights``): in pieces of 512 MB through the controller and Ray's object store. The figure is
``links.sent`` of benchmarks/scale_model.py. Sending from GPUs adds the copies from and to the device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from types import SimpleNamespace

import torch

from verl.single_controller import Dispatch, Worker, register
from verl.single_controller.ray import RayWorkerGroup
from verl.train_engine.spread import sent_weights
from verl.trainer.roles import Roles

LAYER = (4096, 4096)


class Holder(Worker):
    """bfloat16 matrices of one size."""

    def __init__(self, count: int):
        layers = {f"layer{i}": torch.nn.Parameter(torch.zeros(LAYER, dtype=torch.bfloat16)) for i in range(count)}
        self.engine = SimpleNamespace(lockstep=None, module=torch.nn.ParameterDict(layers))

    @register(Dispatch.ONE_TO_ALL, streaming=True)
    def weights(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from sent_weights(self.engine, self.rank)

    @register(Dispatch.ONE_TO_ALL)
    @torch.no_grad()
    def load_weights(self, piece: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in piece.items():
            self.engine.module[name].copy_(tensor)

    @register(Dispatch.ONE_TO_ALL)
    def weights_changed(self) -> None: ...


def measure(gigabytes: float, receivers: int, times: int) -> dict[str, float]:
    count = max(1, round(gigabytes * 2**30 / (LAYER[0] * LAYER[1] * 2)))
    holder, takers = RayWorkerGroup(Holder, count), RayWorkerGroup(Holder, count, world_size=receivers)
    roles = SimpleNamespace(actor=holder, rollout=takers)
    seconds = []
    for version in range(times + 1):
        began = time.perf_counter()
        Roles.send_weights(roles, version)
        seconds.append(time.perf_counter() - began)
    for group in (takers, holder):
        group.shutdown()
    size = count * LAYER[0] * LAYER[1] * 2
    median = statistics.median(seconds[1:])
    return {
        "bytes": size,
        "receivers": receivers,
        "seconds": round(median, 3),
        "lowest": round(min(seconds[1:]), 3),
        "highest": round(max(seconds[1:]), 3),
        "bytes_a_second": round(size / median),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--times", type=int, default=5, help="after one to warm up")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.gigabytes, arguments.receivers, arguments.times), indent=2))


if __name__ == "__main__":
    main()
