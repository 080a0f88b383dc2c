"""Called by SGLang's schedulers: takes the trainer's weights over from where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from verl.rollout.remote.receiving import opened

_open: dict[bytes, dict[str, torch.Tensor]] = {}  # the last table and its tensors: they stay open between updates


@torch.no_grad()
def load(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """SGLang's interface of a weight loader.

    Args:
        named_tensors: one uint8 tensor with the pickled table of
            :class:`verl.rollout.remote.weights.ExportedWeights`.
    """
    table = named_tensors[0][1].cpu().numpy().tobytes()
    if table not in _open:
        _open.clear()
        _open[table] = opened(table)
    model.load_weights(list(_open[table].items()))
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()  # the trainer may write to them as soon as this has returned
