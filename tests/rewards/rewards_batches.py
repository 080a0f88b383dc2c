"""Sample batches made of texts in a tiny vocabulary."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto

WORDS = ["[PAD]", "[EOS]", "what", "is", "answer", "good", "bad", "hang", "crash", "sleep", *map(str, range(32))]


def sample_batch(
    responses: Sequence[str], width: int = 6, prompt: str = "what is", eos: bool = True, **columns: Any
) -> DataProto:
    """A sample batch in the project's form; every response gets an end token unless it is empty."""
    ids = {word: k for k, word in enumerate(WORDS)}
    rows = [[ids[word] for word in text.split()] + ([1] if eos and text else []) for text in responses]
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows]).reshape(len(rows), width)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]).reshape(len(rows), width)
    head = torch.tensor([[0] + [ids[word] for word in prompt.split()]] * len(rows)).reshape(len(rows), -1)
    head_mask = (head != 0).long()
    attention = torch.cat([head_mask, mask], 1)
    count = len(rows)
    columns = {"uid": [f"u{k}" for k in range(count)], "sample_id": [f"u{k}/0" for k in range(count)], **columns}
    non_tensors = {}
    for name, values in columns.items():
        non_tensors[name] = np.empty(count, dtype=object)
        for k, value in enumerate(values):
            non_tensors[name][k] = value
    return DataProto.from_dict(
        tensors={
            "prompts": head,
            "responses": tokens,
            "response_mask": mask,
            "input_ids": torch.cat([head, tokens], 1),
            "attention_mask": attention,
        },
        non_tensors=non_tensors,
    )


class WordDecoder:
    """The least that a reward runner asks of a tokenizer."""

    def batch_decode(self, ids: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        return [" ".join(WORDS[k] for k in row if k > 1 or not skip_special_tokens) for row in ids]
