"""Models whose weights are not read yet: those that will be spread over ranks, each of which reads its own rows.

The model is built with parameters that have shapes and no memory (the meta device); buffers are real. Whoever spreads
it makes room for its own rows, reads them out of the safetensors files, and then lets the model be made ready
(:meth:`PendingWeights.settle`): what must be tried with weights waits until then.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from verl.errors import ModelError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class PendingWeights:
    """Where the weights of ``model`` lie.

    Attributes:
        device: where the model will compute.
        settle: makes the model ready, once it has weights.
        read_bytes: bytes that this rank has read.
    """

    def __init__(self, model: PreTrainedModel, folder: Path, files: dict[str, str], device: torch.device):
        self.device = device
        self.settle: Callable[[], object] = lambda: None
        self.read_bytes = 0
        self._folder = folder
        self._saved_buffers = [name for name, _ in model.named_buffers() if name in files]
        aliases: dict[int, list[str]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(p), []).append(name)  # tied weights have several names, and one is saved
        self._places = {
            name: next(((files[other], other) for other in aliases[id(p)] if other in files), None)
            for name, p in model.named_parameters()
        }

    def lacks(self, model: PreTrainedModel) -> str | None:
        """Why the files cannot be read row by row; None if they can: each weight is there, with the model's shape."""
        if self._saved_buffers:
            return f"they hold '{self._saved_buffers[0]}' besides weights"
        for name, p in model.named_parameters():
            place = self._places[name]
            if place is None:
                return f"they have no weight '{name}'"
            with safe_open(self._folder / place[0], framework="pt") as file:
                if tuple(file.get_slice(place[1]).get_shape()) != tuple(p.shape):
                    return f"the weight '{name}' has another shape in them"
        return None

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows of a weight, of which no more than these are read, on the host and in the type of the file."""
        place = self._places[name]
        assert place is not None
        path = self._folder / place[0]
        try:
            with safe_open(path, framework="pt") as file:
                found = file.get_slice(place[1])[start:stop]
        except (SafetensorError, OSError) as error:
            raise ModelError(f"The weight '{name}' cannot be read from {path}: {error}") from error
        self.read_bytes += found.nbytes
        return found


_PENDING: weakref.WeakKeyDictionary[PreTrainedModel, PendingWeights] = weakref.WeakKeyDictionary()


def pending_of(model: nn.Module) -> PendingWeights | None:
    """Where the weights of ``model`` are to be read; None if it has them."""
    return _PENDING.get(model) if isinstance(model, PreTrainedModel) else None


def weights_are_here(model: nn.Module) -> None:
    """They have been read."""
    _PENDING.pop(model, None)  # type: ignore[call-overload]


def build_pending(
    path: str, config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device | str, trust_remote_code: bool
) -> tuple[PreTrainedModel | None, str]:
    """A causal LM without weights, whose :func:`pending_of` reads them; (None, reason) where that cannot be done."""
    folder = Path(path)
    files = weight_files(folder)
    if files is None:
        return None, f"{path} is no local folder with safetensors files"
    if getattr(config, "quantization_config", None) is not None:
        return None, "its files hold quantized weights"
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    with contextlib.suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(path)
    pending = PendingWeights(model, folder, files, torch.device(device))
    lack = pending.lacks(model)
    if lack is not None:
        return None, f"the files of {path} are not named and shaped as the model: {lack}"
    _PENDING[model] = pending
    return model, ""


def weight_files(folder: Path) -> dict[str, str] | None:
    """The file of every weight of a local folder, by name; None if it has no whole set of safetensors files."""
    try:
        if (folder / INDEX).is_file():
            files = dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
            return files if all((folder / name).is_file() for name in set(files.values())) else None
        if (folder / SINGLE).is_file():
            with safe_open(folder / SINGLE, framework="pt") as file:
                return dict.fromkeys(file.keys(), SINGLE)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        return None  # damaged: loading the whole says how
    return None


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within, modules are made with parameters that have no memory, and with real buffers.

    For the whole process: use it inside :func:`verl.models.loading.building_models`.
    """
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(self, name, param)
        if param is not None and param.device.type != "meta":
            empty = torch.empty_like(param, device="meta")
            self._parameters[name] = nn.Parameter(empty, requires_grad=param.requires_grad)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
