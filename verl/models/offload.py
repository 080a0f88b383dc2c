"""Weights of a model that lie in host memory while another role works.

A storage is emptied and filled again; the Parameter objects, and all that refers to them, stay what they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


class HostWeights:
    """Keeps the parameters and buffers of ``module`` in (pinned) host memory, except within :meth:`here`.

    Not for weights whose address others know: a filled storage may lie elsewhere than before.

    Args:
        frozen: the weights never change, so they are copied to the host once only.

    Attributes:
        present: the weights are on their device.
    """

    def __init__(self, module: nn.Module, *, frozen: bool):
        tensors = [*module.parameters(), *module.buffers()]
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t.numel()}
        self._storages = list(storages.values())
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._copies: list[torch.Tensor] = []
        self._frozen = frozen
        self._users = 0
        self.present = True
        self._leave()

    @property
    def bytes(self) -> int:
        """What is freed on the device."""
        return sum(self._sizes)

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Within, the weights are on their device, where they may be changed in place."""
        self._users += 1
        if self._users == 1:
            self._come()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._leave()

    def _come(self) -> None:
        for storage, size, copy in zip(self._storages, self._sizes, self._copies, strict=True):
            storage.resize_(size)
            _bytes_of(storage).copy_(copy, non_blocking=True)
        self.present = True

    def _leave(self) -> None:
        known = bool(self._copies)
        if not known:
            self._copies = [_host_bytes(storage) for storage in self._storages]
        if not (known and self._frozen):
            for storage, copy in zip(self._storages, self._copies, strict=True):
                copy.copy_(_bytes_of(storage))
        for storage in self._storages:
            storage.resize_(0)
        self.present = False


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
