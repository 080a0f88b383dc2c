"""Between prompt rows, requests and sample rows: the padded batch that a rollout gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from tensordict import TensorDict

from verl.metrics import Metrics
from verl.protocol import DataProto
from verl.rollout.base import Completion, Request, RolloutEngine, SamplingParams, request_seed


def make_requests(batch: DataProto, n: int, params: SamplingParams, run_seed: int) -> list[Request]:
    """n requests for every prompt row, named ``{uid}/{k}``; their seeds depend on the run's seed, uid and k only."""
    columns = batch.non_tensor_batch
    return [
        Request(f"{uid}/{k}", np.asarray(ids, dtype=np.int64), params, request_seed(run_seed, str(uid), k))
        for uid, ids in zip(columns["uid"], columns["prompt_ids"], strict=True)
        for k in range(n)
    ]


def sample_rows(
    requests: Sequence[Request],
    completions: Sequence[Completion],
    *,
    prompt_width: int,
    response_width: int,
    pad_id: int,
) -> DataProto:
    """The padded sample batch of finished requests (frame "sample").

    ``response_mask`` marks exactly the tokens that the policy sampled: it comes from their number (or from the
    completion's ``trained``), never from ids, as the pad token may equal an eos token.
    """
    rows = len(requests)
    prompts = np.full((rows, prompt_width), pad_id, np.int64)
    responses = np.full((rows, response_width), pad_id, np.int64)
    attention = np.zeros((rows, prompt_width + response_width), np.int64)
    sampled = np.zeros((rows, response_width), np.int64)
    log_probs = np.zeros((rows, response_width), np.float32)
    for i, (request, done) in enumerate(zip(requests, completions, strict=True)):
        p, r = len(request.prompt_ids), len(done.token_ids)
        prompts[i, prompt_width - p :] = request.prompt_ids
        responses[i, :r] = done.token_ids
        attention[i, prompt_width - p : prompt_width + r] = 1
        sampled[i, :r] = 1 if done.trained is None else done.trained
        log_probs[i, :r] = done.log_probs
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": sampled,
        "input_ids": np.concatenate([prompts, responses], 1),
        "attention_mask": attention,
        "position_ids": np.maximum(attention.cumsum(1) - 1, 0),
        "rollout_log_probs": log_probs,
    }
    ids = np.array([r.id for r in requests], dtype=object)
    return DataProto(
        batch=TensorDict({k: torch.from_numpy(v) for k, v in tensors.items()}, batch_size=[rows]),
        non_tensor_batch={
            "sample_id": ids,
            "uid": np.array([i.rsplit("/", 1)[0] for i in ids], dtype=object),
            "finish_reason": np.array([c.finish_reason for c in completions], dtype=object),
        },
    )


def stream_rows(
    engine: RolloutEngine, requests: Sequence[Request], *, prompt_width: int, response_width: int, pad_id: int
) -> Iterator[DataProto]:
    """Run requests and yield pieces of finished rows as they come. Closing the generator aborts what is left."""
    by_id = {request.id: request for request in requests}
    engine.submit(requests)
    try:
        while engine.pending:
            done = engine.poll()
            if done:
                mine = [by_id[c.request_id] for c in done]
                yield sample_rows(mine, done, prompt_width=prompt_width, response_width=response_width, pad_id=pad_id)
    finally:
        if engine.pending:
            engine.abort()
            engine.poll()


def with_metrics(piece: DataProto, measured: Metrics) -> DataProto:
    """The piece, with more metrics that travel with it."""
    if len(measured):
        known = piece.meta_info.setdefault("metrics", Metrics())
        known.merge(measured)
    return piece
