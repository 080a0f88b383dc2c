"""A value model class of the user's own, from a Python file (``critic.model.custom_cls``).

The class is a ``torch.nn.Module``, made with the model's path, whose ``forward(input_ids, attention_mask)`` takes
(B, T) and (B, T) and returns (B, T): at each token, the value of the state after it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from verl.errors import ModelError
from verl.models.settings import ModelSettings
from verl.protocol import DataProto

KEY = "critic.model.custom_cls"
WEIGHTS = "model.safetensors"


class CustomValueModel(nn.Module):
    """(B, R) values of the states before each response token, from the user's module over padded rows."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, batch: DataProto) -> torch.Tensor:
        """Raises ModelError where the user's module gives another shape than (B, T)."""
        device = next(self.model.parameters()).device
        assert batch.batch is not None
        tensors = batch.batch.select("prompts", "responses", "attention_mask", "response_mask").to(device)
        ids = torch.cat([tensors["prompts"], tensors["responses"]], 1)
        values = self.model(ids, tensors["attention_mask"])
        if not isinstance(values, torch.Tensor) or values.shape != ids.shape:
            found = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
            raise ModelError(
                f"{KEY}: {type(self.model).__name__} gave {found} for rows of shape {tuple(ids.shape)}; one "
                "value for each token is expected"
            )
        mask = tensors["response_mask"].bool()
        # the state before a response token is the one after its predecessor
        before = values[:, -mask.shape[1] - 1 : -1]
        return before.to(torch.promote_types(values.dtype, torch.float32)).masked_fill(~mask, 0)

    def save_pretrained(self, folder: str | os.PathLike, tokenizer=None) -> None:
        """As transformers saves, for one of its models; else the weights alone."""
        if isinstance(self.model, PreTrainedModel):
            self.model.save_pretrained(folder)
        else:
            state = {name: value.detach().cpu().contiguous() for name, value in self.model.state_dict().items()}
            save_file(state, Path(folder) / WEIGHTS)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def load_custom_value(settings: ModelSettings) -> CustomValueModel:
    """Make the user's model, in the run's dtype on its device.

    Raises:
        ModelError: the file, the class or its constructor does not work; the message says which and where.
    """
    assert settings.custom_class is not None
    path, name = settings.custom_class
    found = _class(Path(os.path.expandvars(path)).expanduser(), name)
    try:
        model = found(settings.path)
    except Exception as error:  # whatever the user's constructor raises
        line = traceback.extract_tb(error.__traceback__)[-1].lineno
        raise ModelError(
            f"{KEY}: {name}({settings.path!r}) fails (line {line}): {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module) or not any(True for _ in model.parameters()):
        raise ModelError(f"{KEY}: {name} is no torch.nn.Module with weights")
    return CustomValueModel(model.to(settings.device, settings.torch_dtype)).train()


def _class(path: Path, name: str) -> type:
    if not path.is_file():
        raise ModelError(f"{KEY}.path: there is no file {path}")
    module_name = f"verl_custom_critic_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ModelError(f"{KEY}.path={path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ModelError(f"{path}, line {error.lineno}: {error.msg} ({KEY}.path)") from error
    except Exception as error:  # whatever the user's own file raises while it is read
        line = traceback.extract_tb(error.__traceback__)[-1].lineno
        raise ModelError(f"{path} fails when imported (line {line}): {type(error).__name__}: {error}") from error
    classes = {key: value for key, value in vars(module).items() if isinstance(value, type)}
    if name not in classes:
        own = [key for key, value in classes.items() if value.__module__ == module_name]
        raise ModelError(f"{path} has no class '{name}' ({KEY}.name): its classes are {', '.join(own) or '(none)'}")
    return classes[name]
