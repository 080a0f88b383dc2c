"""State that lies in pieces: what one rank holds of a tensor, and a saved state of which any rows can be read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch

from verl.comm import Comm
from verl.errors import CheckpointError


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


def weight_in(state: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...], *, trained: bool) -> str:
    """The key under which a state holds a weight: its master, if it is trained and the state has one.

    Raises:
        CheckpointError: it has none, or one of another shape.
    """
    for key in (f"master/{name}", f"live/{name}") if trained else (f"live/{name}",):
        if key in state:
            if shape_in(state, key) != shape:
                raise CheckpointError(
                    f"The weight '{name}' has the shape {shape_in(state, key)} in the checkpoint and {shape} in "
                    "the model; was the run started with another model?"
                )
            return key
    raise CheckpointError(f"The checkpoint has no weight '{name}'; was the run started with another model?")


def gather_pieces(comm: Comm, pieces: Mapping[str, StatePiece]) -> dict[str, torch.Tensor]:
    """The whole state, on the host of every rank: all of them must call this, and have room for it."""
    state: dict[str, tuple[list[torch.Tensor], tuple[int, ...]]] = {}
    for piece_of in comm.all_gather_object({k: (p.tensor.cpu(), p.shape) for k, p in pieces.items()}):
        for key, (tensor, shape) in piece_of.items():
            state.setdefault(key, ([], shape))[0].append(tensor)
    return {
        key: parts[0] if tuple(parts[0].shape) == shape else torch.cat(parts) for key, (parts, shape) in state.items()
    }
