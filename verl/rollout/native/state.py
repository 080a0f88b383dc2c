"""The static tensors that captured decode steps read and write."""

from __future__ import annotations

import numpy as np
import torch

from verl.rollout.native.blocks import NULL_PAGE
from verl.rollout.native.layouts import page_table
from verl.rollout.native.row_sampling import Adjusting, RowSampling, mark_seen
from verl.rollout.native.runner import Drawn
from verl.rollout.native.sequence import Sequence


class DecodeState:
    """Up to ``size`` rows of up to ``width`` pages and ``stop_width`` stop ids; ``window`` steps between two looks.

    A row that is done (or that pads the batch) stays put: it computes its last token again, which changes nothing.
    """

    def __init__(self, size: int, width: int, stop_width: int, window: int, device: torch.device):
        self.size, self.width, self.stop_width = size, width, stop_width
        whole = torch.int64
        self.tokens = torch.zeros(size, dtype=whole, device=device)
        self.positions = torch.zeros(size, dtype=whole, device=device)
        self.places = torch.arange(size, device=device)
        self.table = torch.full((size, width), NULL_PAGE, dtype=torch.int32, device=device)
        self.sharing = torch.zeros(2, size, dtype=torch.int32, device=device)
        self.stops = torch.full((size, stop_width), -1, dtype=whole, device=device)
        self.alive = torch.zeros(size, dtype=torch.bool, device=device)
        self.left = torch.zeros(size, dtype=whole, device=device)
        self.counts = torch.zeros(size, dtype=whole, device=device)
        self.step_index = torch.zeros(1, dtype=whole, device=device)
        self.sampling = RowSampling.empty(size, device)
        self.seen: torch.Tensor | None = None  # (size, V), once a row's logits depend on what it holds
        self.out_tokens = torch.zeros(window, size, dtype=whole, device=device)
        self.out_log_probs = torch.zeros(2, window, size, device=device)  # plain and filtered

    def holds(self, size: int, width: int, stops: int) -> bool:
        return self.size >= size and self.width >= width and self.stop_width >= stops

    def watch_seen(self, vocabulary: int) -> None:
        """Keep note of the ids that each row holds."""
        if self.seen is None:
            self.seen = torch.zeros(self.size, vocabulary, dtype=torch.bool, device=self.tokens.device)

    def adjusting(self, bucket: int) -> Adjusting:
        assert self.seen is not None
        return Adjusting(self.seen[:bucket], self.stops[:bucket])

    def clear(self, bucket: int) -> None:
        """Rows that own nothing."""
        self.alive[:bucket] = False
        self.positions[:bucket] = 0
        self.table[:bucket] = NULL_PAGE
        self.sharing.zero_()
        self.step_index.zero_()

    def fill(self, rows: list[Sequence], bucket: int, vocabulary: int, sharing: np.ndarray) -> None:
        """Let the first places be ``rows``, and the rest of the bucket padding. ``sharing``: (2, rows)."""
        n = len(rows)
        numbers = np.zeros((3, bucket), np.int64)
        numbers[:, :n] = np.array([(s.last_token, s.length - 1, s.remaining) for s in rows]).T
        stops = np.full((bucket, self.stop_width), -1, np.int64)
        for i, row in enumerate(rows):
            stops[i, : len(row.stops)] = sorted(row.stops)
        tokens, positions, left = torch.from_numpy(numbers)
        for target, source in (
            (self.tokens, tokens),
            (self.positions, positions),
            (self.left, left),
            (self.stops, torch.from_numpy(stops)),
        ):
            target[:bucket].copy_(source)
        self.sharing.zero_()
        self.sharing[:, :n].copy_(torch.from_numpy(sharing))
        self.alive[:bucket] = self.left[:bucket] > 0
        self.sampling.fill(rows, vocabulary)
        if self.seen is not None and any(row.request.params.adjusted for row in rows):
            mark_seen(self.seen, rows)
        self.resume(rows, bucket)

    def resume(self, rows: list[Sequence], bucket: int) -> None:
        """The same rows go on: only their pages are new."""
        table = np.zeros((bucket, self.width), np.int32)
        table[: len(rows)] = page_table([s.pages for s in rows], self.width)
        self.table[:bucket].copy_(torch.from_numpy(table))
        self.counts[:bucket] = 0
        self.step_index.zero_()

    def advance(self, bucket: int, drawn: torch.Tensor, log_probs: torch.Tensor, sampled: torch.Tensor) -> None:
        """Take one drawn token a row over; rows that reach a stop id or their limit are done."""
        alive, tokens = self.alive[:bucket], self.tokens[:bucket]
        self.out_tokens[:, :bucket].index_copy_(0, self.step_index, drawn[None])
        pair = torch.stack([log_probs, sampled])[:, None]
        self.out_log_probs[:, :, :bucket].index_copy_(1, self.step_index, pair)
        self.counts[:bucket] += alive
        self.left[:bucket] -= alive.long()
        stopped = (drawn[:, None] == self.stops[:bucket]).any(1)
        alive &= ~stopped & (self.left[:bucket] > 0)
        tokens.copy_(torch.where(alive, drawn, tokens))
        self.positions[:bucket] += alive
        self.sampling.step[:bucket] += alive
        self.step_index += 1

    def take(self, rows: int, steps: int) -> Taken:
        """Begin to bring the results of the steps to the host; later steps do not touch what is taken."""
        parts = (self.counts[:rows], self.out_tokens[:steps, :rows], self.out_log_probs[:, :steps, :rows])
        if self.tokens.device.type != "cuda":
            return Taken(*[part.clone() for part in parts])
        taken = Taken(*[part.to("cpu", non_blocking=True) for part in parts])
        taken.arrived = torch.cuda.Event()
        taken.arrived.record(torch.cuda.current_stream(self.tokens.device))
        return taken


class Taken:
    """Results on their way to the host: (rows,) counts, (steps, rows) tokens and (2, steps, rows) log-probs."""

    def __init__(self, counts: torch.Tensor, tokens: torch.Tensor, log_probs: torch.Tensor):
        self.counts, self.tokens, self.log_probs = counts, tokens, log_probs
        self.arrived: torch.cuda.Event | None = None

    def read(self) -> Drawn:
        """Wait for them."""
        if self.arrived is not None:
            self.arrived.synchronize()
        log_probs = self.log_probs.numpy()
        return Drawn(self.tokens.numpy(), log_probs[0], log_probs[1], self.counts.numpy())
