"""LoRA through the package peft: adapters inside the model, base weights frozen, reference = adapters off.

The model keeps its class (the adapters are injected, not wrapped around), so everything that runs a Hugging Face model
runs it with adapters too. The rollout twin gets adapter modules of its own over the same tensors: nothing is merged
while training. Only the export is merged, in fp32.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from verl.errors import MissingDependencyError, ModelError
from verl.models.quantization import dequantised_state, mirror_quantised
from verl.models.settings import LoraSettings

ADAPTER = "default"
FOLDER = "lora_adapter"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of every name in a peft adapter file


@dataclass(frozen=True)
class _Adapted:
    """One adapted linear layer: its name in the model, and its adapter's matrices."""

    name: str
    module: nn.Module
    down: torch.Tensor  # A, (r, in)
    up: torch.Tensor  # B, (out, r)
    scaling: float

    def delta(self) -> torch.Tensor:
        """fp32 (out, in), or (in, out) where the base weight lies that way: scaling B A."""
        product = (self.up.detach().float() @ self.down.detach().float()) * self.scaling
        return product.t() if getattr(self.module, "fan_in_fan_out", False) else product


def _peft_config(settings: LoraSettings, head: str | None):
    from peft import LoraConfig

    task = "CAUSAL_LM" if head is None else "SEQ_CLS"
    if settings.adapter_path is not None:
        config = LoraConfig.from_pretrained(settings.adapter_path)
        config.inference_mode = False
        config.modules_to_save = None  # a head is trained as it is, see add_adapters
        config.task_type = task
        return config
    return LoraConfig(
        r=settings.rank,
        lora_alpha=int(settings.alpha) if float(settings.alpha).is_integer() else settings.alpha,
        target_modules=settings.target_modules,
        exclude_modules=settings.exclude_modules,
        lora_dropout=0.0,
        bias="none",
        task_type=task,
    )


def live_dtype(model: nn.Module) -> torch.dtype:
    """The type that computes: that of the weights that are not quantised."""
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def add_adapters(model: PreTrainedModel, settings: LoraSettings, *, head: str | None = None) -> None:
    """Freeze ``model`` and put trainable adapters, in its dtype, beside its linear layers.

    Args:
        head: the layer that scores, by name: it has no adapter and is trained whole, as it may be a fresh one.

    Raises:
        MissingDependencyError: peft is not installed.
        ModelError: the target modules name nothing, or something else than linear layers; the adapter does not fit.
    """
    if importlib.util.find_spec("peft") is None:
        raise MissingDependencyError("peft", "LoRA (model.lora_rank)")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)  # all ranks start from the same adapters
        _inject(model, _peft_config(settings, head))
    if head is not None:
        getattr(model, head).requires_grad_(True)
    if settings.adapter_path is not None:
        _load(model, Path(settings.adapter_path), head)


def _inject(model: PreTrainedModel, config) -> None:
    from peft import inject_adapter_in_model

    dtype = live_dtype(model)
    model.requires_grad_(False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set")  # peft then sets it right
            warnings.filterwarnings("error", message="You have passed exclude_modules")  # it named no module
            inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    except (ValueError, UserWarning) as error:
        raise ModelError(f"LoRA cannot be added to {type(model).__name__}: {str(error).splitlines()[0]}") from error
    for adapted in _adapted(model):
        adapted.down.data, adapted.up.data = adapted.down.data.to(dtype), adapted.up.data.to(dtype)


def has_adapters(model: nn.Module) -> bool:
    return getattr(model, "peft_config", None) is not None


def mirror_adapters(source: PreTrainedModel, twin: PreTrainedModel) -> None:
    """Give the twin quantised layers and adapters like those of ``source``; whoever calls puts the tensors in."""
    mirror_quantised(source, twin)
    if has_adapters(source):
        if ADAPTER not in source.peft_config:
            raise ModelError(f"The model's adapter must be named '{ADAPTER}', not {sorted(source.peft_config)}.")
        _inject(twin, source.peft_config[ADAPTER])


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield name, module


def _adapted(model: nn.Module) -> Iterator[_Adapted]:
    for name, module in _layers(model):
        if ADAPTER not in module.lora_A:
            raise ModelError(f"LoRA targets '{name}', which is not a linear layer: choose other model.target_modules.")
        down, up = module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight
        yield _Adapted(name, module, down, up, module.scaling[ADAPTER])


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within, the model computes with its base weights alone."""
    layers = [module for _, module in _layers(model)]
    for module in layers:
        module.enable_adapters(False)
    try:
        yield
    finally:
        for module in layers:
            module.enable_adapters(True)


def merged_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The state of the plain model with the adapters merged in, under the plain model's names."""
    deltas = adapted_layers(model)
    state = {}
    dtype = live_dtype(model)
    for name, tensor in dequantised_state(model).items():
        if ".lora_" in name:
            continue
        if name in deltas:
            tensor = (tensor.float() + deltas[name].delta()).to(dtype)
        state[name.replace(".base_layer.", ".")] = tensor
    return state


def adapted_layers(model: PreTrainedModel) -> dict[str, _Adapted]:
    """The adapted layers by the name of their base weight."""
    return {f"{adapted.name}.base_layer.weight": adapted for adapted in _adapted(model)}


def save_adapter(
    model: PreTrainedModel, folder: str | os.PathLike, weights: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write ``lora_adapter/`` into ``folder``: what ``peft.PeftModel.from_pretrained(base, …)`` loads.

    A head that was trained whole is in it, as peft keeps it (``modules_to_save``).

    Args:
        weights: the adapters' weights by name, where the model has only shards of them.
    """
    target = Path(folder) / FOLDER
    config = copy.copy(model.peft_config[ADAPTER])
    tensors = {}
    if config.task_type == "SEQ_CLS":
        config.modules_to_save, found = trained_head(model)
        tensors = {f"{_PREFIX}{name}": (found if weights is None else weights)[name].detach().cpu() for name in found}
    config.save_pretrained(target)
    for adapted in _adapted(model):
        for letter, own in (("A", adapted.down), ("B", adapted.up)):
            weight = own if weights is None else weights[f"{adapted.name}.lora_{letter}.{ADAPTER}.weight"]
            tensors[f"{_PREFIX}{adapted.name}.lora_{letter}.weight"] = weight.detach().cpu().contiguous()
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})


def trained_head(model: PreTrainedModel) -> tuple[list[str], dict[str, torch.Tensor]]:
    """The trained layers that are no adapters, by their module's names, and their weights by name."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad and ".lora_" not in name}
    return sorted({name.rpartition(".")[0] for name in found}), found


@torch.no_grad()
def _load(model: PreTrainedModel, folder: Path, head: str | None) -> None:
    file = folder / WEIGHTS
    if not file.is_file():
        raise ModelError(f"model.lora_adapter_path={folder} has no {WEIGHTS}.")
    saved = load_file(file)
    for adapted in _adapted(model):
        for letter, tensor in (("A", adapted.down), ("B", adapted.up)):
            name = f"{_PREFIX}{adapted.name}.lora_{letter}.weight"
            if name not in saved or saved[name].shape != tensor.shape:
                raise ModelError(
                    f"The adapter in {folder} does not fit the model: '{name}' is missing or of another shape."
                )
            tensor.copy_(saved[name])
    if head is not None:
        for own, tensor in getattr(model, head).named_parameters(prefix=head):
            if f"{_PREFIX}{own}" in saved:  # an adapter of a policy has none
                tensor.copy_(saved[f"{_PREFIX}{own}"])
