"""Pipeline parallelism: the layers of a model lie on several ranks, and micro-batches pass through them one by one.

What a worker computes for a micro-batch is one function: hidden states, log-probs, loss. Every stage calls it. Where it
asks for the hidden states, the stage receives those of the stage before, passes them through its layers and hands them
on; only on the last stage the function goes on, and has a result. So no loss knows of stages. All stages know a
micro-batch's shape, which is never sent.

The order of the passes is 1F1B, or interleaved 1F1B where a rank has several runs of layers (Narayanan et al. 2021,
arXiv:2104.04473). It is Megatron-Core's, written here because its own schedules count tokens on a device "cuda", so
that they cannot run on a host, and because they send shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from verl.train_engine.megatron_grid import Grid


class StageDone(Exception):
    """The hidden states have been computed as far as this stage goes."""

    def __init__(self, hidden: torch.Tensor):
        super().__init__()
        self.hidden = hidden


class Turn(NamedTuple):
    """One pass of a rank's run of layers over one micro-batch, forward or backward."""

    backward: bool
    chunk: int
    number: int


def one_forward_one_backward(stage: int, stages: int, chunks: int, count: int) -> Iterator[Turn]:
    """The passes of a rank over ``count`` micro-batches, in turn."""
    if chunks == 1:
        passes, warm_up = count, min(stages - stage - 1, count)
    else:  # in rounds of as many micro-batches as there are stages; the last round may lack some
        passes = -(-count // stages) * stages * chunks
        warm_up = min((stages - stage - 1) * 2 + (chunks - 1) * stages, passes)

    def turn(index: int, backward: bool) -> Turn:
        if chunks == 1:
            return Turn(backward, 0, index)
        round_, place = divmod(index, stages * chunks)
        chunk, number = divmod(place, stages)
        return Turn(backward, chunks - 1 - chunk if backward else chunk, round_ * stages + number)

    order = [turn(i, False) for i in range(warm_up)]
    for i in range(passes - warm_up):
        order += [turn(warm_up + i, False), turn(i, True)]
    order += [turn(i, True) for i in range(passes - warm_up, passes)]
    return (turn for turn in order if turn.number < count)


class Pipeline:
    """The stages of this rank.

    Attributes:
        chunk: which of its runs of layers the present pass is of.
    """

    def __init__(self, grid: Grid, chunks: int, device: torch.device):
        self.rank, self.size, self.chunks = grid.pipeline.rank, grid.pipeline.world_size, chunks
        self.chunk = 0
        self._edges, self._device = grid.edges, device
        self._entered: torch.Tensor | None = None
        self._asked = False
        self._sent: list[tuple[Any, torch.Tensor]] = []

    @property
    def first(self) -> bool:
        """The present pass begins with the embedding."""
        return self.rank == 0 and self.chunk == 0

    @property
    def at_the_end(self) -> bool:
        """This rank has the last layer, and so the results."""
        return self.rank == self.size - 1

    @property
    def last(self) -> bool:
        """The present pass ends with the last layer."""
        return self.at_the_end and self.chunk == self.chunks - 1

    def enter(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The hidden states that the layers before the present run have computed."""
        assert not self._asked, "a function of a micro-batch may ask for its hidden states once"
        self._asked = True
        self._entered = self._receive("states", shape, dtype).requires_grad_(torch.is_grad_enabled())
        return self._entered

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hand the hidden states on; on the last stage they come back.

        Raises:
            StageDone: there are stages behind this one.
        """
        if self.last:
            return hidden
        self._send("states", hidden.detach())
        raise StageDone(hidden)

    def forward(self, compute: Callable[[], Any], chunk: int) -> tuple[torch.Tensor | None, torch.Tensor | None, Any]:
        """(what came in, what goes out, result) of one pass; the result is None but on the last stage."""
        self.chunk, self._entered, self._asked = chunk, None, False
        try:
            result = compute()
        except StageDone as done:
            return self._entered, done.hidden, None
        return self._entered, None, result if self.last else None

    def infer(self, compute: Callable[[], Any]) -> Any:
        """A pass without gradients through all of this rank's runs; the result is None but on the last stage."""
        with torch.no_grad():
            for chunk in range(self.chunks):
                _, _, result = self.forward(compute, chunk)
        self._wait(4 * self.chunks)
        return result

    def train(
        self, computes: Sequence[Callable[[], tuple[torch.Tensor, Any]]], scale: float, attempt: Callable[..., Any]
    ) -> list[Any]:
        """Forward and backward passes over all micro-batches; what came with their losses, None but on the last stage.

        Args:
            attempt: calls what it is given, and says what to do where memory runs out.
        """
        waiting: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        found: list[Any] = [None] * len(computes)
        for turn in one_forward_one_backward(self.rank, self.size, self.chunks, len(computes)):
            key = turn.chunk, turn.number
            if turn.backward:
                attempt(lambda key=key: self._backward(*waiting.pop(key)))
                continue
            entered, left, result = attempt(lambda turn=turn: self.forward(computes[turn.number], turn.chunk))
            if result is not None:
                loss, found[turn.number] = result
                left = (loss * scale if scale != 1.0 else loss) if loss.requires_grad else None
            waiting[key] = entered, left
        self._wait(0)
        return found

    def _backward(self, entered: torch.Tensor | None, left: torch.Tensor | None) -> None:
        """A micro-batch without a trained token asks for no hidden states, and nothing was sent of it."""
        if left is None:
            if entered is not None:  # the loss does not depend on the states, and the stages before wait
                self._send("gradients", torch.zeros_like(entered))
            return
        if left.ndim:
            left.backward(self._receive("gradients", left.shape, left.dtype))
        else:
            left.backward()
        if entered is not None:
            self._send("gradients", entered.grad if entered.grad is not None else torch.zeros_like(entered))

    def _send(self, kind: str, tensor: torch.Tensor) -> None:
        group, other = self._edges[f"send {kind}"]
        tensor = tensor.contiguous()
        self._sent.append((dist.isend(tensor, other, group=group), tensor))
        self._wait(4 * self.chunks * self.size)

    def _receive(self, kind: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        group, other = self._edges[f"receive {kind}"]
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        dist.irecv(tensor, other, group=group).wait()
        return tensor

    def _wait(self, most: int) -> None:
        """Wait until at most so many messages are under way; what is sent must stay as it is until then."""
        while len(self._sent) > most:
            work, _ = self._sent.pop(0)
            work.wait()
