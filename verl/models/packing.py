"""Packed sequences: the rows of a micro-batch behind one another, with no padding and no prompt computed twice.

A *segment* is a run of tokens that attends causally to itself and, if it has a prefix, to all of the prefix's
tokens. A plain sequence is one segment. The n responses to one prompt are n segments whose prefix is the prompt's
segment, so that the prompt is computed once.

The last trained token of a response is never fed to the model: nothing is predicted from it.

Shapes: T packed tokens, N predicted (trained) tokens, B rows, R response width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from verl.protocol import DataProto


@dataclass(frozen=True)
class Segment:
    """``length`` tokens from ``start``; they also see the ``prefix_length`` tokens from ``prefix_start``."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


@dataclass
class PackedBatch:
    """What one forward pass of a micro-batch needs.

    Attributes:
        input_ids, position_ids: (1, T) int64.
        segments: the runs of tokens and what they attend to.
        source: (N,) index into T of the position that predicts each trained token.
        target: (N,) id of each trained token.
        row, column: (N,) where that token stands in the (B, R) response grid.
        shape: (B, R).
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    segments: list[Segment]
    source: torch.Tensor
    target: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor
    shape: tuple[int, int]

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[1])

    def to_grid(self, values: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """Put (N,) per-token values into the (B, R) grid; differentiable, ``fill`` elsewhere."""
        grid = values.new_full(self.shape, fill)
        return grid.index_put((self.row, self.column), values)

    def segment_ids(self) -> list[tuple[list[int], list[int]]]:
        """(token indices, key indices) of each segment, for layouts other than the packed one."""
        pairs = []
        for s in self.segments:
            own = list(range(s.start, s.start + s.length))
            pairs.append((own, list(range(s.prefix_start, s.prefix_start + s.prefix_length)) + own))
        return pairs


@dataclass(frozen=True)
class RowTokens:
    """The real tokens of one row: prompt ids, response ids fed to the model, trained positions."""

    prompt: np.ndarray
    response: np.ndarray
    trained: np.ndarray  # indices into response, ascending

    @property
    def fed_response(self) -> int:
        """Response tokens that the model must see: all before the last trained one."""
        return int(self.trained[-1]) if len(self.trained) else 0

    @property
    def packed_length(self) -> int:
        """Tokens that the row costs when packed by itself; 0 if nothing of it is trained."""
        return len(self.prompt) + self.fed_response if len(self.trained) else 0


def rows_of(batch: DataProto) -> list[RowTokens]:
    """Read the real tokens out of a padded sample batch (prompts left-padded, responses right-padded)."""
    prompts = batch.batch["prompts"].cpu().numpy()
    responses = batch.batch["responses"].cpu().numpy()
    attention = batch.batch["attention_mask"].cpu().numpy().astype(bool)
    trained = batch.batch["response_mask"].cpu().numpy().astype(bool)
    width = prompts.shape[1]
    rows = []
    for i in range(len(prompts)):
        length = int(attention[i, width:].sum())
        rows.append(
            RowTokens(prompts[i][attention[i, :width]], responses[i, :length], np.flatnonzero(trained[i, :length]))
        )
    return rows


def packed_lengths(batch: DataProto) -> np.ndarray:
    """(B,) tokens that each row costs when packed by itself (no sharing): what micro-batches are balanced by."""
    width = batch.batch["prompts"].shape[1]
    attention = batch.batch["attention_mask"].cpu().numpy().astype(bool)
    trained = batch.batch["response_mask"].cpu().numpy().astype(bool)
    lengths = attention[:, width:].sum(1)
    trained &= np.arange(trained.shape[1]) < lengths[:, None]
    last = trained.shape[1] - 1 - trained[:, ::-1].argmax(1) if trained.shape[1] else lengths
    return np.where(trained.any(1), attention[:, :width].sum(1) + last, 0).astype(np.int64)


def computed_tokens(rows: Sequence[RowTokens]) -> tuple[int, int]:
    """(tokens that the layers compute, tokens that the output layer predicts) of one packed micro-batch."""
    trained = [row for row in rows if len(row.trained)]
    prompts = {row.prompt.tobytes(): len(row.prompt) for row in trained}
    fed = sum(row.fed_response for row in trained)
    return sum(prompts.values()) + fed, sum(len(row.trained) for row in trained)


def pack(batch: DataProto, *, share_prompts: bool = True, device: torch.device | str = "cpu") -> PackedBatch:
    """Pack the rows of a sample batch. Rows without a trained token take no part in the computation.

    Args:
        share_prompts: compute each distinct prompt of the micro-batch once.
    """
    rows = rows_of(batch)
    groups: dict[bytes, list[int]] = {}
    for i, row in enumerate(rows):
        if len(row.trained):
            if not len(row.prompt):
                raise ValueError(f"row {i} has no prompt token to predict its first response token from")
            key = row.prompt.tobytes() if share_prompts else str(i).encode()
            groups.setdefault(key, []).append(i)
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    segments: list[Segment] = []
    source: list[np.ndarray] = []
    total = 0

    def append(tokens: np.ndarray, first_position: int, prefix: Segment | None) -> Segment:
        nonlocal total
        ids.append(tokens)
        positions.append(np.arange(first_position, first_position + len(tokens)))
        segment = Segment(total, len(tokens), prefix.start if prefix else 0, prefix.length if prefix else 0)
        segments.append(segment)
        total += len(tokens)
        return segment

    order: list[int] = []
    for members in groups.values():
        prompt = rows[members[0]].prompt
        if len(members) == 1:
            row = rows[members[0]]
            segment = append(np.concatenate([prompt, row.response[: row.fed_response]]), 0, None)
            source.append(segment.start + len(prompt) + row.trained - 1)
        else:
            head = append(prompt, 0, None)
            for member in members:
                row = rows[member]
                start = total
                if row.fed_response:
                    append(row.response[: row.fed_response], len(prompt), head)
                # the first response token is predicted from the prompt's last position
                source.append(np.where(row.trained == 0, head.start + len(prompt) - 1, start + row.trained - 1))
        order.extend(members)

    input_ids, position_ids, *places = _on_device(
        [
            ids,
            positions,
            source,
            [rows[i].response[rows[i].trained] for i in order],
            [np.full(len(rows[i].trained), i) for i in order],
            [rows[i].trained for i in order],
        ],
        device,
    )
    shape = tuple(batch.batch["responses"].shape)
    return PackedBatch(input_ids[None], position_ids[None], segments, *places, shape=shape)


def _on_device(columns: list[list[np.ndarray]], device: torch.device | str) -> list[torch.Tensor]:
    """Each list of arrays joined to one int64 tensor. All go over in one copy, and nobody waits for a GPU."""
    lengths = [sum(map(len, parts)) for parts in columns]
    parts = [part.astype(np.int64) for column in columns for part in column]
    whole = torch.from_numpy(np.concatenate(parts)) if parts else torch.zeros(0, dtype=torch.int64)
    if torch.device(device).type == "cuda":
        whole = whole.pin_memory()
    return list(whole.to(device, non_blocking=True).split(lengths))
