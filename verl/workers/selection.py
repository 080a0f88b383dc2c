"""Selections over a whole mini-batch, for policy losses that look at all its tokens at once (clip_cov, kl_cov)."""

from __future__ import annotations

import numpy as np
import torch

from verl.algorithms.registry import PolicyLoss
from verl.comm import Comm
from verl.protocol import DataProto
from verl.train_engine.plan import MiniBatch


def prepare_selection(
    policy_loss: PolicyLoss, rows: DataProto, log_prob: torch.Tensor, mini: MiniBatch, comm: Comm, config
) -> torch.Tensor | None:
    """(rows, R) selection for this rank's rows of a mini-batch; None for losses that need none.

    Rows of all ranks are put in the order of their sample ids, so that the choice does not depend on how they were
    spread over ranks or ordered in the batch.

    Args:
        log_prob: (rows, R) detached log-probs of this rank's rows under the current weights.
    """
    assert policy_loss.prepare is not None
    tensors = rows.batch
    mine = {
        "old_log_prob": tensors["old_log_probs"].cpu() if "old_log_probs" in tensors.keys() else log_prob,
        "log_prob": log_prob,
        "advantages": tensors["advantages"].cpu(),
        "response_mask": tensors["response_mask"].cpu(),
    }
    ids = rows.non_tensor_batch["sample_id"].astype(str)
    everybody = comm.all_gather_object((ids, mine))
    all_ids = np.concatenate([part[0] for part in everybody])
    order = np.argsort(all_ids, kind="stable")
    whole = {key: torch.cat([part[1][key] for part in everybody])[torch.from_numpy(order)] for key in mine}
    chosen = policy_loss.prepare(**whole, config=config, generator_seed=mini.seed)
    place = np.searchsorted(all_ids[order], ids)
    return chosen[torch.from_numpy(place)]
