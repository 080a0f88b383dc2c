"""``RLHFDataset``: the prompt dataset under verl's public name, with padded tensors in its items."""

from __future__ import annotations

from typing import Any

import torch

from verl.data.readers import DataFiles
from verl.data.rl_dataset import PromptDataset
from verl.data.rows import Row
from verl.errors import DataError
from verl.notices import notice


class RLHFDataset(PromptDataset):
    """A :class:`~verl.data.rl_dataset.PromptDataset` whose items also hold the padded prompt.

    ``config`` is a dict or dataclass with ``max_prompt_length``, ``max_response_length``, ``truncation`` and any other
    ``data.*`` key; the same keys can be given as keywords, which win. ``processor`` is accepted for compatibility: only
    text is read. Beside the columns of a prompt row an item has ``input_ids``, ``attention_mask`` and
    ``position_ids``, each a (max_prompt_length,) int64 tensor, padded on the left with the tokenizer's pad token (its
    end-of-sequence token where it has none).
    """

    def __init__(
        self,
        data_files: DataFiles,
        tokenizer: Any,
        config: Any = None,
        processor: Any = None,
        max_samples: int = -1,
        **keys: Any,
    ):
        if processor is not None:
            notice("RLHFDataset: the processor is not used, prompts are read as text")
        super().__init__(data_files, tokenizer, config, max_samples=max_samples, **keys)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        if pad is None:
            raise DataError("the tokenizer has neither a pad nor an end-of-sequence token: set tokenizer.pad_token")
        self._pad = int(pad)

    def __getitem__(self, position: int) -> Row:
        row = super().__getitem__(position)
        ids = torch.from_numpy(row["prompt_ids"])
        limit, length = self.settings.max_prompt_length, len(ids)
        input_ids = torch.full((limit,), self._pad, dtype=torch.int64)
        input_ids[limit - length :] = ids
        attention_mask = torch.zeros(limit, dtype=torch.int64)
        attention_mask[limit - length :] = 1
        position_ids = (torch.cumsum(attention_mask, dim=0) - 1).clamp(min=0)
        return {**row, "input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
