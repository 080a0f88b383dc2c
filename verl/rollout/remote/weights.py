"""The trainer's weights as an engine's processes can read them: under checkpoint names, without being sent.

On a GPU a row is the live parameter itself, opened over there by CUDA IPC. That works once and for all, because the
storage of a live weight never moves. Whatever exists only at the moment of an update (merged adapters, experts that a
checkpoint stores one by one) and everything on a CPU goes through a staging copy: on the GPU, or in a file in memory.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import weakref
from pathlib import Path

import torch
from torch.multiprocessing.reductions import reduce_tensor
from transformers import PreTrainedModel

from verl.errors import RolloutError
from verl.models.lora import has_adapters, merged_state
from verl.notices import notice

ALIGNMENT = 64
MEMORY = Path("/dev/shm")


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Name in a checkpoint → tensor, adapters merged; a tied weight occurs once. Live storages where nothing is merged.

    transformers keeps some families' weights in another form than their checkpoints: they are turned back.
    """
    state = merged_state(model) if has_adapters(model) else dict(model.state_dict(keep_vars=False))
    seen: set[tuple[int, torch.Size]] = set()
    single = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape)
        if key not in seen or not tensor.numel():
            seen.add(key)
            single[name] = tensor
    return _as_in_a_checkpoint(model, single)


def _as_in_a_checkpoint(model: PreTrainedModel, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, state)


class ExportedWeights:
    """The weights of ``model`` for other processes of this machine.

    Attributes:
        table: rows (name, dtype, shape, source) for :func:`verl.rollout.remote.receiving.opened`.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        live = {parameter.data_ptr() for parameter in model.parameters()}
        tensors = checkpoint_tensors(model)
        cuda = next(model.parameters()).is_cuda
        self._staged: dict[str, torch.Tensor] = {}
        if cuda:
            self.table = [self._cuda_row(n, t, t.data_ptr() in live and t.is_contiguous()) for n, t in tensors.items()]
        else:
            self.table = self._file_rows(tensors)

    def refresh(self) -> None:
        """Write the weights as they are now into the staging copies."""
        if self._staged:
            tensors = checkpoint_tensors(self.model)
            for name, copy in self._staged.items():
                copy.copy_(tensors[name].detach())
        if next(self.model.parameters()).is_cuda:
            torch.cuda.synchronize()  # the readers are other processes

    def _cuda_row(self, name: str, tensor: torch.Tensor, live: bool) -> tuple:
        about = name, _dtype(tensor), tuple(tensor.shape)
        if live:
            try:
                return *about, ("cuda", *reduce_tensor(tensor.detach()))
            except RuntimeError as error:  # memory that was not made by cudaMalloc, as where ranks share the weights
                notice(
                    f"The live weights cannot be opened by another process ({str(error).splitlines()[0]}), so the "
                    "rollout engine reads a copy of them: it takes as much memory again.",
                    key="rollout-weights-copied",
                )
        copy = self._staged[name] = tensor.detach().clone()
        try:
            return *about, ("cuda", *reduce_tensor(copy))
        except RuntimeError as error:
            raise RolloutError(
                f"The weights cannot be handed over by CUDA IPC ({str(error).splitlines()[0]}): take "
                "expandable_segments out of PYTORCH_CUDA_ALLOC_CONF, or use actor_rollout_ref.rollout.name=native."
            ) from error

    def _file_rows(self, tensors: dict[str, torch.Tensor]) -> list[tuple]:
        offsets, size = {}, 0
        for name, tensor in tensors.items():
            offsets[name] = size
            size += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        path = _memory_file(size)
        self._unlink = weakref.finalize(self, path.unlink, missing_ok=True)
        whole = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        rows = []
        for name, tensor in tensors.items():
            begin = offsets[name]
            piece = whole[begin : begin + tensor.numel() * tensor.element_size()]
            self._staged[name] = piece.view(tensor.dtype).view(tensor.shape)
            rows.append((name, _dtype(tensor), tuple(tensor.shape), ("file", str(path), size, begin)))
        return rows


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def memory_folder(size: int) -> Path:
    """A folder with room for ``size`` bytes: in memory if there is one, else the temporary one.

    Raises:
        RolloutError: neither has room.
    """
    folders = [folder for folder in (MEMORY, Path(tempfile.gettempdir())) if folder.is_dir()]
    for folder in folders:
        if shutil.disk_usage(folder).free >= size:
            return folder
    raise RolloutError(
        f"The weights need {size / 2**30:.1f} GiB in {' or '.join(map(str, folders))} to be handed over, and there "
        "is less free: enlarge it (docker run --shm-size=...), or set TMPDIR to a folder with room."
    )


def _memory_file(size: int) -> Path:
    descriptor, path = tempfile.mkstemp(prefix="verl-weights-", dir=memory_folder(size))
    with os.fdopen(descriptor, "wb") as file:
        file.truncate(max(size, mmap.PAGESIZE))
    return Path(path)
