"""Decoding on a CUDA device: captured steps, sampling and stop tests on the device, a look every few steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from verl.errors import RolloutError
from verl.notices import notice
from verl.rollout.native.arena import Arena
from verl.rollout.native.attention import Layout
from verl.rollout.native.cache import CacheShape
from verl.rollout.native.layers import CompiledLayers
from verl.rollout.native.layouts import GatherLayout, page_table
from verl.rollout.native.row_sampling import RowSampling, draw_per_row
from verl.rollout.native.runner import Drawn, Runner
from verl.rollout.native.scheduler import Chunk
from verl.rollout.native.sequence import Sequence
from verl.rollout.native.settings import NativeSettings
from verl.rollout.native.state import DecodeState

COMPILE_PAYS_AFTER = 6000
"""Planned decode steps from which compiling the layers (about 10 s) is repaid, at 1 to 2 ms saved a step."""


def bucket_of(rows: int) -> int:
    """The batch size that ``rows`` rows are padded to: 8, 16, 32, 48, 64, 96, 128, 192, 256, then steps of 128."""
    for size in (8, 16, 32, 48, 64, 96, 128, 192, 256):
        if rows <= size:
            return size
    return -(-rows // 128) * 128


class GraphRunner(Runner):
    """A runner whose decode steps are CUDA graphs, one for each batch-size bucket, in one memory pool."""

    def __init__(self, twin: PreTrainedModel, shape: CacheShape, settings: NativeSettings):
        super().__init__(twin, shape)
        self.settings = settings
        self.lookahead = settings.window
        self.vocabulary = twin.config.get_text_config().vocab_size
        self.triton = settings.triton and triton_works(shape)
        self.capturing = settings.graphs
        self.layers = CompiledLayers(twin, shape.layers)
        self.arena: Arena | None = None
        self.state: DecodeState | None = None
        self.capture_seconds = 0.0
        self.steps = 0
        self._pages = 0
        self._last_rows: list[Sequence] = []
        self._last_bucket = 0
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._stream = torch.cuda.Stream(shape.device)

    # layouts

    def prefill_layout(self, chunks: list[Chunk]) -> Layout:
        if not self.triton:
            return super().prefill_layout(chunks)
        from verl.rollout.native.device_layouts import TritonPrefillLayout

        return TritonPrefillLayout(self.cache, chunks)

    def decode_layout(self, table: torch.Tensor, positions: torch.Tensor) -> Layout:
        if not self.triton:
            return GatherLayout(self.cache, table.long(), positions)
        from verl.rollout.native.device_layouts import TritonDecodeLayout

        return TritonDecodeLayout(self.cache, table, positions)

    def decode_logits(self, rows: list[Sequence]) -> torch.Tensor:
        ids = torch.tensor([s.last_token for s in rows], device=self.device)
        positions = torch.tensor([s.length - 1 for s in rows], device=self.device)
        width = max(len(s.pages) for s in rows)
        table = torch.from_numpy(page_table([s.pages for s in rows], width).astype(np.int32)).to(self.device)
        places = torch.arange(len(rows), device=self.device)
        return self.forward(ids, positions, self.decode_layout(table, positions), places)

    # sampling and decoding

    def sample(self, rows: list[Sequence], logits: torch.Tensor) -> Drawn:
        sampling = RowSampling.empty(len(rows), self.device)
        sampling.fill(rows, logits.shape[1])
        tokens, log_probs, sampled = draw_per_row(logits, sampling, filtered=_filtered(rows), triton=self.triton)
        counts = np.ones(len(rows), np.int64)
        return Drawn(tokens[None].cpu().numpy(), log_probs[None].cpu().numpy(), sampled[None].cpu().numpy(), counts)

    def decode(self, rows: list[Sequence]) -> Drawn:
        """Up to ``window`` tokens for every row."""
        steps = min(self.settings.window, max(row.remaining for row in rows))
        bucket, filtered = bucket_of(len(rows)), _filtered(rows)
        state = self._state_for(rows)
        self._plan(rows)
        captured = len(self._graphs)
        graph = self._graph(bucket, filtered) if self.capturing else None
        # where the same rows go on, the device knows all but their new pages (a capture works on the same tensors)
        if len(self._graphs) == captured and rows == self._last_rows and bucket == self._last_bucket:
            state.resume(rows, bucket)
        else:
            state.fill(rows, bucket, self.vocabulary)
        self._last_rows, self._last_bucket = list(rows), bucket
        for _ in range(steps):
            if graph is not None:
                graph.replay()
            else:
                self._step(bucket, filtered)
        self.steps += steps
        return state.read(len(rows), steps)

    def _step(self, bucket: int, filtered: bool) -> None:
        state = self.state
        assert state is not None
        ids, positions, table = state.tokens[:bucket], state.positions[:bucket], state.table[:bucket]
        keep = state.places[:bucket]
        logits = self.forward(ids, positions, self.decode_layout(table, positions), keep)
        sampling = state.sampling.first(bucket)
        state.advance(bucket, *draw_per_row(logits, sampling, filtered=filtered, triton=self.triton))

    def _state_for(self, rows: list[Sequence]) -> DecodeState:
        """Static tensors that hold ``rows``. Bigger ones make the captured graphs useless."""
        size = bucket_of(max(len(rows), 1))
        width = self.blocks_wide(max(len(s.prompt) + s.request.params.max_tokens for s in rows))
        stops = max((len(s.stops) for s in rows), default=0)
        state = self.state
        if state is None or not state.holds(size, width, stops):
            self._drop_graphs()
            if state is not None:
                size, width, stops = max(size, state.size), max(width, state.width), max(stops, state.stop_width)
            size = max(size, min(bucket_of(self.settings.max_num_seqs), 1024))
            self._last_rows = []
            self.state = DecodeState(size, width, max(8, stops), self.settings.window, self.device)
        assert self.state is not None
        return self.state

    def blocks_wide(self, tokens: int) -> int:
        """Pages of the table for sequences of ``tokens`` tokens: a power of two, so that it seldom grows."""
        pages = -(-tokens // self.cache.shape.page_size)
        return max(8, 1 << (pages - 1).bit_length())

    # graphs

    def _plan(self, rows: list[Sequence]) -> None:
        """Switch the compiled layers on where the settings, or the steps that are planned, say so."""
        if self.layers.on or self.settings.compile == "off" or not self.triton:
            return
        ahead = max(row.remaining for row in rows)
        if self.settings.compile == "on" or self.steps + ahead >= COMPILE_PAYS_AFTER:
            self._drop_graphs()
            self.layers.on = True

    def _graph(self, bucket: int, filtered: bool) -> torch.cuda.CUDAGraph | None:
        """The captured step; None if the model's forward looks at values on the host, which no graph can."""
        graph = self._graphs.get((bucket, filtered))
        if graph is None:
            started = time.perf_counter()
            try:
                graph = self._graphs[bucket, filtered] = self._capture(bucket, filtered)
            except torch.cuda.OutOfMemoryError:
                raise
            except RuntimeError as problem:
                reason = str(problem).strip().splitlines()[0]
                model = type(self.twin).__name__
                notice(f"Decode steps of {model} run without CUDA graphs, as capturing one failed: {reason}")
                self.capturing = False
                self._last_rows = []
            self.capture_seconds += time.perf_counter() - started
        return graph

    def _capture(self, bucket: int, filtered: bool) -> torch.cuda.CUDAGraph:
        """Run the step twice on rows that own nothing, then record it.

        The second time any wait of the host is an error: found here it costs nothing, while a recording that breaks
        off leaves torch's allocator unable to give memory back.
        """
        assert self.state is not None
        self.state.clear(bucket)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with self.layers.in_use():
            with torch.cuda.stream(self._stream):
                self._step(bucket, filtered)
                self.state.step_index.zero_()
                with _no_waiting():
                    self._step(bucket, filtered)
                self.state.step_index.zero_()
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                self._step(bucket, filtered)
        return graph

    def _drop_graphs(self) -> None:
        if self._graphs:
            torch.cuda.synchronize(self.device)
        self._graphs = {}
        self._pool = None

    # memory

    @property
    def planned_pages(self) -> int | None:
        """Pages of the addresses that captured graphs know."""
        return self._pages if self.arena is not None else None

    def allocate(self, num_pages: int) -> None:
        shape = self.cache.shape
        if self.arena is None or self.planned_pages != num_pages:
            self._drop_graphs()
            self.cache.release()
            if self.arena is not None:
                self.arena.close()
            self.arena, self._pages = None, num_pages
            try:
                self.arena = Arena((num_pages + 1) * shape.page_bytes, self.device)
            except (RolloutError, OSError) as problem:
                notice(f"The rollout cache cannot keep its address ({problem}): graphs are captured anew each step.")
        if self.arena is None:
            self.cache.allocate(num_pages)
            return
        self._map(self.arena)
        count = (num_pages + 1) * shape.page_bytes // shape.dtype.itemsize
        flat = self.arena.tensor().view(shape.dtype)[:count]
        self.cache.data = flat.view(shape.layers, 2, num_pages + 1, shape.page_size, shape.heads, shape.size)
        self.cache.data[:, :, 0].zero_()
        if not self.triton:
            self.cache.data.zero_()  # gathered places that are masked must still be finite

    @staticmethod
    def _map(arena: Arena) -> None:
        """Put memory behind the cache; what torch keeps for later goes back to the GPU first if need be."""
        try:
            arena.map()
        except RolloutError:
            torch.cuda.empty_cache()
            try:
                arena.map()
            except RolloutError as problem:
                raise RolloutError(
                    f"The GPU has no room for the rollout cache of {arena.size >> 20} MiB ({problem}); "
                    "lower rollout.gpu_memory_utilization."
                ) from problem

    def release(self) -> None:
        self._last_rows = []
        self.cache.release()
        if self.arena is not None:
            self.arena.unmap()
        else:
            self._drop_graphs()


@contextlib.contextmanager
def _no_waiting() -> Iterator[None]:
    """Within this context an operation that makes the host wait for the device raises RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _filtered(rows: list[Sequence]) -> bool:
    return any(row.request.params.filtered for row in rows)


def triton_works(shape: CacheShape) -> bool:
    """The kernels run here: compute capability 7.0, triton installed, up to 256 numbers a head, not float64."""
    if torch.cuda.get_device_capability(shape.device) < (7, 0) or shape.dtype == torch.float64 or shape.size > 256:
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        notice("The package triton is not installed: rollouts gather the cache with torch's own operations.")
        return False
    return True
