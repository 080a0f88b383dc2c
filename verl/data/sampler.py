"""The order in which rows are drawn: a pure function of seed and epoch, with a position that can be saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from verl.errors import DataError
from verl.notices import notice

DEFAULT_SEED = 42
_SUBSET_STREAM = 2**63  # no epoch reaches this number


def resolve_seed(seed: int | None) -> int:
    """The seed given, else the fixed default: two runs of one configuration see the same rows."""
    return DEFAULT_SEED if seed is None else int(seed)


def permutation(length: int, seed: int, stream: int) -> np.ndarray:
    """A random order of 0 … length − 1, int64, that depends on nothing but its arguments.

    numpy promises the same raw Philox output in every version, but not the same ``Generator.permutation``; so the
    order is made here by sorting raw words.
    """
    key = np.array([seed % 2**64, stream], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(length), kind="stable")


def choose_subset(length: int, count: int, seed: int) -> np.ndarray:
    """``count`` of ``length`` row numbers in rising order, the same ones for the same seed."""
    return np.sort(permutation(length, seed, _SUBSET_STREAM)[:count])


def pick_rows(total: int, max_samples: int, shuffle: bool, seed: int | None) -> np.ndarray:
    """The row numbers that ``max_samples`` leaves: all for -1, the first ones, or with ``shuffle`` a seeded subset."""
    if max_samples < 0 or max_samples >= total:
        return np.arange(total)
    if max_samples == 0:
        raise DataError("max_samples=0 leaves no rows: use -1 for all of them")
    if not shuffle:
        notice(f"the first {max_samples} of {total} rows are used (max_samples)")
        return np.arange(max_samples)
    seed = resolve_seed(seed)
    notice(f"{max_samples} of {total} rows are used (max_samples), drawn with seed {seed}")
    return choose_subset(total, max_samples, seed)


@dataclass(frozen=True)
class Draw:
    """Row ``row`` was drawn as number ``position`` of epoch ``epoch`` (both from 0)."""

    epoch: int
    position: int
    row: int

    @property
    def uid(self) -> str:
        return f"e{self.epoch}.{self.position}"


class PromptSampler:
    """Draws row numbers epoch after epoch, every row once in each.

    The state is (epoch, position): it knows nothing of batches, workers or ranks, so a run may go on with other
    numbers of these. At an epoch's end the state stays at its last position until the next draw.
    """

    def __init__(self, length: int, *, shuffle: bool, seed: int | None, epochs: int | None = None):
        self.length = length
        self.shuffle = shuffle
        self.seed = resolve_seed(seed)
        self.epochs = epochs
        self.epoch = 0
        self.position = 0
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def remaining(self) -> int:
        """Rows not yet drawn in this epoch."""
        return self.length - self.position

    @property
    def is_last_epoch(self) -> bool:
        return self.epochs is not None and self.epoch >= self.epochs - 1

    def next_epoch(self) -> None:
        """Go to the start of the next epoch; what is left of this one is not drawn."""
        self.epoch, self.position = self.epoch + 1, 0

    def take(self, count: int) -> list[Draw]:
        """The next ``count`` draws, on into the next epoch if need be; fewer only at the end of the last epoch."""
        draws: list[Draw] = []
        while len(draws) < count:
            if self.remaining == 0:
                if self.is_last_epoch:
                    break
                self.next_epoch()
            end = min(self.length, self.position + count - len(draws))
            rows = self._epoch_order()[self.position : end]
            draws.extend(Draw(self.epoch, self.position + k, int(row)) for k, row in enumerate(rows))
            self.position = end
        return draws

    def _epoch_order(self) -> np.ndarray:
        if self._order is None or self._order[0] != self.epoch:
            order = permutation(self.length, self.seed, self.epoch) if self.shuffle else np.arange(self.length)
            self._order = (self.epoch, order)
        return self._order[1]

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "position": self.position,
            "rows": self.length,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where ``state`` was taken. Its seed and shuffle win over the configured ones, with a notice."""
        if state["rows"] != self.length:
            raise DataError(
                f"the checkpoint was made with {state['rows']} prompts, the data now gives {self.length}: resume with "
                "the same files and filters, or start anew with trainer.resume_mode=disable"
            )
        if (state["seed"], state["shuffle"]) != (self.seed, self.shuffle):
            notice(
                f"the order of prompts goes on as the checkpoint has it (seed {state['seed']}, shuffle "
                f"{state['shuffle']}), not as configured (seed {self.seed}, shuffle {self.shuffle})"
            )
        self.shuffle, self.seed = bool(state["shuffle"]), int(state["seed"])
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._order = None
