"""After each weight update: does the engine compute with the weights that were just trained?

A few short random prompts are continued by sampling, and the log-probs that the engine gives for its tokens are held
against the training model's. Weights that did not arrive, arrived under another name or in another layout are far off.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from verl.errors import RolloutError
from verl.rollout.base import Completion, Request, SamplingParams

PROMPTS, PROMPT_LENGTH, TOKENS = 4, 12, 4
TEMPERATURE = 0.8  # not 1: it shows log-probs that leave the temperature out
TOLERANCES = {"float64": 1e-3, "float32": 1e-3, "float16": 0.03, "bfloat16": 0.1}
"""Mean |difference| of log-probs that two correct implementations may have, by the coarser of the two types."""


def probe_requests(vocabulary: int, round_: int) -> list[Request]:
    """The same for the same ``round_``; others for another one."""
    random = np.random.default_rng([round_, vocabulary])
    params = SamplingParams(TOKENS, temperature=TEMPERATURE, ignore_eos=True)
    return [
        Request(f"probe/{round_}/{i}", random.integers(vocabulary, size=PROMPT_LENGTH), params, seed=1000 * round_ + i)
        for i in range(PROMPTS)
    ]


def model_log_probs(model: PreTrainedModel, request: Request, completion: Completion) -> np.ndarray:
    """(L,) float32 log-probs of a response under softmax(logits / temperature), by a plain forward of ``model``."""
    if not len(completion.token_ids):
        return np.zeros(0, np.float32)
    return _forward(model, request.prompt_ids[None], completion.token_ids[None], request.params.temperature or 1.0)[0]


@torch.no_grad()
def _forward(model: PreTrainedModel, prompts: np.ndarray, responses: np.ndarray, temperature: float) -> np.ndarray:
    """(B, L) log-probs of ``responses`` (B, L) after ``prompts`` (B, P)."""
    device, first = next(model.parameters()).device, prompts.shape[1]
    tokens = torch.from_numpy(np.concatenate([prompts, responses], 1)).to(device)
    positions = torch.arange(tokens.shape[1] - 1, device=device).expand(len(tokens), -1)
    logits = model(input_ids=tokens[:, :-1], position_ids=positions, use_cache=False).logits[:, first - 1 :]
    table = torch.log_softmax(logits.float() / temperature, -1)
    return table.gather(2, tokens[:, first:, None])[..., 0].cpu().numpy()


def difference(model: PreTrainedModel, requests: Sequence[Request], done: Sequence[Completion]) -> float:
    """Mean |log-prob of the engine - log-prob of the model| over the probe's tokens; its rows are equally long."""
    prompts, responses = (np.stack(rows) for rows in ([r.prompt_ids for r in requests], [c.token_ids for c in done]))
    theirs = np.stack([c.log_probs for c in done])
    return float(np.abs(theirs - _forward(model, prompts, responses, requests[0].params.temperature)).mean())


def check(gap: float, *, tolerance: float | None, dtype: str, title: str, hint: str = "") -> None:
    """Raise RolloutError if the difference is larger than ``tolerance`` (None: that of ``dtype``); ``title``: whose."""
    allowed = TOLERANCES[dtype] if tolerance is None else tolerance
    if not gap <= allowed:  # NaN is off, too
        raise RolloutError(
            f"After a weight update {title}'s log-probs differ from the training model's by {gap:.3g} on average, "
            f"where {allowed:g} is allowed ({dtype}): {title} does not compute what is being trained.{hint} Use "
            "actor_rollout_ref.rollout.name=native, or, if this model is known to differ that much, raise "
            "actor_rollout_ref.rollout.probe_tolerance."
        )


def coarser(*dtypes: str) -> str:
    """The type with the largest tolerance."""
    return max(dtypes, key=TOLERANCES.__getitem__)
