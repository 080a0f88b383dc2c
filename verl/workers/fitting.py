"""Micro-batches that fit: when memory runs out the token budget is halved, and the new budget is kept and told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from verl.comm import Comm
from verl.errors import TrainingError
from verl.notices import notice
from verl.train_engine.memory import MemoryShortageError, memory_numbers, release_memory
from verl.workers.settings import Cut

Result = TypeVar("Result")

REMEDIES = (
    "Lower data.max_prompt_length or data.max_response_length, set model.enable_gradient_checkpointing=true, train "
    "adapters only (model.lora_rank=16), or take a smaller model or dtype."
)


class TokenBudget:
    """The budget of one phase.

    Args:
        phase: for people, for example "the policy update".
        learned: where the learned size is kept, by ``name`` (0: nothing learned).
        device: what runs out of memory.
        shares_prompts: a prompt is computed, and counted, once in a micro-batch.
    """

    def __init__(
        self, phase: str, name: str, learned: dict[str, int], device: torch.device, *, shares_prompts: bool = False
    ):
        self.shares_prompts = shares_prompts
        self.phase = phase
        self.name = name
        self.learned = learned
        self.device = device

    def apply(self, cut: Cut) -> Cut:
        """The cut that was asked for, or the smaller one that memory taught."""
        learned = self.learned[self.name]
        if not learned:
            return cut
        return replace(cut, max_tokens=min(learned, cut.max_tokens or learned))

    def lower(self, rows: int, tokens: int, cut: Cut) -> None:
        """A micro-batch of ``rows`` rows and ``tokens`` tokens did not fit: halve the budget.

        Raises:
            TrainingError: it was a single row, which cannot be cut.
        """
        if rows <= 1:
            raise TrainingError(
                f"Out of memory in {self.phase}: a single sequence of {tokens} tokens does not fit "
                f"({memory_numbers(self.device)}). {REMEDIES}"
            )
        self.learned[self.name] = max(1, tokens // 2)
        keep = f" Set {cut.key} accordingly to start with it." if cut.key else ""
        notice(
            f"Out of memory in {self.phase} with a micro-batch of {tokens} tokens ({memory_numbers(self.device)}); "
            f"it goes on with at most {self.learned[self.name]} tokens.{keep}",
            key=f"out of memory in {self.phase} at {tokens}",
        )


def redo_until_it_fits(
    budget: TokenBudget,
    cut: Cut,
    attempt: Callable[[list[np.ndarray]], Result],
    rows_of: Callable[[Cut], list[np.ndarray]],
    cost: Callable[[np.ndarray], int],
    comm: Comm,
    *,
    together: int = 1,
) -> Result:
    """Call ``attempt`` with the rows of each micro-batch; on a memory shortage again with smaller ones.

    ``rows_of`` cuts the rows, ``cost`` says how many tokens those of one micro-batch cost, ``together`` how many rows
    cannot be separated.

    All ranks come here together and go on together: what one learned, all keep.
    """
    while True:
        parts = rows_of(budget.apply(cut))
        try:
            return attempt(parts)
        except MemoryShortageError as shortage:
            number = shortage.micro_batch
        release_memory()
        failed = None if number is None else (len(parts[number]) // together, cost(parts[number]))
        everybody = [f for f in comm.all_gather_object(failed) if f is not None]
        # a single row that does not fit on any rank stops all of them; else the smallest that failed decides
        rows, tokens = min(everybody)
        budget.lower(rows, tokens, cut)
