"""The simple engine: Hugging Face modules with their own KV cache, one wave of requests at a time.

It works for every causal model on every device. Prompts shared by several samples are computed once, rows leave as
soon as they are done, and finished rows are cut out of the batch.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from verl.errors import RolloutError
from verl.rollout.base import Completion, Request, RolloutEngine
from verl.rollout.sampling import Written, draw
from verl.rollout.stops import ends, stop_ids


class _Row:
    """One response being written."""

    def __init__(self, request: Request, stops: frozenset[int] = frozenset()):
        self.request = request
        self.stops = stops
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.sampled: list[float] = []
        self.finish_reason: str | None = None

    def written(self) -> Written:
        """What its adjusted logits depend on."""
        ids = np.concatenate([self.request.prompt_ids, np.array(self.tokens, np.int64)])
        return Written(ids, len(self.tokens), self.stops)

    def completion(self) -> Completion:
        sampled = np.array(self.sampled, np.float32) if self.sampled else None
        return Completion(
            self.request.id,
            np.array(self.tokens, np.int64),
            np.array(self.log_probs, np.float32),
            self.finish_reason or "abort",
            sampled,
        )


class HFEngine(RolloutEngine):
    """Batched decoding over ``model``'s own modules.

    Args:
        model: a causal LM in eval mode (usually the twin of the training model, sharing its weights).
        eos_token_ids: ids that end a response unless ``ignore_eos``.
        max_num_seqs: rows decoded together; more requests wait for the next wave.
    """

    name = "hf"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: tuple[int, ...],
        max_num_seqs: int = 256,
    ):
        self.model, self.tokenizer = model, tokenizer
        self.eos = frozenset(eos_token_ids)
        self.max_num_seqs = max_num_seqs
        self.device = next(model.parameters()).device
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._waiting: deque[Request] = deque()
        self._finished: list[Completion] = []
        self._wave: _Wave | None = None

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if not len(request.prompt_ids):
                raise RolloutError(f"Request {request.id} has an empty prompt; there is nothing to continue.")
            self._waiting.append(request)

    @property
    def pending(self) -> int:
        return len(self._waiting) + len(self._finished) + (len(self._wave.rows) if self._wave else 0)

    def written(self) -> Iterator[tuple[str, list[int], list[float]]]:
        for row in self._wave.rows if self._wave else ():
            yield row.request.id, row.tokens, row.log_probs

    def weights_changed(self) -> None:
        if self._wave:
            raise RolloutError("The weights changed while responses were being written; abort them first.")

    def abort(self, ids: Iterable[str] | None = None) -> None:
        wanted = None if ids is None else set(ids)
        kept: deque[Request] = deque()
        for request in self._waiting:
            if wanted is None or request.id in wanted:
                self._finished.append(_Row(request).completion())
            else:
                kept.append(request)
        self._waiting = kept
        if self._wave:
            for row in self._wave.rows:
                if wanted is None or row.request.id in wanted:
                    row.finish_reason = "abort"
            self._collect()

    @torch.inference_mode()
    def poll(self) -> list[Completion]:
        if self._wave is None and self._waiting:
            self._start_wave()
        elif self._wave is not None:
            self._advance(self._wave, self._step(self._wave))
        finished, self._finished = self._finished, []
        return finished

    def _start_wave(self) -> None:
        """Prefill the distinct prompts of the next requests and sample the first token of each."""
        params = self._waiting[0].params
        rows: list[_Row] = []
        while self._waiting and len(rows) < self.max_num_seqs and self._waiting[0].params == params:
            rows.append(_Row(self._waiting.popleft(), stop_ids(params, self.eos)))
        keys = [row.request.prompt_ids.tobytes() for row in rows]
        distinct = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        prompts = {key: row.request.prompt_ids for key, row in zip(keys, rows, strict=True)}
        width = max(len(p) for p in prompts.values())
        ids = torch.zeros(len(distinct), width, dtype=torch.long)
        mask = torch.zeros(len(distinct), width, dtype=torch.long)
        for key, i in distinct.items():
            ids[i, width - len(prompts[key]) :] = torch.from_numpy(prompts[key])
            mask[i, width - len(prompts[key]) :] = 1
        wave = _Wave(rows, DynamicCache(config=self.model.config), mask.to(self.device), params)
        logits = self._forward(wave, ids.to(self.device), (mask.cumsum(1) - 1).clamp_min(0).to(self.device))
        wave.select(torch.tensor([distinct[key] for key in keys], device=self.device))
        self._wave = wave
        self._advance(wave, logits[[distinct[key] for key in keys]])

    def _step(self, wave: _Wave) -> torch.Tensor:
        """Feed the last token of every row; (rows, V) logits of the next."""
        last = torch.tensor([row.tokens[-1] for row in wave.rows], device=self.device)[:, None]
        wave.mask = torch.cat([wave.mask, wave.mask.new_ones(len(wave.rows), 1)], dim=1)
        return self._forward(wave, last, (wave.mask.sum(1) - 1)[:, None])

    def _forward(self, wave: _Wave, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        out = self.model(
            input_ids=ids,
            attention_mask=wave.mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: wave.cache},
        )
        return out.logits[:, -1]

    def _advance(self, wave: _Wave, logits: torch.Tensor) -> None:
        """Sample one token for every row, decide which rows are done, and hand those over."""
        seeds = torch.tensor([row.request.seed for row in wave.rows], dtype=torch.int32, device=self.device)
        positions = torch.tensor([len(row.tokens) for row in wave.rows], dtype=torch.int32, device=self.device)
        written = [row.written() for row in wave.rows] if wave.params.adjusted else ()
        tokens, log_probs, sampled = draw(logits, wave.params, seeds, positions, written)
        sampled_list = sampled.tolist() if sampled is not None else None
        for i, (row, token, log_prob) in enumerate(zip(wave.rows, tokens.tolist(), log_probs.tolist(), strict=True)):
            row.tokens.append(token)
            row.log_probs.append(log_prob)
            if sampled_list is not None:
                row.sampled.append(sampled_list[i])
            row.finish_reason = ends(self.tokenizer, row.tokens, row.request.params, row.stops)
        self._collect()

    def _collect(self) -> None:
        """Move finished rows out of the wave, with their cache entries."""
        wave = self._wave
        assert wave is not None
        alive = [i for i, row in enumerate(wave.rows) if row.finish_reason is None]
        if len(alive) == len(wave.rows):
            return
        self._finished += [row.completion() for row in wave.rows if row.finish_reason is not None]
        if not alive:
            self._wave = None
            return
        wave.keep(alive, self.device)


class _Wave:
    """Requests decoded together: their rows, cache and (rows, length) attention mask."""

    def __init__(self, rows: list[_Row], cache: DynamicCache, mask: torch.Tensor, params):
        self.rows, self.cache, self.mask, self.params = rows, cache, mask, params

    def select(self, index: torch.Tensor) -> None:
        """Let the cache and mask rows be those of ``index`` (rows may repeat)."""
        self.cache.batch_select_indices(index)
        self.mask = self.mask[index]

    def keep(self, alive: list[int], device: torch.device) -> None:
        self.select(torch.tensor(alive, device=device))
        self.rows = [self.rows[i] for i in alive]
