"""Log-probs of trained tokens together with the sum over the vocabulary of squared probabilities (for WPO)."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from verl.errors import ModelError
from verl.models.backbone import hidden_states, lm_head, may_share_prompts
from verl.models.linear_logprob import linear_log_prob
from verl.models.packing import pack
from verl.models.sequence_parallel import sequence_of
from verl.protocol import DataProto

CHUNK_ELEMENTS = 32 * 1024 * 1024  # logits at a time


def log_probs_and_squares(
    model: PreTrainedModel, batch: DataProto, *, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, R) log-probs as :func:`verl.models.policy.log_probs` gives them, and (B, R) log sum_v p(v)^2, no gradient."""
    device = next(model.parameters()).device
    packed = pack(batch, share_prompts=may_share_prompts(model), device=device)
    if not len(packed.target):
        zeros = torch.zeros(packed.shape, device=device)
        return zeros, zeros
    if sequence_of(model) is not None:
        raise ModelError("preference.use_weighting does not work with ulysses_sequence_parallel_size above 1.")
    weight, bias, softcap = lm_head(model)
    hidden = hidden_states(model, packed)[packed.source]
    log_prob, _ = linear_log_prob(hidden, weight, packed.target, bias=bias, softcap=softcap, temperature=temperature)
    squares = log_sum_squares(hidden.detach(), weight, bias, softcap, temperature)
    return packed.to_grid(log_prob), packed.to_grid(squares)


@torch.no_grad()
def log_sum_squares(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, softcap: float | None, temperature: float
) -> torch.Tensor:
    """(N,) log sum_v p(v)^2 of softmax(logits / temperature), from (N, D) hidden states; at least fp32."""
    rows = max(1, CHUNK_ELEMENTS // weight.shape[0])
    found = []
    for part in hidden.split(rows):
        logits = torch.nn.functional.linear(part, weight, bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        logits = logits / temperature
        found.append(torch.logsumexp(2 * logits, -1) - 2 * torch.logsumexp(logits, -1))
    return torch.cat(found)
