"""The native engine: continuous batching over a paged cache, on weights that are shared with training.

One :meth:`NativeEngine.poll` is schedule → run → take over: it computes prompt chunks or decodes, then hands out the
rows that are done.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.errors import RolloutError
from verl.metrics import Metrics
from verl.rollout.base import Completion, Request, RolloutEngine
from verl.rollout.native.admission import admit
from verl.rollout.native.blocks import BlockManager
from verl.rollout.native.cache import CacheShape
from verl.rollout.native.runner import Drawn, Runner
from verl.rollout.native.scheduler import Chunk, Scheduler
from verl.rollout.native.sequence import Sequence
from verl.rollout.native.settings import NativeSettings
from verl.rollout.stops import ends, stop_ids


class NativeEngine(RolloutEngine):
    """Generates with ``twin``, whose attention is switched to the paged cache.

    Args:
        twin: the rollout twin (:func:`verl.hybrid.make_twin`).
        eos_token_ids: ids that end a response unless ``ignore_eos``.
        settings: see :class:`NativeSettings`.

    Raises:
        NotQualified: the engine cannot drive the model; the message is the reason.
    """

    name = "native"
    take_at_once = 8 << 30
    """Bytes of cache up to which all that the requests may need is taken at once (a GPU: about 1 ms)."""

    def __init__(
        self,
        twin: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: tuple[int, ...],
        **settings,
    ):
        self.settings = NativeSettings(**settings)
        self.tokenizer = tokenizer
        self.eos = frozenset(eos_token_ids)
        shape = admit(twin, self.settings.page_size, lambda shape: self._make_runner(twin, shape))
        self.max_positions = _learned_positions(twin)
        self.runner = self._make_runner(twin, shape)
        self.blocks = BlockManager(0, shape.page_size)
        self.scheduler = self._new_scheduler()
        self._finished: list[Sequence] = []
        self._submitted = 0
        self._room_for = -1  # how many requests were submitted when the cache last had room for all of them
        self.seconds = {"prefill": 0.0, "decode": 0.0, "take": 0.0, "give": 0.0}
        self.tokens = {"prefill": 0, "decode": 0}  # computed so far: prompt tokens, decoded tokens
        self.preemptions = 0  # since they were asked for
        self.least: Callable[[int], int] = lambda pages: pages  # of all ranks that generate together

    def _make_runner(self, twin: PreTrainedModel, shape: CacheShape) -> Runner:
        if shape.device.type == "cuda":
            from verl.rollout.native.graphs import GraphRunner

            return GraphRunner(twin, shape, self.settings)
        return Runner(twin, shape, self.settings)

    def _new_scheduler(self) -> Scheduler:
        limits = self.settings
        return Scheduler(self.blocks, limits.max_num_seqs, limits.max_num_batched_tokens, self.runner.lookahead)

    # the interface

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            sequence = Sequence(request, self._submitted)
            self._check(sequence)
            sequence.stops = stop_ids(request.params, self.eos)
            self.scheduler.add(sequence)
            self._submitted += 1

    @property
    def pending(self) -> int:
        return len(self.scheduler) + len(self._finished)

    def abort(self, ids: Iterable[str] | None = None) -> None:
        self._finished += self.scheduler.abort(None if ids is None else set(ids))

    def written(self) -> Iterator[tuple[str, list[int], list[float]]]:
        for sequence in self.scheduler.running:
            yield sequence.request.id, sequence.tokens, sequence.log_probs

    def weights_changed(self) -> None:
        if self.scheduler.active:
            raise RolloutError("The weights changed while responses were being written; abort them first.")
        self.blocks.forget()
        self.runner.weights_changed()

    def release(self) -> None:
        """Give back the cache. The next :meth:`poll` takes memory for it again."""
        if self.scheduler.active:
            return
        started = time.perf_counter()
        self.runner.release()
        self.seconds["give"] += time.perf_counter() - started
        self._room_for = -1
        self.blocks = BlockManager(0, self.settings.page_size)
        waiting = self.scheduler.waiting
        self.scheduler = self._new_scheduler()
        self.scheduler.waiting = waiting

    def take_metrics(self) -> Metrics:
        """``timing_s/kv_take`` and ``timing_s/kv_give``: seconds to take the cache's memory, and to give it back before
        that (apart from the weights' ``timing_s/reshard``); ``rollout/preemptions``."""
        metrics = Metrics()
        for name in ("take", "give"):
            if self.seconds[name]:
                metrics.add(f"timing_s/kv_{name}", self.seconds[name], reduce="max")
                self.seconds[name] = 0.0
        if self.preemptions:
            metrics.add("rollout/preemptions", float(self.preemptions), reduce="sum")
            self.preemptions = 0
        return metrics

    @torch.inference_mode()
    def poll(self) -> list[Completion]:
        if len(self.scheduler):
            self._ensure_cache()
            started, preempted = time.perf_counter(), self.scheduler.preemptions
            if chunks := self.scheduler.chunks():
                self._prefill(chunks)
                kind, done = "prefill", sum(c.length for c in chunks)
            else:
                kind, done = "decode", self._decode()
            self.seconds[kind] += time.perf_counter() - started
            self.tokens[kind] += done
            self.preemptions += self.scheduler.preemptions - preempted
        finished, self._finished = self._finished, []
        return [sequence.completion() for sequence in finished]

    # the work

    def _prefill(self, chunks: list[Chunk]) -> None:
        logits = self.runner.prefill(chunks)
        rows, index, copies = [], [], []
        for chunk in chunks:
            self.scheduler.computed(chunk)
        for k, chunk in enumerate(c for c in chunks if c.last):
            known = len(self.scheduler.running)
            copies += self.scheduler.fork(chunk.sequence)
            ready = self.scheduler.running[known:]
            rows += ready
            index += [k] * len(ready)
        self.runner.cache.copy_pages(copies)
        if rows:
            if len(rows) > len(logits):
                logits = logits[torch.tensor(index, device=logits.device)]
            self._take_over(rows, self.runner.sample(rows, logits))

    def _decode(self) -> int:
        rows = self.runner.arranged(self.scheduler.make_room())
        return self._take_over(rows, self.runner.decode(rows, not self.scheduler.waiting)) if rows else 0

    def _take_over(self, rows: list[Sequence], drawn: Drawn) -> int:
        """Append the new tokens up to each row's end, and take the rows that are done out of the batch.

        Returns:
            How many tokens were new.
        """
        total = 0
        tokens, log_probs, sampled = drawn.tokens.T.tolist(), drawn.log_probs.T.tolist(), drawn.sampled.T
        filtered = ~np.isnan(sampled[:, 0])
        for i, row in enumerate(rows):
            count = int(drawn.counts[i])
            known = len(row.tokens)
            row.tokens += tokens[i][:count]
            self._find_end(row, known)
            count = len(row.tokens) - known
            total += count
            row.log_probs += log_probs[i][:count]
            if filtered[i]:
                row.sampled += sampled[i, :count].tolist()
        self._finished += self.scheduler.retire()
        return total

    def _find_end(self, row: Sequence, known: int) -> None:
        """Set the finish reason, and cut the row after the token that ends it. ``known`` tokens were looked at."""
        params = row.request.params
        goes_on = len(row.tokens) < params.max_tokens and not params.stop
        if goes_on and row.stops.isdisjoint(row.tokens[known:]):
            return
        for i in range(known, min(len(row.tokens), params.max_tokens)):
            row.finish_reason = ends(self.tokenizer, row.tokens[: i + 1], params, row.stops)
            if row.finish_reason is not None:
                del row.tokens[i + 1 :]
                return

    # memory

    def _check(self, sequence: Sequence) -> None:
        request = sequence.request
        if not len(sequence.prompt):
            raise RolloutError(f"Request {request.id} has an empty prompt; there is nothing to continue.")
        total = len(sequence.prompt) + request.params.max_tokens
        if self.max_positions is not None and total > self.max_positions:
            raise RolloutError(
                f"Request {request.id} may reach {total} tokens, but the model has {self.max_positions} positions; "
                "shorten the prompt or lower max_tokens."
            )
        self._check_room(sequence, self._most_pages())

    def _check_room(self, sequence: Sequence, most: int | None) -> None:
        total = len(sequence.prompt) + sequence.request.params.max_tokens
        if most is not None and self.blocks.pages_for(total) > most:
            raise RolloutError(
                f"Request {sequence.request.id} may need {total} tokens, but the cache holds "
                f"{most * self.blocks.page_size}; lower max_tokens or give the cache more memory."
            )

    def _most_pages(self) -> int | None:
        """Pages that the cache may have; None where only the memory free at the first :meth:`poll` will tell."""
        if self.settings.max_pages is not None:
            return self.settings.max_pages
        if self.runner.device.type == "cuda":
            return self.runner.planned_pages
        return max(1, self.settings.host_cache_bytes // self.runner.cache.shape.page_bytes)

    def _ensure_cache(self) -> None:
        """Let the cache have room for the work at hand, as far as its limit goes.

        What the requests may need at most is taken at once where that is little. A large cache that can grow takes
        what the next work needs, and half as much again each time that this is not enough.
        """
        if self._room_for == self._submitted:
            return
        have, most = self.runner.cache.num_pages, self._most_pages()
        if most is None:
            most = self.least(self._pages_of_free_memory())
            for sequence in self.scheduler.waiting:
                self._check_room(sequence, most)
        needed = min(self._pages_needed(), most)
        pages = needed
        if self.runner.grows and pages * self.runner.cache.shape.page_bytes > self.take_at_once:
            wanted = self._pages_wanted()
            pages = min(needed, max(wanted, have + have // 2)) if wanted > have else have
        if pages > have:
            started = time.perf_counter()
            self.runner.allocate(pages, most)
            self.blocks.grow(self.runner.cache.num_pages)
            self.seconds["take"] += time.perf_counter() - started
        if self.runner.cache.num_pages >= needed:
            self._room_for = self._submitted

    def _pages_wanted(self) -> int:
        """Pages in use after the next :meth:`poll` at most, and one more for each sequence then at work."""
        s, blocks = self.scheduler, self.blocks
        pages, rows = blocks.used, len(s.running)
        for row in s.running:
            ahead = row.length + min(s.lookahead, row.remaining)
            pages += max(0, blocks.pages_for(ahead) - len(row.pages))
        for leader in s.prefilling:
            rows += 1 + len(leader.followers)
            pages += (1 + len(leader.followers)) * blocks.pages_for(s.lookahead + 1)
        before = None
        for sequence in itertools.islice(s.waiting, max(0, s.max_num_seqs - rows)):
            same = before is not None and s.same_prompt(before, sequence)
            pages += 1 if same else blocks.pages_for(sequence.length + 1)
            rows, before = rows + 1, sequence
        return pages + rows

    def _pages_needed(self) -> int:
        """Pages for the ``max_num_seqs`` longest sequences at hand."""
        s = self.scheduler
        everyone = [*s.waiting, *s.running, *(x for leader in s.prefilling for x in (leader, *leader.followers))]
        totals = sorted((len(x.prompt) + x.request.params.max_tokens for x in everyone), reverse=True)
        return sum(self.blocks.pages_for(total) for total in totals[: self.settings.max_num_seqs])

    def _pages_of_free_memory(self) -> int:
        device = self.runner.device
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
        pages = int(free * self.settings.gpu_memory_utilization) // self.runner.cache.shape.page_bytes
        if pages < 1:
            raise RolloutError(
                f"The GPU has {free >> 20} MiB free, and gpu_memory_utilization="
                f"{self.settings.gpu_memory_utilization} of that does not hold a page of the cache; free some memory."
            )
        return pages


def _learned_positions(twin: PreTrainedModel) -> int | None:
    """How many positions a model without rotary embeddings has: beyond them it has no embedding to look up."""
    config = twin.config.get_text_config()
    rotary = any("rotary" in name or "rope" in name for name, _ in twin.named_modules()) or any(
        getattr(config, name, None) is not None for name in ("rope_parameters", "rope_theta")
    )
    return None if rotary else getattr(config, "max_position_embeddings", None)
