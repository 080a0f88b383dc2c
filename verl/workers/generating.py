"""What the policy and a rollout with weights of its own share: generating with an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.hybrid import OneDeviceHybrid
from verl.models.loading import stop_token_ids
from verl.protocol import DataProto
from verl.rollout.base import SamplingParams
from verl.rollout.multi_turn import Conversations
from verl.rollout.registry import make_engine
from verl.rollout.rows import make_requests, stream_rows, with_metrics
from verl.single_controller import Dispatch, Worker, register
from verl.workers.settings import ActorSettings


class Generates(Worker):
    """A worker whose ``hybrid`` has a rollout engine; None: it was told not to generate."""

    settings: ActorSettings
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    hybrid: OneDeviceHybrid | None
    conversations: Conversations | None

    def _make_conversations(self) -> Conversations | None:
        several = self.settings.rollout.multi_turn
        return Conversations(several, self.tokenizer) if several else None

    def close(self) -> None:
        """End the rollout engine's process, if it has one."""
        if self.hybrid is not None:
            self.hybrid.close()

    def _make_rollout_engine(self, twin):
        rollout = self.settings.rollout
        return make_engine(
            rollout.engine,
            twin,
            self.tokenizer,
            stop_token_ids(self.model, self.tokenizer),
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            remote=rollout.remote,
        )

    @register(Dispatch.DP_COMPUTE_PROTO, mode="rollout", streaming=True)
    def generate(self, batch: DataProto, *, n: int, sampling: SamplingParams, prompt_width: int) -> Iterator[DataProto]:
        """n responses for every prompt row (``prompt_ids``, ``uid``); pieces of sample rows as they finish."""
        assert self.hybrid is not None, "another group generates"
        rollout = self.settings.rollout
        requests = make_requests(batch, n, sampling, rollout.seed)
        shape = {
            "prompt_width": prompt_width,
            "response_width": max(rollout.response_width, sampling.max_tokens),
            "pad_id": int(self.tokenizer.pad_token_id),
        }
        with self.hybrid.rollout_mode() as engine:
            if self.conversations is None:
                pieces = stream_rows(engine, requests, **shape)
            else:
                pieces = self.conversations.stream(engine, requests, batch, rollout.seed, shape)
            with contextlib.closing(pieces):
                for piece in pieces:
                    yield with_metrics(with_metrics(piece, engine.take_metrics()), self.hybrid.take_metrics())
