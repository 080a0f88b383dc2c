"""Optimizers by name: what they keep, that resuming is as if there had been no stop, and what goes wrong in words."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from verl import notices
from verl.config import load_config
from verl.config.names import OPTIMIZERS as NAMES
from verl.errors import ConfigError, MissingDependencyError
from verl.metrics import Metrics
from verl.train_engine.optimizers import BITSANDBYTES, OPTIMIZERS, OptimizerSettings
from verl.train_engine.torch_engine import TorchEngine

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="the package bitsandbytes is not installed"
)
EVERY = [pytest.param(kind, marks=needs_bitsandbytes if kind in BITSANDBYTES else ()) for kind in OPTIMIZERS]


class Net(nn.Module):
    """A matrix large enough for 8-bit moments, and a vector that is not."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter((torch.randn(128, 64, generator=generator) / 8).to(dtype))
        self.vector = nn.Parameter(torch.zeros(128, dtype=dtype))

    def forward(self, x):
        return torch.tanh(x @ self.matrix.t() + self.vector)


def engine_of(kind, dtype=torch.float32, **changes):
    return TorchEngine(Net(dtype), OptimizerSettings(lr=1e-2, kind=kind, grad_clip=0.0, **changes))


def train(engine, steps, first=0):
    """The losses of ``steps`` optimizer steps on one fixed task, each with data of its own."""
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 + step)
        x = torch.randn(32, 64, generator=generator).to(engine.module.matrix.dtype)
        loss = lambda x: ((engine.module(x).float() - 0.5).square().mean(), Metrics())  # noqa: E731
        losses.append(float(loss(x)[0].detach()))
        engine.train_step([x], loss)
    return losses


def test_the_names_of_the_configuration_are_those_of_the_engine():
    assert {name.lower() for name in NAMES} == set(OPTIMIZERS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", EVERY)
def test_resuming_is_as_if_there_had_been_no_stop(kind, dtype):
    straight = engine_of(kind, dtype)
    train(straight, 6)
    first = engine_of(kind, dtype)
    train(first, 3)
    state = load(save({name: tensor.contiguous() for name, tensor in first.state_dict().items()}))  # no pickle
    again = engine_of(kind, dtype)
    pointers = [p.data_ptr() for p in again.module.parameters()]
    again.load_state_dict(state)
    train(again, 3, first=3)
    assert pointers == [p.data_ptr() for p in again.module.parameters()]
    for name, tensor in straight.state_dict().items():
        if name != "counters":
            assert torch.equal(tensor, again.state_dict()[name]), name


@needs_bitsandbytes
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kind", ["adamw8bit", "pagedadamw8bit"])
def test_eight_bit_moments_take_a_byte_and_train_like_the_others(kind, offload):
    eight, full = engine_of(kind, torch.bfloat16, offload=offload), engine_of("adamw", torch.bfloat16)
    losses, expected = train(eight, 40), train(full, 40)
    state = eight.state_dict()
    for slot in ("state1", "state2"):
        assert state[f"optimizer/{slot}/matrix"].dtype == torch.uint8
        assert state[f"optimizer/{slot}/vector"].dtype == torch.float32  # too small to be worth it
    assert state["master/matrix"].dtype == torch.float32
    assert torch.equal(state["master/matrix"].bfloat16(), state["live/matrix"])
    assert expected[-1] < 0.2 * expected[0]
    for mine, theirs in zip(losses, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=0.03 * expected[0])


@needs_bitsandbytes
def test_a_checkpoint_of_another_optimizer_gives_its_weights_and_a_notice():
    notices.reset()
    eight = engine_of("adamw8bit")
    train(eight, 2)
    plain = engine_of("adamw")
    plain.load_state_dict(eight.state_dict())
    assert torch.equal(plain.module.matrix, eight.module.matrix)
    train(plain, 1)
    assert any("another optimizer than adamw" in line for line in notices.seen())


def test_arguments_of_the_constructor_can_be_given():
    engine = engine_of("sgd", override={"momentum": 0.9})
    train(engine, 1)
    assert "optimizer/momentum_buffer/matrix" in engine.state_dict()
    with pytest.raises(ConfigError, match=r"override_optimizer_config \(speed=2\) does not suit the optimizer SGD"):
        engine_of("sgd", override={"speed": 2})
    config = load_config(["actor_rollout_ref.actor.optim.override_optimizer_config={momentum: 0.9}"])
    assert config.actor_rollout_ref.actor.optim.override_optimizer_config == {"momentum": 0.9}


def test_a_missing_library_is_one_sentence(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"AdamW8bit .* needs the package 'bitsandbytes'"):
        engine_of("adamw8bit")
