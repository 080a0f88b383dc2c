"""State that lies in pieces: what one rank holds of a tensor, and a saved state of which any rows can be read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch


class StatePiece(NamedTuple):
    """Rows ``start`` to ``start + len(tensor)`` of a tensor of ``shape``; a whole tensor has ``start`` 0."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    start: int = 0

    @staticmethod
    def whole(tensor: torch.Tensor) -> StatePiece:
        return StatePiece(tensor, tuple(tensor.shape))


class SavedRows(Mapping[str, torch.Tensor]):
    """A saved state by name, read when asked for; ``state[name]`` is the whole tensor."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor. Raises KeyError."""

    @abstractmethod
    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows of a tensor, of which no more than these are read. Raises KeyError."""


def shape_in(state: Mapping[str, torch.Tensor], name: str) -> tuple[int, ...]:
    return state.shape(name) if isinstance(state, SavedRows) else tuple(state[name].shape)


def rows_in(state: Mapping[str, torch.Tensor], name: str, start: int, stop: int) -> torch.Tensor:
    """Rows of the tensor ``name`` of any state, saved in pieces or whole."""
    return state.rows(name, start, stop) if isinstance(state, SavedRows) else state[name][start:stop]
