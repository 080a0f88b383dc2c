"""The one view of a batch that every batch reward function gets, whatever trainer calls it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from verl.protocol import DataProto
from verl.rewards.rows import ground_truth, solution_texts


class BatchView(Mapping[str, Any]):
    """Texts, ids and dataset columns of B responses, by name.

    ===============================  ============================================================================
    ``prompts``, ``responses``       lists of B texts, special tokens skipped
    ``response_ids``                 LongTensor (B, R), the response only, right-padded; also ``generated_tokens``
    ``response_mask``                (B, R), 1 where the policy sampled the token
    ``prompt_ids``                   LongTensor (B, P), left-padded
    ``input_ids``                    LongTensor (B, P+R), prompt and response: what a reward model scores
    ``attention_mask``               (B, P+R)
    ``ground_truth``                 list of B reference answers (None where there is none)
    any dataset column               list of B values
    ===============================  ============================================================================

    A dataset column with a name from above is hidden by it. ``.batch`` holds the tensors alone, so that
    ``batch.batch["response_ids"]`` works too. Tensors stay on the device where the batch lies.
    """

    def __init__(self, batch: DataProto, tokenizer: Any):
        tensors = batch.batch
        self.batch: dict[str, torch.Tensor] = {
            "response_ids": tensors["responses"],
            "generated_tokens": tensors["responses"],
            "response_mask": tensors["response_mask"],
            "prompt_ids": tensors["prompts"],
            "input_ids": torch.cat([tensors["prompts"], tensors["responses"]], dim=1),
            "attention_mask": tensors["attention_mask"],
        }
        columns = batch.non_tensor_batch
        self._items: dict[str, Any] = {
            **{name: list(column) for name, column in columns.items()},
            "ground_truth": [ground_truth(columns, row) for row in range(len(batch))],
            "prompts": _prompt_texts(batch, tokenizer),
            "responses": solution_texts(batch, tokenizer),
            **self.batch,
        }

    def __getitem__(self, name: str) -> Any:
        if name not in self._items:
            raise KeyError(f"the batch has no {name!r}; it has {', '.join(self._items)}")
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def _prompt_texts(batch: DataProto, tokenizer: Any) -> list[str]:
    prompts = batch.batch["prompts"]
    mask = batch.batch["attention_mask"][:, : prompts.shape[1]].bool()
    ids = [row[keep].tolist() for row, keep in zip(prompts, mask, strict=True)]
    return tokenizer.batch_decode(ids, skip_special_tokens=True)
