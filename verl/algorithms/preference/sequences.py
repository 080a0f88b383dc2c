"""From log-probs of tokens to numbers a row. Grids are (N, R): N responses, R positions, trained at mask 1."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.masked import as_mask, clean
from verl.algorithms.preference.inputs import PairLogps, PairRows


def sequence_logps(
    log_probs: Tensor, response_mask: Tensor, shared_lengths: Tensor | None = None, ld_alpha: float | None = None
) -> Tensor:
    """(N,) summed log-probs of the trained tokens.

    With ``ld_alpha`` (LD-DPO, arXiv:2409.06411), tokens beyond the first ``shared_lengths`` (N,) trained ones of a row
    count ``ld_alpha`` times: 1 is the plain sum, 0 cuts both responses of a pair to the length of the shorter.
    """
    kept = clean(log_probs, response_mask)
    if ld_alpha is None:
        return kept.sum(dim=-1)
    if shared_lengths is None:
        raise ValueError("ld_alpha needs shared_lengths, the shorter length of each row's pair")
    tail = as_mask(response_mask).cumsum(dim=-1) > shared_lengths[:, None]
    return torch.where(tail, ld_alpha * kept, kept).sum(dim=-1)


def pair_logps(
    log_probs: Tensor,
    ref_log_prob: Tensor | None,
    response_mask: Tensor,
    rows: PairRows,
    ld_alpha: float | None = None,
    valid: Tensor | None = None,
) -> PairLogps:
    """The (B,) inputs of a pair loss from the (2B, R) grids of a batch whose rows are sides of pairs.

    ``valid`` (B,) marks real pairs, in the order of ``rows.ids``. A pair with a side without trained tokens is not one.
    """
    mask = as_mask(response_mask)
    lengths = mask.sum(dim=-1)
    chosen, rejected = rows.chosen.to(mask.device), rows.rejected.to(mask.device)
    shared = None
    if ld_alpha is not None:
        shared = torch.zeros_like(lengths)
        shared[chosen] = shared[rejected] = torch.minimum(lengths[chosen], lengths[rejected])
    policy = sequence_logps(log_probs, mask, shared, ld_alpha)
    ref = None if ref_log_prob is None else sequence_logps(ref_log_prob.detach(), mask, shared, ld_alpha)
    nonempty = (lengths[chosen] > 0) & (lengths[rejected] > 0)
    return PairLogps(
        policy_chosen=policy[chosen],
        policy_rejected=policy[rejected],
        ref_chosen=None if ref is None else ref[chosen],
        ref_rejected=None if ref is None else ref[rejected],
        chosen_lengths=lengths[chosen],
        rejected_lengths=lengths[rejected],
        valid=nonempty if valid is None else nonempty & valid.to(mask.device),
    )


def wpo_weights(log_probs: Tensor, log_sum_squared_probs: Tensor, response_mask: Tensor) -> Tensor:
    """(N,) exp of the mean over trained tokens of log pi(token) - log sum_v pi(v)^2; no gradient.

    WPO, arXiv:2406.11827, with its "sampled alignment": 1 for text as likely as the policy's own samples. The weight
    of a pair is the product of its two rows. ``log_sum_squared_probs``: (N, R) log of the sum over the vocabulary.
    """
    mask = as_mask(response_mask)
    aligned = clean(log_probs.detach(), mask) - clean(log_sum_squared_probs.detach(), mask)
    return torch.exp(aligned.sum(dim=-1) / mask.sum(dim=-1).clamp(min=1))
