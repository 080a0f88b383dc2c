"""The rollout engines that exist, and how each is made."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.errors import RolloutError
from verl.rollout.base import RolloutEngine
from verl.rollout.hf import HFEngine

ENGINES = {"hf": HFEngine}


def make_engine(
    name: str, twin: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, eos_token_ids: tuple[int, ...], **settings
) -> RolloutEngine:
    """The engine ``name`` over the rollout twin."""
    if name not in ENGINES:
        raise RolloutError(f"There is no rollout engine '{name}'; there are {', '.join(sorted(ENGINES))}.")
    return ENGINES[name](twin, tokenizer, eos_token_ids, **settings)
