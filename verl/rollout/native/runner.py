"""Running the twin: packed prompts, and decode steps with sampling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from verl.rollout.base import SamplingParams
from verl.rollout.native.attention import Layout
from verl.rollout.native.cache import CacheShape, PagedCache
from verl.rollout.native.cascade import Cascade, CascadeLayout, in_buckets
from verl.rollout.native.host_layers import HostLayers
from verl.rollout.native.layers import decoder_layers
from verl.rollout.native.layouts import GatherLayout, PrefillLayout, decode_table
from verl.rollout.native.linears import HostLinears, onednn_works
from verl.rollout.native.scheduler import Chunk
from verl.rollout.native.sequence import Sequence
from verl.rollout.native.settings import NativeSettings
from verl.rollout.sampling import draw


@dataclass
class Drawn:
    """New tokens of B rows: (steps, B) arrays, of which row b's first ``counts[b]`` steps are meant.

    Attributes:
        sampled: log-probs under the filtered distribution; NaN for rows without a filter.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    sampled: np.ndarray
    counts: np.ndarray


class Runner:
    """One token a row and step, sampled on the host's schedule. Works on every device.

    Attributes:
        lookahead: tokens that a row may write in one :meth:`decode`.
        grows: the cache can grow while rows are running, at the cost of the new pages alone.
    """

    lookahead = 1
    grows = False

    def __init__(self, twin: PreTrainedModel, shape: CacheShape, settings: NativeSettings):
        self.twin = twin
        self.settings = settings
        self.cache = PagedCache(shape)
        self.device = shape.device
        self.cascade = Cascade(self.cache, settings.host_slab_bytes)
        self.linears: HostLinears | None = None
        if onednn_works(shape.device, shape.dtype):
            self.linears = HostLinears(twin, settings.host_pack_bytes)
            self.host_layers = HostLayers(twin, decoder_layers(twin, shape.layers), self.linears)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, layout: Layout, keep: torch.Tensor) -> torch.Tensor:
        """(len(keep), V) logits at the places ``keep`` of the packed (T,) tokens."""
        out = self.twin(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=keep,
            verl_layout=layout,
        )
        return out.logits[0]

    def prefill_layout(self, chunks: list[Chunk]) -> Layout:
        return PrefillLayout(self.cache, chunks)

    def prefill(self, chunks: list[Chunk]) -> torch.Tensor:
        """Compute the chunks; (number of chunks that end their sequence, V) logits."""
        ids = np.concatenate([c.sequence.ids()[c.start : c.start + c.length] for c in chunks])
        positions = np.concatenate([np.arange(c.start, c.start + c.length) for c in chunks])
        ends = np.cumsum([c.length for c in chunks]) - 1
        keep = ends[[c.last for c in chunks]]
        ids_, positions_, keep_ = (torch.from_numpy(x).to(self.device) for x in (ids, positions, keep))
        return self.forward(ids_, positions_, self.prefill_layout(chunks), keep_)

    def decode_logits(self, rows: list[Sequence]) -> torch.Tensor:
        """(B, V) logits after each row's last token."""
        ids = torch.tensor([s.last_token for s in rows], device=self.device)
        table, positions = decode_table(self.cache, rows)
        if self.device.type == "cpu":
            layout: Layout = CascadeLayout(self.cascade, rows)
        else:
            layout = GatherLayout(self.cache, table, positions)
        return self.forward(ids, positions, layout, torch.arange(len(rows), device=self.device))

    def arranged(self, rows: list[Sequence]) -> list[Sequence]:
        """The rows in the order in which :meth:`decode` is fastest."""
        return in_buckets(rows) if self.device.type == "cpu" else rows

    def decode(self, rows: list[Sequence], ahead: bool = False) -> Drawn:
        """One token for every row. ``ahead``: no other rows wait, so what follows may be begun at once."""
        if self.linears is not None:
            self.linears.plan(len(rows), max(row.remaining for row in rows))
        return self.sample(rows, self.decode_logits(rows))

    def sample(self, rows: list[Sequence], logits: torch.Tensor) -> Drawn:
        """Draw one token a row from (B, V) logits; rows of equal parameters are drawn together."""
        kinds: dict[SamplingParams, list[int]] = {}
        for i, row in enumerate(rows):
            kinds.setdefault(row.request.params, []).append(i)
        drawn = Drawn(
            np.empty((1, len(rows)), np.int64),
            np.empty((1, len(rows)), np.float32),
            np.full((1, len(rows)), np.nan, np.float32),
            np.ones(len(rows), np.int64),
        )
        for params, index in kinds.items():
            seeds = torch.tensor([rows[i].request.seed for i in index], dtype=torch.int32, device=self.device)
            places = torch.tensor([len(rows[i].tokens) for i in index], dtype=torch.int32, device=self.device)
            part = logits if len(kinds) == 1 else logits[torch.tensor(index, device=self.device)]
            written = [rows[i].written() for i in index] if params.adjusted else ()
            tokens, log_probs, sampled = draw(part, params, seeds, places, written)
            drawn.tokens[0, index] = tokens.cpu().numpy()
            drawn.log_probs[0, index] = log_probs.cpu().numpy()
            if sampled is not None:
                drawn.sampled[0, index] = sampled.cpu().numpy()
        return drawn

    def weights_changed(self) -> None:
        """Forget what was copied or computed from the old weights."""
        self.cascade.drop()
        if self.linears is not None:
            self.linears.drop()
            self.host_layers.drop()

    def release(self) -> None:
        """Give back the cache, and what was made for the rollout."""
        self.weights_changed()
        self.cache.release()

    def allocate(self, num_pages: int, most: int) -> None:
        """Take memory for at least ``num_pages`` pages, in view of ``most`` later."""
        self.cache.allocate(num_pages)

    @property
    def planned_pages(self) -> int | None:
        """Pages that :meth:`allocate` must plan for to keep what depends on addresses; None if nothing does."""
        return None
