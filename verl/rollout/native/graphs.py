"""Decoding on a CUDA device: captured steps, sampling and stop tests on the device, a look every few steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from verl.errors import RolloutError
from verl.hardware.launching import launches, or_without
from verl.notices import notice
from verl.rollout.native.arena import Arena
from verl.rollout.native.attention import Layout
from verl.rollout.native.cache import CacheShape
from verl.rollout.native.device_linears import DeviceLinears
from verl.rollout.native.layers import CompiledLayers
from verl.rollout.native.layouts import GatherLayout, page_table
from verl.rollout.native.row_sampling import ADJUSTED, Adjusting, RowSampling, draw_per_row, kind_of
from verl.rollout.native.runner import Drawn, Runner
from verl.rollout.native.scheduler import Chunk
from verl.rollout.native.sequence import Sequence
from verl.rollout.native.settings import NativeSettings
from verl.rollout.native.state import DecodeState, Taken

T = TypeVar("T")

KERNELS = "the rollout"
COMPILE_PAYS_AFTER = 6000
"""Planned decode steps from which compiling the layers (about 10 s) is repaid, at 1 to 2 ms saved a step."""


def bucket_of(rows: int) -> int:
    """The batch size that ``rows`` rows are padded to: 8, 16, 32, 48, 64, 96, 128, 192, 256, then steps of 128."""
    for size in (8, 16, 32, 48, 64, 96, 128, 192, 256):
        if rows <= size:
            return size
    return -(-rows // 128) * 128


@dataclass
class _Window:
    """Steps that the device was given, and where their results come."""

    rows: list[Sequence]
    steps: int
    taken: Taken

    def holds_any(self, rows: list[Sequence]) -> bool:
        mine = set(map(id, self.rows))
        return any(id(row) in mine for row in rows)

    def read(self, rows: list[Sequence]) -> Drawn:
        """Wait for the results of ``rows``; those that are not in the window have none."""
        drawn = self.taken.read()
        if rows == self.rows:
            return drawn
        place = {id(row): i for i, row in enumerate(self.rows)}
        index = np.array([place.get(id(row), 0) for row in rows])
        counts = np.where([id(row) in place for row in rows], drawn.counts[index], 0)
        return Drawn(drawn.tokens[:, index], drawn.log_probs[:, index], drawn.sampled[:, index], counts)


class GraphRunner(Runner):
    """A runner whose decode steps are CUDA graphs, one for each batch-size bucket, in one memory pool."""

    grows = True

    def __init__(self, twin: PreTrainedModel, shape: CacheShape, settings: NativeSettings):
        super().__init__(twin, shape, settings)
        self.lookahead = settings.window * (2 if settings.overlap else 1)
        self.vocabulary = twin.config.get_text_config().vocab_size
        self._heads = twin.config.get_text_config().num_attention_heads
        self.triton = settings.triton and triton_works(shape)
        self.capturing = settings.graphs
        self.layers = CompiledLayers(twin, shape.layers)
        self.joined = DeviceLinears(twin, shape.device)
        self.arena: Arena | None = None
        self.state: DecodeState | None = None
        self.capture_seconds = 0.0
        self.steps = 0
        self._pages = 0
        self._last_rows: list[Sequence] = []
        self._last_bucket = 0
        self._begun: _Window | None = None
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    # Triton kernels, as far as this GPU runs them

    def _with_kernels(self, work: Callable[[], T]) -> T:
        """``work()``, with torch's own operations if the GPU turns out to be too small for a kernel."""
        instead = "pages are gathered for SDPA"
        return or_without(KERNELS, self.device, work, instead=instead, switch=self._do_without_triton)

    def _do_without_triton(self) -> None:
        self.triton = self.layers.on = False
        self._last_rows, self._begun = [], None
        self._drop_graphs()
        if self.cache.data is not None:  # gathered places that are masked must be finite
            torch.nan_to_num_(self.cache.data[:, :, : self.cache.num_pages + 1], 0.0, 0.0, 0.0)

    # layouts

    def prefill_layout(self, chunks: list[Chunk]) -> Layout:
        if not self.triton:
            return super().prefill_layout(chunks)
        from verl.rollout.native.device_layouts import TritonPrefillLayout

        return TritonPrefillLayout(self.cache, chunks)

    def decode_layout(self, table: torch.Tensor, positions: torch.Tensor, sharing: torch.Tensor) -> Layout:
        if not self.triton:
            return GatherLayout(self.cache, table.long(), positions)
        from verl.rollout.native.device_layouts import TritonDecodeLayout

        return TritonDecodeLayout(self.cache, table, positions, sharing)

    def _sharing(self, rows: list[Sequence]) -> np.ndarray:
        """Which rows read the pages of a prompt together, see :func:`sharing_of`."""
        if not self.triton:
            return np.zeros((2, len(rows)), np.int32)
        from verl.rollout.native.device_layouts import sharing_of
        from verl.rollout.native.kernels import neighbours

        return sharing_of(rows, self.cache.shape.page_size, neighbours(self._heads // self.cache.shape.heads))

    def weights_changed(self) -> None:
        super().weights_changed()
        self._begun = None
        self.joined.weights_changed()

    def _join_linears(self) -> None:
        if not self.joined.refresh():
            self._drop_graphs()  # they may read the joined weights

    def prefill(self, chunks: list[Chunk]) -> torch.Tensor:
        with self.joined.apart():
            return self._with_kernels(lambda: super(GraphRunner, self).prefill(chunks))

    def decode_logits(self, rows: list[Sequence]) -> torch.Tensor:
        return self._with_kernels(lambda: self._decode_logits(rows))

    def _decode_logits(self, rows: list[Sequence]) -> torch.Tensor:
        self._join_linears()
        ids = torch.tensor([s.last_token for s in rows], device=self.device)
        positions = torch.tensor([s.length - 1 for s in rows], device=self.device)
        width = max(len(s.pages) for s in rows)
        table = torch.from_numpy(page_table([s.pages for s in rows], width).astype(np.int32)).to(self.device)
        places = torch.arange(len(rows), device=self.device)
        sharing = torch.from_numpy(self._sharing(rows)).to(self.device)
        return self.forward(ids, positions, self.decode_layout(table, positions, sharing), places)

    # sampling and decoding

    def sample(self, rows: list[Sequence], logits: torch.Tensor) -> Drawn:
        return self._with_kernels(lambda: self._sample(rows, logits))

    def _sample(self, rows: list[Sequence], logits: torch.Tensor) -> Drawn:
        sampling = RowSampling.empty(len(rows), self.device)
        sampling.fill(rows, logits.shape[1])
        kind = kind_of(rows)
        adjusting = Adjusting.of(rows, logits.shape[1], self.device) if kind == ADJUSTED else None
        tokens, log_probs, sampled = draw_per_row(logits, sampling, kind=kind, triton=self.triton, adjusting=adjusting)
        counts = np.ones(len(rows), np.int64)
        return Drawn(tokens[None].cpu().numpy(), log_probs[None].cpu().numpy(), sampled[None].cpu().numpy(), counts)

    def decode(self, rows: list[Sequence], ahead: bool = False) -> Drawn:
        """Up to ``window`` tokens for every row.

        With ``ahead`` the device gets the next window of the same rows before the host looks at the results of this
        one; they are handed out by the next call. Rows that end meanwhile write on in pages that are given back:
        whoever gets those writes to them later in the device's order of work.
        """
        window, self._begun = self._begun, None
        if window is None or not window.holds_any(rows):
            window = self._with_kernels(lambda: self._launch(rows))
        if ahead and self.settings.overlap:
            self._begun = self._launch_next(window, rows)
        return window.read(rows)

    def _launch(self, rows: list[Sequence]) -> _Window:
        """Begin a window of steps."""
        bucket, kind = bucket_of(len(rows)), kind_of(rows)
        self._join_linears()
        state = self._state_for(rows)
        self._plan(rows)
        captured = len(self._graphs)
        if kind == ADJUSTED:
            state.watch_seen(self.vocabulary)
        if self.capturing:
            self._graph(bucket, kind)
        # where the same rows go on, the device knows all but their new pages (a capture works on the same tensors)
        if len(self._graphs) == captured and rows == self._last_rows and bucket == self._last_bucket:
            state.resume(rows, bucket)
        else:
            state.fill(rows, bucket, self.vocabulary, self._sharing(rows))
        self._last_rows, self._last_bucket = list(rows), bucket
        return self._enqueue(rows, min(self.settings.window, max(row.remaining for row in rows)))

    def _launch_next(self, window: _Window, rows: list[Sequence]) -> _Window | None:
        """Begin the window after ``window``, if it holds exactly ``rows`` and some may go on."""
        left = max(row.remaining for row in rows) - window.steps
        bucket, kind = bucket_of(len(rows)), kind_of(rows)
        ready = (bucket, kind) in self._graphs or not self.capturing
        if left <= 0 or window.rows != rows or rows != self._last_rows or bucket != self._last_bucket or not ready:
            return None
        assert self.state is not None
        self.state.resume(rows, bucket)
        return self._enqueue(rows, min(self.settings.window, left))

    def _enqueue(self, rows: list[Sequence], steps: int) -> _Window:
        bucket, kind = bucket_of(len(rows)), kind_of(rows)
        graph = self._graphs.get((bucket, kind)) if self.capturing else None
        for _ in range(steps):
            if graph is not None:
                graph.replay()
            else:
                self._step(bucket, kind)
        self.steps += steps
        assert self.state is not None
        return _Window(list(rows), steps, self.state.take(len(rows), steps))

    def _step(self, bucket: int, kind: int) -> None:
        state = self.state
        assert state is not None
        ids, positions, table = state.tokens[:bucket], state.positions[:bucket], state.table[:bucket]
        keep, sharing = state.places[:bucket], state.sharing[:, :bucket]
        logits = self.forward(ids, positions, self.decode_layout(table, positions, sharing), keep)
        sampling = state.sampling.first(bucket)
        adjusting = state.adjusting(bucket) if kind == ADJUSTED else None
        drawn = draw_per_row(logits, sampling, kind=kind, triton=self.triton, adjusting=adjusting)
        if adjusting is not None:
            adjusting.seen.scatter_(1, drawn[0][:, None], True)
        state.advance(bucket, *drawn)

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

    def _graph(self, bucket: int, kind: int) -> torch.cuda.CUDAGraph | None:
        """The captured step; None if the model's forward looks at values on the host, which no graph can."""
        graph = self._graphs.get((bucket, kind))
        if graph is None:
            started = time.perf_counter()
            try:
                graph = self._graphs[bucket, kind] = self._capture(bucket, kind)
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

    def _capture(self, bucket: int, kind: int) -> torch.cuda.CUDAGraph:
        """Run the step twice on rows that own nothing, then record it.

        The second time any wait of the host is an error: found here it costs nothing, while a recording that breaks
        off leaves torch's allocator unable to give memory back.
        """
        assert self.state is not None
        self.state.clear(bucket)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with self.layers.in_use():
            with torch.cuda.stream(self._stream):
                self._step(bucket, kind)
                self.state.step_index.zero_()
                with _no_waiting():
                    self._step(bucket, kind)
                self.state.step_index.zero_()
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                self._step(bucket, kind)
        return graph

    def _drop_graphs(self) -> None:
        if self._graphs:
            torch.cuda.synchronize(self.device)
        self._graphs = {}
        self._pool = None

    # memory

    @property
    def planned_pages(self) -> int | None:
        """Pages of the addresses that captured graphs know; None where the next :meth:`allocate` is free to choose."""
        return self._pages if self.arena is not None or self.cache.num_pages else None

    def allocate(self, num_pages: int, most: int) -> None:
        """Addresses for ``most`` pages, and memory for the first ``num_pages`` of them or somewhat more.

        Raises:
            RolloutError: the GPU has no such memory.
        """
        shape = self.cache.shape
        if self.planned_pages != most:
            self._plan_addresses(most)
        if self.arena is None:
            if not self.cache.num_pages:
                self.cache.allocate(most)
            return
        before = self.cache.num_pages
        self._map(self.arena, (num_pages + 1) * shape.plane_bytes)
        if self.cache.data is None:
            self.cache.data = planes_of(self.arena.tensor(), shape, most, self.arena.pitch)
            self.cache.data[:, :, 0].zero_()
        self.cache.num_pages = min(most, self.arena.mapped // shape.plane_bytes - 1)
        if not self.triton:  # gathered places that are masked must still be finite
            self.cache.data[:, :, before + 1 : self.cache.num_pages + 1].zero_()

    def _plan_addresses(self, most: int) -> None:
        shape = self.cache.shape
        self._drop_graphs()
        self.cache.release()
        if self.arena is not None:
            self.arena.close()
        self.arena, self._pages = None, most
        try:
            self.arena = Arena(2 * shape.layers, (most + 1) * shape.plane_bytes, self.device)
        except (RolloutError, OSError) as problem:
            notice(f"The rollout cache cannot keep its address ({problem}): graphs are captured anew each step.")

    @staticmethod
    def _map(arena: Arena, size: int) -> None:
        """Put memory behind the cache; what torch keeps for later goes back to the GPU first if need be."""
        try:
            arena.map(size)
        except RolloutError:
            torch.cuda.empty_cache()
            try:
                arena.map(size)
            except RolloutError as problem:
                raise RolloutError(
                    f"The GPU has no room for {arena.planes * size >> 20} MiB of rollout cache ({problem}); "
                    "lower rollout.max_num_seqs or the response length, or free some memory."
                ) from problem

    def release(self) -> None:
        self._last_rows, self._begun = [], None
        super().release()
        self.joined.release()
        if self.arena is not None:
            self.arena.unmap()
        else:
            self._drop_graphs()


def planes_of(flat: torch.Tensor, shape: CacheShape, pages: int, pitch: int) -> torch.Tensor:
    """(layers, 2, pages + 1, page_size, G, D) over uint8 memory whose keys and values of a layer lie ``pitch`` bytes
    apart."""
    page = shape.page_size * shape.heads * shape.size
    plane = pitch // shape.dtype.itemsize
    size = (shape.layers, 2, pages + 1, shape.page_size, shape.heads, shape.size)
    return flat.view(shape.dtype).as_strided(size, (2 * plane, plane, page, shape.heads * shape.size, shape.size, 1))


@contextlib.contextmanager
def _no_waiting() -> Iterator[None]:
    """Within this context an operation that makes the host wait for the device raises RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def triton_works(shape: CacheShape) -> bool:
    """The kernels run here: compute capability 7.0, triton installed, up to 256 numbers a head, not float64."""
    if not launches(KERNELS, shape.device):
        return False
    if torch.cuda.get_device_capability(shape.device) < (7, 0) or shape.dtype == torch.float64 or shape.size > 256:
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        notice("The package triton is not installed: rollouts gather the cache with torch's own operations.")
        return False
    return True
