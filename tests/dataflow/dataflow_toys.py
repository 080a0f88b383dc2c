"""Small nodes over NumPy and torch rows, for the tests of the dataflow."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import numpy as np
import torch

from verl.metrics import Metrics
from verl.protocol import DataProto, object_column


def prompts(count: int, first: int = 0) -> DataProto:
    """``count`` prompts with uids in an order that is not alphabetical, and the number of each as its ids."""
    numbers = range(first, first + count)
    return DataProto.from_dict(
        tensors={"ids": torch.tensor([[float(n)] for n in numbers])},
        non_tensors={
            "uid": object_column([uid(n) for n in numbers]),
            "text": object_column([f"text {n}" for n in numbers]),
        },
    )


def uid(number: int) -> str:
    return f"u{997 - number}"


def ids_of(batch: DataProto, column: str = "sample_id") -> list[str]:
    return [str(x) for x in batch.non_tensor_batch[column]]


def rows(
    uids: list[str], row_ids: list[str] | None = None, column: str = "sample_id", **values: list[float]
) -> DataProto:
    """A batch with identity columns and float tensors of shape (rows,)."""
    identity = {"uid": object_column(uids)}
    if row_ids is not None:
        identity[column] = object_column(row_ids)
    tensors = {name: torch.tensor(v, dtype=torch.float64) for name, v in values.items()}
    return DataProto.from_dict(tensors=tensors, non_tensors=identity)


def generate(batch: DataProto, n: int = 2) -> DataProto:
    """n samples a prompt: ``responses`` = 10 * prompt + sample number."""
    uids = [u for u in ids_of(batch, "uid") for _ in range(n)]
    values = [10 * float(x) + k for x in batch.batch["ids"][:, 0] for k in range(n)]
    return rows(uids, [f"{u}/{i % n}" for i, u in enumerate(uids)], responses=values)


def generate_slowly(
    batch: DataProto, n: int = 2, seconds: float = 0.01, seed: int | None = None
) -> Iterator[DataProto]:
    """The rows of :func:`generate` one by one, in an order that ``seed`` shuffles."""
    whole = generate(batch, n)
    order = list(range(len(whole)))
    if seed is not None:
        random.Random(seed).shuffle(order)
    for i in order:
        time.sleep(seconds)
        yield whole.select_idxs([i])


def score(batch: DataProto, seconds: float = 0.0) -> DataProto:
    """``score`` = responses squared; a metric over the rows of the call."""
    time.sleep(seconds)
    value = batch.batch["responses"] ** 2
    metrics = Metrics()
    metrics.add("score/mean", float(value.sum()) / len(value), weight=len(value))
    metrics.add("score/max", float(value.max()), reduce="max")
    return DataProto.from_dict(tensors={"score": value}, meta_info={"metrics": metrics})


def as_dict(result) -> dict:
    """Everything a step made, in a form that == compares exactly."""
    frames = {}
    for name, batch in result.frames.items():
        tensors = {k: v.tolist() for k, v in (batch.batch.items() if batch.batch is not None else ())}
        objects = {k: [repr(x) for x in v] for k, v in batch.non_tensor_batch.items()}
        frames[name] = {**dict(sorted(tensors.items())), **dict(sorted(objects.items()))}
    return {"frames": frames, "values": {k: repr(v) for k, v in result.values.items()}, "read": result.read}


def number_array(values: list[int]) -> np.ndarray:
    return object_column([np.int64(v) for v in values])
