"""The optimizers by name, and putting their saved state back.

8-bit and paged ones are those of the package bitsandbytes: moments in one byte each, in blocks of 256 values with a
scale (Dettmers et al. 2021, arXiv:2110.02861); paged ones lie in memory that moves to the host when the GPU is full.
They work on the same fp32 masters as the others. Tensors of fewer than 4,096 elements keep 32-bit moments.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from verl.errors import ConfigError, MissingDependencyError
from verl.notices import notice

TORCH = ("adamw", "sgd", "adafactor")
BITSANDBYTES = {"adamw8bit": "AdamW8bit", "pagedadamw8bit": "PagedAdamW8bit", "pagedadamw": "PagedAdamW"}
OPTIMIZERS = (*TORCH, *BITSANDBYTES)
SLOTS = {
    "adamw": {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    "sgd": {"momentum_buffer"},
    "adafactor": {"step", "row_var", "col_var", "variance"},
}
_BLOCKWISE = {"step", "state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2"}


@dataclass(frozen=True)
class OptimizerSettings:
    """Optimizer, schedule and guards of one role. Steps of the schedule are training steps.

    ``offload``: masters, gradient sums and moments lie in host memory, and the optimizer runs on the CPU.
    ``override``: more arguments of the optimizer's constructor, by name.
    """

    lr: float
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    kind: str = "adamw"
    schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    min_lr_ratio: float = 0.0
    num_cycles: float = 0.5
    grad_clip: float = 1.0
    max_nonfinite_steps: int = 5
    offload: bool = False
    override: Mapping[str, Any] = field(default_factory=dict)


def make_optimizer(parameters: Iterable[torch.nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """The optimizer over the masters.

    Raises:
        MissingDependencyError: it is one of bitsandbytes' and the package is not installed.
        ConfigError: ``override`` has an argument that the optimizer does not take, or a value that it refuses.
    """
    parameters = list(parameters)
    make, arguments = _constructor(parameters, settings)
    try:
        return make(parameters, **{**arguments, **settings.override})
    except (TypeError, ValueError) as error:
        if not settings.override:
            raise
        given = ", ".join(f"{name}={value}" for name, value in settings.override.items())
        raise ConfigError(
            f"optim.override_optimizer_config ({given}) does not suit the optimizer {make.__name__}: {error}"
        ) from error


def _constructor(parameters, s: OptimizerSettings) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    arguments: dict[str, Any] = {"lr": s.lr, "weight_decay": s.weight_decay}
    if s.kind == "sgd":
        return torch.optim.SGD, arguments
    if s.kind == "adafactor":
        return torch.optim.Adafactor, arguments
    arguments |= {"betas": s.betas, "eps": s.eps}
    if s.kind in BITSANDBYTES:
        _need_bitsandbytes(BITSANDBYTES[s.kind])
        import bitsandbytes

        name = BITSANDBYTES[s.kind]
        if name.startswith("Paged") and parameters[0].device.type == "cpu":
            name = name.removeprefix("Paged")
            notice(f"Its moments lie in host memory already, so {name} stands in for the optimizer Paged{name}.")
        return getattr(bitsandbytes.optim, name), arguments
    fused = parameters[0].device.type in ("cpu", "cuda")
    return torch.optim.AdamW, {**arguments, "fused": fused or None}


def _need_bitsandbytes(name: str) -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingDependencyError("bitsandbytes", f"The optimizer {name} (optim.optimizer)")


def state_tensors(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the optimizer keeps of one parameter, as tensors by slot; counters become small tensors."""
    return {
        slot: value if torch.is_tensor(value) else torch.tensor(value)
        for slot, value in optimizer.state.get(parameter, {}).items()
    }


def is_of(kind: str, slots: Iterable[str]) -> bool:
    """Whether these slots are those of this kind of optimizer: a checkpoint may come from a run with another."""
    return set(slots) <= SLOTS.get(kind, _BLOCKWISE)


def restore_state(
    optimizer: torch.optim.Optimizer, kind: str, parameter: torch.Tensor, saved: Mapping[str, torch.Tensor]
) -> None:
    """Put :func:`state_tensors` back. Moments follow their parameter's device and, if in full width, its type."""
    if not saved:
        return
    state = optimizer.state[parameter]
    if kind in BITSANDBYTES:
        _restore_blockwise(optimizer, parameter, state, saved)
        return
    for slot, value in saved.items():
        moment = value.shape == parameter.shape and slot != "step"
        # the step counter stays the small fp32 tensor that it is
        state[slot] = value.to(parameter.device, parameter.dtype if moment else value.dtype, copy=True)


def _restore_blockwise(optimizer, parameter, state, saved: Mapping[str, torch.Tensor]) -> None:
    """The library makes its buffers (paged ones lie in special memory), and they are written into."""
    if not state:
        [place] = [
            (g, p, group)
            for g, group in enumerate(optimizer.param_groups)
            for p, one in enumerate(group["params"])
            if one is parameter
        ]
        optimizer.init_state(place[2], parameter, place[0], place[1])
    for slot, value in saved.items():
        if slot == "step":
            state[slot] = int(value)
        else:
            state[slot] = state[slot].to(parameter.device) if slot.startswith("qmap") else state[slot]
            state[slot].copy_(value)
