"""Which ranks of a role do what together when Megatron computes its model.

Ranks are counted through tensor parallelism first, then context, then pipeline parallelism, then copies: the matrices
of a layer are cut over neighbours, which talk most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from verl.comm import TorchDistComm
from verl.errors import ConfigError
from verl.train_engine.parallel import ParallelSettings


@dataclass(frozen=True)
class Stages:
    """How the decoder layers of a model lie over the stages of a pipeline.

    Each rank of the pipeline has ``chunks`` runs of neighbouring layers (interleaved where it has more than one:
    Narayanan et al. 2021, arXiv:2104.04473). Run v lies on rank v % ranks. Where layers do not divide, the first runs
    have one more.
    """

    layers: int
    ranks: int = 1
    chunks: int = 1

    def run(self, rank: int, chunk: int) -> range:
        """The layers of one run."""
        runs, number = self.ranks * self.chunks, chunk * self.ranks + rank
        each, more = divmod(self.layers, runs)
        start = number * each + min(number, more)
        return range(start, start + each + (number < more))

    def place(self, layer: int) -> tuple[int, int, int]:
        """(rank, chunk, number within the run) of a layer."""
        for chunk in range(self.chunks):
            for rank in range(self.ranks):
                run = self.run(rank, chunk)
                if layer in run:
                    return rank, chunk, layer - run.start
        raise IndexError(layer)


class Grid:
    """The groups of one rank. All ranks of ``comm`` make it together.

    Attributes:
        tensor: ranks over which the matrices of a layer are cut.
        context: ranks that share the tokens of a micro-batch.
        pipeline: ranks whose layers follow each other.
        copy: all ranks that hold one copy of the weights and pass over the same micro-batches.
        split: the ranks of a copy that hold different parts of it: over tensor and pipeline parallelism.
        same: ranks that hold the same part; their gradients are summed.
        ends: the first and the last stage of this rank's pipeline; None on the ranks between.
        alone: this rank.
        edges: (group, the other rank) of what goes to and comes from the neighbours in the pipeline, by name.
    """

    def __init__(self, comm: TorchDistComm, settings: ParallelSettings):
        tensor, context, stages = settings.tensor_size, settings.context_size, settings.pipeline_size
        copy = tensor * context * stages
        if comm.world_size % copy:
            raise ConfigError(_does_not_divide(settings, comm.world_size))
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        ranks = torch.tensor(dist.get_process_group_ranks(comm.group)).view(-1, stages, context, tensor)
        copy_number, stage, part, column = (int(i) for i in (ranks == dist.get_rank()).nonzero()[0])
        self.tensor = self._comm(ranks[copy_number, stage, part])
        self.context = self._comm(ranks[copy_number, stage, :, column])
        self.pipeline = self._comm(ranks[copy_number, :, part, column])
        self.copy = self._comm(ranks[copy_number].flatten())
        self.split = self._comm(ranks[copy_number, :, part].flatten())
        self.same = self._comm(ranks[:, stage, :, column].flatten())
        self.ends: TorchDistComm | None = None
        line = ranks[copy_number, :, part, column].tolist()
        if stages > 1 and stage in (0, stages - 1):
            self.ends = self._comm(torch.tensor([line[0], line[-1]]))
        self.alone = self._group((dist.get_rank(),))
        self.edges = self._edges(line, stage, wrapped=settings.virtual_size > 1)

    def _comm(self, ranks: torch.Tensor) -> TorchDistComm:
        return TorchDistComm(self._group(tuple(ranks.tolist())))

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        if ranks not in self._made:
            self._made[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
        return self._made[ranks]

    def _edges(self, line: Sequence[int], stage: int, *, wrapped: bool) -> dict[str, tuple[dist.ProcessGroup, int]]:
        """Every direction has a group of its own: messages of one group go in turn, and a message that waits for its
        receiver must not hold up one that goes the other way.

        Args:
            wrapped: the last stage sends to the first, whose next run of layers goes on.
        """
        found: dict[str, tuple[dist.ProcessGroup, int]] = {}
        for here, rank in enumerate(line if wrapped and len(line) > 1 else line[:-1]):
            following = (here + 1) % len(line)
            pair = sorted((rank, line[following]))
            for kind, sender, receiver in (("states", here, following), ("gradients", following, here)):
                if stage not in (sender, receiver):
                    continue
                group = dist.new_group(pair, use_local_synchronization=True)
                if stage == sender:
                    found[f"send {kind}"] = group, line[receiver]
                else:
                    found[f"receive {kind}"] = group, line[sender]
        return found


def _does_not_divide(settings: ParallelSettings, ranks: int) -> str:
    sizes = {
        "tensor_model_parallel_size": settings.tensor_size,
        "pipeline_model_parallel_size": settings.pipeline_size,
        "context_parallel_size": settings.context_size,
    }
    used = {name: size for name, size in sizes.items() if size > 1}
    product = " times ".join(f"megatron.{name}={size}" for name, size in used.items())
    return f"{product} does not divide the {ranks} ranks of the role; use a divisor."
