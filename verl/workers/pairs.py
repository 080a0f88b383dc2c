"""Pairs as rows: one row a pair in the dataflow (frame "pair"), two rows a pair in a model's forward pass.

A pair has one prompt and two responses. Keys of frame "pair", with B pairs, P prompt and R response columns:
``prompts``, ``prompt_attention`` (B, P), padded on the left; for each side ``{side}_responses``, ``{side}_attention``
and ``{side}_mask`` (B, R), padded on the right, the mask 1 where trained. A pair that is to be ignored has masks of 0.
"""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict

from verl.algorithms.masked import as_mask
from verl.algorithms.preference import sequence_logps
from verl.models.packing import packed_lengths
from verl.protocol import DataProto, object_column

SIDES = ("chosen", "rejected")
SIDE_KEYS = tuple(f"{side}_{part}" for side in SIDES for part in ("responses", "attention", "mask"))
PAIR = ["prompts", "prompt_attention", *SIDE_KEYS]


def pairs_of(batch: DataProto) -> DataProto:
    """Rows (chosen, rejected, chosen, rejected, ...) with one ``uid`` a pair, as `verl.data.collate_pairs` makes
    them, folded into frame "pair"; other columns are those of the chosen row."""
    tensors = batch.batch
    width = tensors["prompts"].shape[1]
    found = {"prompts": tensors["prompts"][0::2], "prompt_attention": tensors["attention_mask"][0::2, :width]}
    for number, side in enumerate(SIDES):
        found[f"{side}_responses"] = tensors["responses"][number::2]
        found[f"{side}_attention"] = tensors["attention_mask"][number::2, width:]
        found[f"{side}_mask"] = tensors["response_mask"][number::2]
    left = {"sample_id", "side", *found}
    columns = {name: values[0::2] for name, values in batch.non_tensor_batch.items() if name not in left}
    return DataProto(
        batch=TensorDict({key: value.contiguous() for key, value in found.items()}, batch_size=[len(batch) // 2]),
        non_tensor_batch=columns,
        meta_info=dict(batch.meta_info),
    )


def interleaved(pairs: DataProto) -> DataProto:
    """The 2B rows of B pairs, each chosen one before its rejected one, as a sample batch."""
    tensors = pairs.batch
    attention = torch.cat(
        [both(tensors, "prompt_attention", "prompt_attention"), both(tensors, *(f"{s}_attention" for s in SIDES))], 1
    )
    found = {
        "prompts": both(tensors, "prompts", "prompts"),
        "responses": both(tensors, *(f"{side}_responses" for side in SIDES)),
        "response_mask": both(tensors, *(f"{side}_mask" for side in SIDES)),
        "attention_mask": attention,
    }
    ids = pairs.non_tensor_batch["pair_id"]
    return DataProto(
        batch=TensorDict(found, batch_size=[2 * len(pairs)]),
        non_tensor_batch={
            "uid": np.repeat(pairs.non_tensor_batch["uid"], 2),
            "sample_id": object_column([f"{name}/{side}" for name in ids for side in SIDES]),
        },
        meta_info={},
    )


def both(tensors: TensorDict, chosen: str, rejected: str) -> torch.Tensor:
    """(2B, ...) rows of two keys in turn."""
    return torch.stack([tensors[chosen], tensors[rejected]], 1).flatten(0, 1)


def pair_mask(pairs: DataProto) -> torch.Tensor:
    """(B, 2R) trained tokens of both sides; all 0 for a pair with a side that has none, which is no pair."""
    masks = [as_mask(pairs.batch[f"{side}_mask"]) for side in SIDES]
    real = masks[0].any(1) & masks[1].any(1)
    return torch.cat(masks, 1) & real[:, None]


def pair_lengths(pairs: DataProto) -> np.ndarray:
    """(B,) tokens that each pair costs; the prompt counts for both sides."""
    return packed_lengths(interleaved(pairs)).reshape(-1, 2).sum(1)


def log_prob_sums(grid: torch.Tensor, pairs: DataProto, ld_alpha: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(B,) of the chosen and (B,) of the rejected side, summed from the (2B, R) ``grid`` of :func:`interleaved`."""
    masks = {side: as_mask(pairs.batch[f"{side}_mask"]).to(grid.device) for side in SIDES}
    shared = torch.minimum(masks["chosen"].sum(1), masks["rejected"].sum(1)) if ld_alpha is not None else None
    sums = [sequence_logps(grid[n::2], masks[side], shared, ld_alpha) for n, side in enumerate(SIDES)]
    return sums[0], sums[1]


def log_prob_totals(grid: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """(B,) summed log-probs of the trained tokens."""
    return sequence_logps(grid, as_mask(response_mask))
