"""Drawing for rows with parameters of their own, all on the device and without a look of the host.

Dimension key: B rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from verl.rollout.native.sequence import Sequence
from verl.rollout.sampling import gumbel_noise, penalised

FIELDS = ("temperature", "noisy", "seed", "step", "top_k", "top_p", "min_p", "penalty", "min_tokens")
PLAIN, FILTERED, ADJUSTED = 0, 1, 2
"""What a batch asks of the draw; each kind can do what those before it can."""


@dataclass
class RowSampling:
    """(B,) tensors: ``temperature`` (1 for greedy rows), ``noisy`` (0 for greedy rows), ``seed``, ``step`` (place in
    the response), ``top_k`` (V for all), ``top_p``, ``min_p``, ``penalty``, ``min_tokens``."""

    temperature: torch.Tensor
    noisy: torch.Tensor
    seed: torch.Tensor
    step: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    penalty: torch.Tensor
    min_tokens: torch.Tensor

    @staticmethod
    def empty(rows: int, device: torch.device) -> RowSampling:
        whole, real = torch.int32, torch.float32
        kinds = (real, whole, whole, whole, torch.int64, real, real, real, whole)
        return RowSampling(*(torch.ones(rows, dtype=kind, device=device) for kind in kinds))

    def fill(self, rows: list[Sequence], vocabulary: int) -> None:
        """Write the parameters of ``rows`` to the first places."""
        params = [row.request.params for row in rows]
        columns = {
            "temperature": [1.0 if p.greedy else p.temperature for p in params],
            "noisy": [int(not p.greedy) for p in params],
            "seed": [row.request.seed for row in rows],
            "step": [len(row.tokens) for row in rows],
            "top_k": [p.top_k if 0 < p.top_k < vocabulary and not p.greedy else vocabulary for p in params],
            "top_p": [1.0 if p.greedy else p.top_p for p in params],
            "min_p": [0.0 if p.greedy else p.min_p for p in params],
            "penalty": [p.repetition_penalty for p in params],
            "min_tokens": [p.min_tokens for p in params],
        }
        for name in FIELDS:
            target = getattr(self, name)
            values = torch.from_numpy(np.array(columns[name])).to(target.dtype)
            target[: len(rows)].copy_(values, non_blocking=True)

    def first(self, rows: int) -> RowSampling:
        return RowSampling(*(getattr(self, name)[:rows] for name in FIELDS))


def kind_of(rows: list[Sequence]) -> int:
    """:data:`PLAIN`, :data:`FILTERED` or :data:`ADJUSTED`: what the most demanding row needs."""
    if any(row.request.params.adjusted for row in rows):
        return ADJUSTED
    return FILTERED if any(row.request.params.filtered for row in rows) else PLAIN


@dataclass
class Adjusting:
    """What adjusted logits depend on: ``seen`` (B, V) bool, the ids that a row holds already, and ``stops`` (B, S), the
    ids that would end it (-1 for none)."""

    seen: torch.Tensor
    stops: torch.Tensor

    @staticmethod
    def of(rows: list[Sequence], vocabulary: int, device: torch.device) -> Adjusting:
        seen = torch.zeros(len(rows), vocabulary, dtype=torch.bool, device=device)
        mark_seen(seen, rows)
        width = max(1, *(len(row.stops) for row in rows))
        stops = np.full((len(rows), width), -1, np.int64)
        for i, row in enumerate(rows):
            stops[i, : len(row.stops)] = sorted(row.stops)
        return Adjusting(seen, torch.from_numpy(stops).to(device))


def mark_seen(seen: torch.Tensor, rows: list[Sequence]) -> None:
    """Let the first rows of ``seen`` say which ids ``rows`` hold."""
    ids = [row.ids() for row in rows]
    places = np.repeat(np.arange(len(rows)), [len(x) for x in ids])
    pair = torch.from_numpy(np.stack([places, np.concatenate(ids)])).to(seen.device)
    seen[: len(rows)] = False
    seen[pair[0], pair[1]] = True


def adjust_rows(logits: torch.Tensor, rows: RowSampling, adjusting: Adjusting) -> torch.Tensor:
    """:func:`verl.rollout.sampling.adjust_logits` row by row: (B, V) float logits in, a new tensor out."""
    count, vocabulary = logits.shape
    out = torch.where(adjusting.seen, penalised(logits, rows.penalty[:, None]), logits)
    # ids that end nothing, or may end their row, are noted in a column that is cut off again
    early = (rows.step < rows.min_tokens)[:, None] & (adjusting.stops >= 0)
    barred = torch.zeros(count, vocabulary + 1, dtype=torch.bool, device=logits.device)
    barred.scatter_(1, torch.where(early, adjusting.stops, vocabulary), True)
    return out.masked_fill(barred[:, :vocabulary], -float("inf"))


def filter_rows(scaled: torch.Tensor, rows: RowSampling) -> torch.Tensor:
    """What top-k, min-p and top-p exclude becomes -inf: :func:`verl.rollout.sampling.filter_logits` row by row."""
    vocabulary = scaled.shape[1]
    ordered, order = scaled.sort(dim=-1, descending=True)
    kth = ordered.gather(1, (rows.top_k - 1).clamp(max=vocabulary - 1)[:, None])
    lowest = torch.maximum(torch.where(rows.top_k[:, None] < vocabulary, kth, -float("inf")),
                           ordered[:, :1] + torch.log(rows.min_p)[:, None])  # fmt: skip
    ordered = ordered.masked_fill(ordered < lowest, -float("inf"))
    probability = ordered.softmax(-1)
    drop = (probability.cumsum(-1) - probability >= rows.top_p[:, None]) & (rows.top_p[:, None] < 1)
    drop[:, 0] = False
    drop |= ordered == -float("inf")
    return scaled.masked_fill(torch.zeros_like(drop).scatter_(1, order, drop), -float("inf"))


def draw_per_row(
    logits: torch.Tensor, rows: RowSampling, *, kind: int, triton: bool, adjusting: Adjusting | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(B,) tokens, log-probs under the temperature distribution, and under the one drawn from (NaN where it is the
    same, and for greedy rows)."""
    if kind == PLAIN and triton:
        from verl.rollout.native.sampling_kernels import draw_rows

        tokens, log_probs = draw_rows(logits, rows.temperature, rows.noisy, rows.seed, rows.step)
        return tokens, log_probs, torch.full_like(log_probs, float("nan"))
    raw = logits.float()
    scaled = allowed = raw / rows.temperature[:, None]
    if kind == ADJUSTED:
        assert adjusting is not None
        allowed = adjust_rows(raw, rows, adjusting) / rows.temperature[:, None]
    if kind != PLAIN:
        allowed = filter_rows(allowed, rows)
    noise = gumbel_noise(rows.seed, rows.step, logits.shape[1])
    tokens = torch.where(rows.noisy[:, None] > 0, allowed + noise, allowed).argmax(-1)
    log_probs = scaled.gather(1, tokens[:, None])[:, 0] - scaled.logsumexp(-1)
    is_filtered = (rows.top_k < logits.shape[1]) | (rows.top_p < 1) | (rows.min_p > 0)
    is_filtered |= ((rows.penalty != 1) | (rows.min_tokens > 0)) & (rows.noisy > 0)
    chosen = allowed.gather(1, tokens[:, None])[:, 0]
    sampled = torch.where(is_filtered, chosen - allowed.logsumexp(-1), float("nan"))
    return tokens, log_probs, sampled
