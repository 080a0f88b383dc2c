"""What the controller costs: a whole GRPO or PPO step whose models do nothing, in this process or over Ray.

    python benchmarks/controller_overhead.py                 # one process
    python benchmarks/controller_overhead.py --ranks 2       # two processes of a Ray cluster started here

The step is the training table itself (``verl.trainer.ppo``) with its executor, joins, checks and metrics; batches are
split, sent, received and collected as in a run. Workers hand out arrays that were made before. So all of a step's time
is dispatch, collection and bookkeeping; ``controller_cpu_s`` is the processor time of this process in it, which other
load on the machine hardly changes. With ``--generation S`` samples come in over S seconds, in which the workers sleep,
as they do over the seconds of a real rollout: what arrives meanwhile costs a run no time. S is then taken off the
step's seconds. ``--step`` is the time of a real step to compare with. Its default, 10 s, is
what 1,024 sequences of 1,024 tokens (256 of them prompt) need on two H200 with a 0.5B model, from this project's
figures on one: 786,432 sampled tokens at 62,000 a second and 1,048,576 trained ones at 137,300 a second, halved.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.algorithms.kl_controller import get_kl_controller
from verl.config import load_config, resolve
from verl.metrics import Metrics
from verl.protocol import DataProto
from verl.single_controller import Dispatch, LocalWorkerGroup, Worker, WorkerGroup, register
from verl.trainer.phases import phase_seconds
from verl.trainer.ppo import ppo
from verl.trainer.roles import Roles

PIECE = 64
"""Rows that finish together."""


class StubModel(Worker):
    """Every role: answers with arrays that lie ready, in pieces where answers are sampled."""

    def __init__(self, rows: int, prompt: int, response: int, generation: float = 0.0):
        self.generation = generation
        total = prompt + response
        self.grid = torch.zeros(rows, response)
        self.ids = torch.ones(rows, total, dtype=torch.int64)
        self.prompt, self.response = prompt, response
        self.log_probs = -torch.ones(rows, response)

    @register(Dispatch.DP_COMPUTE_PROTO, streaming=True)
    def generate(self, batch: DataProto, *, n: int) -> Iterator[DataProto]:
        uids = [uid for uid in batch.non_tensor_batch["uid"] for _ in range(n)]
        for begin in range(0, len(uids), PIECE):
            part = uids[begin : begin + PIECE]
            time.sleep(self.generation * len(part) / len(uids))
            ids = self.ids[: len(part)]
            yield DataProto.from_dict(
                {
                    "prompts": ids[:, : self.prompt],
                    "responses": ids[:, self.prompt :],
                    "input_ids": ids,
                    "attention_mask": ids,
                    "position_ids": ids,
                    "response_mask": ids[:, self.prompt :],
                    "rollout_log_probs": self.log_probs[: len(part)],
                },
                {
                    "uid": part,
                    "sample_id": [f"{uid}/{(begin + i) % n}" for i, uid in enumerate(part)],
                    "finish_reason": ["length"] * len(part),
                },
            )

    def _grids(self, batch: DataProto, name: str) -> DataProto:
        ids = {"sample_id": batch.non_tensor_batch["sample_id"]}
        return DataProto.from_dict({name: self.grid[: len(batch)]}, ids)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        return self._grids(batch, "old_log_probs")

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        return self._grids(batch, "ref_log_prob")

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, batch: DataProto) -> DataProto:
        return self._grids(batch, "values")

    @register(Dispatch.DP_PLAN)
    def update(self, batch: DataProto, plan: Any) -> Metrics:
        metrics = Metrics()
        metrics.add("rows", float(len(batch)), reduce="sum")
        return metrics


class StubReward:
    """Scores that are there at once."""

    per_row = True

    def score(self, batch: DataProto) -> DataProto:
        rows = len(batch)
        scores = torch.zeros(batch.batch["responses"].shape)
        scores[:, -1] = torch.arange(rows) % 2
        columns = {name: batch.non_tensor_batch[name] for name in ("uid", "sample_id")}
        columns |= {"reward_extra_info": [{}] * rows, "reward_error": [None] * rows}
        return DataProto.from_dict({"token_level_scores": scores, "score_valid": torch.ones(rows).bool()}, columns)

    def close(self) -> None: ...


class StubRoles(Roles):
    """Roles without a tokenizer to ask."""

    def generate(self, batch: DataProto, *, n: int, sampling: Any) -> Iterator[DataProto]:
        return self.actor.generate(batch, n=n)


def make_group(ranks: int, hosts: list[Any], role: str, arguments: tuple[int, int, int, float]) -> WorkerGroup:
    if ranks == 1:
        return LocalWorkerGroup(StubModel, *arguments)
    from verl.single_controller.ray import RayResourcePool, RayWorkerGroup

    if not hosts:
        hosts.append(RayResourcePool([ranks], "stub").host_set())
    return RayWorkerGroup(StubModel, *arguments, role=role, hosts=hosts[0])


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    n, sequences = arguments.n, arguments.sequences
    config = resolve(
        load_config(
            values={
                "algorithm.name": arguments.algorithm,
                "actor_rollout_ref.model.path": "none",
                "actor_rollout_ref.rollout.n": n,
                "actor_rollout_ref.actor.ppo_mini_batch_size": max(1, sequences // n // 4),
                "data.train_batch_size": sequences // n,
                "data.max_prompt_length": arguments.prompt,
                "data.max_response_length": arguments.tokens - arguments.prompt,
            }
        )
    )
    sizes, hosts = (sequences, arguments.prompt, arguments.tokens - arguments.prompt, arguments.generation), []
    made = {name: make_group(arguments.ranks, hosts, name, sizes) for name in ("actor", "reference", "critic")}
    kl = get_kl_controller(config.algorithm.kl_ctrl)
    roles = StubRoles(
        **made, reward=StubReward(), kl_controller=kl, prompt_columns=("data_source",), dump_folder=Path()
    )
    flow = ppo(roles, config, source=lambda _: None).validate()
    seconds, cpu, phases = [], [], []
    for step in range(1, arguments.steps + 2):
        prompts = DataProto.from_dict(
            non_tensors={
                "uid": [f"{step}.{i}" for i in range(sequences // n)],
                "prompt_ids": [np.ones(arguments.prompt, dtype=np.int64)] * (sequences // n),
                "data_source": ["none"] * (sequences // n),
            }
        )
        began, busy = time.perf_counter(), time.process_time()
        result = flow.run(prompts, step, "concurrent")
        seconds.append(time.perf_counter() - began - arguments.generation)
        cpu.append(time.process_time() - busy)
        phases.append(phase_seconds(result))
    for group in made.values():
        group.shutdown()
    warm = phases[1:]
    median = statistics.median(seconds[1:])
    return {
        "algorithm": arguments.algorithm,
        "ranks": arguments.ranks,
        "sequences": sequences,
        "tokens": arguments.tokens,
        "generation_s": arguments.generation,
        "seconds": round(median, 4),
        "lowest": round(min(seconds[1:]), 4),
        "highest": round(max(seconds[1:]), 4),
        "controller_cpu_s": round(statistics.median(cpu[1:]), 4),
        "assumed_step_s": arguments.step,
        "share": round(median / arguments.step, 4),
        "phases": {name: round(statistics.median(p.get(name, 0.0) for p in warm), 4) for name in warm[0]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--algorithm", default="grpo", choices=["grpo", "ppo"])
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence")
    parser.add_argument("--prompt", type=int, default=256, help="of them")
    parser.add_argument("--n", type=int, default=8, help="sequences a prompt")
    parser.add_argument("--steps", type=int, default=5, help="after one to warm up")
    parser.add_argument("--generation", type=float, default=0.0, help="seconds over which samples come in")
    parser.add_argument("--step", type=float, default=10.0, help="seconds of a real step")
    print(json.dumps(measure(parser.parse_args()), indent=2))


if __name__ == "__main__":
    main()
