"""Scaled-dot-product attention with what torch's own lacks: a soft-cap, and key-value heads shared by query heads.

Dimension key: H query heads, G key-value heads (H a multiple of G), Q queries, K keys, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """(B, H, Q, D) outputs of (B, H, Q, D) queries to (B, G, K, D) keys and values.

    Args:
        mask: bool, broadcastable to (B, H, Q, K), True where a key is seen. None: causal, for as many keys as queries.
        scale: of the scores; None for D ** -0.5. softcap: scores become softcap * tanh(score / softcap).
    """
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, dropout_p=dropout
        )
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    scores = query @ key.transpose(-1, -2) * (scale if scale is not None else query.shape[-1] ** -0.5)
    scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    return F.dropout(weights, dropout) @ value
