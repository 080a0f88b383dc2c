"""Data: prompts for reinforcement learning, and texts to learn from; reading, templating, batching.

Names are imported on first use, so that reading files needs neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.data.build import build_prompt_dataset as build_prompt_dataset
    from verl.data.build import build_train_loader as build_train_loader
    from verl.data.builtin import arithmetic_task as arithmetic_task
    from verl.data.builtin import builtin_prompts as builtin_prompts
    from verl.data.collate import collate_prompts as collate_prompts
    from verl.data.loader import PromptLoader as PromptLoader
    from verl.data.loader import validation_batches as validation_batches
    from verl.data.padding import collate_pairs as collate_pairs
    from verl.data.padding import collate_sequences as collate_sequences
    from verl.data.padding import collate_unpaired as collate_unpaired
    from verl.data.padding import mismatched as mismatched
    from verl.data.preference import PreferenceDataset as PreferenceDataset
    from verl.data.preference import UnpairedDataset as UnpairedDataset
    from verl.data.readers import read_rows as read_rows
    from verl.data.rl_dataset import PromptDataset as PromptDataset
    from verl.data.rlhf_dataset import RLHFDataset as RLHFDataset
    from verl.data.schemas import rows_from_prompts as rows_from_prompts
    from verl.data.sequence_settings import SequenceSettings as SequenceSettings
    from verl.data.sft import SFTDataset as SFTDataset
    from verl.data.templating import PromptTemplate as PromptTemplate

_HOMES = {
    "PreferenceDataset": "preference",
    "PromptDataset": "rl_dataset",
    "PromptLoader": "loader",
    "PromptTemplate": "templating",
    "RLHFDataset": "rlhf_dataset",
    "SFTDataset": "sft",
    "SequenceSettings": "sequence_settings",
    "UnpairedDataset": "preference",
    "arithmetic_task": "builtin",
    "build_prompt_dataset": "build",
    "build_train_loader": "build",
    "builtin_prompts": "builtin",
    "collate_pairs": "padding",
    "collate_prompts": "collate",
    "collate_sequences": "padding",
    "collate_unpaired": "padding",
    "mismatched": "padding",
    "read_rows": "readers",
    "rows_from_prompts": "schemas",
    "validation_batches": "loader",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'verl.data' has no attribute '{name}'")
    return getattr(importlib.import_module(f"verl.data.{_HOMES[name]}"), name)
