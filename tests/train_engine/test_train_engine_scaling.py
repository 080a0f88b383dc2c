"""Loss scaling for float16: the scaler's logic, an overflow that is taken again, and training in float16."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from verl.hardware import Device, choose
from verl.metrics import Metrics
from verl.train_engine.scaling import GROWTH_INTERVAL, INITIAL, LossScaler
from verl.train_engine.torch_engine import OptimizerSettings, TorchEngine

SGD = OptimizerSettings(lr=0.5, kind="sgd", weight_decay=0.0, grad_clip=0.0)


class Factor(nn.Module):
    """loss = factor * x * weight, whose gradient is factor * x."""

    def __init__(self, dtype=torch.float16):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=dtype))


def loss_of(module, factor):
    return lambda x: ((module.weight * x).float().sum() * factor, Metrics())


def test_the_scale_grows_slowly_and_falls_fast():
    scaler = LossScaler(enabled=True)
    for _ in range(GROWTH_INTERVAL):
        scaler.step_succeeded()
    assert scaler.scale == 2 * INITIAL
    lowered = 0
    while scaler.lower():
        lowered += 1
    assert scaler.scale == 1 and lowered <= 6
    other = LossScaler(enabled=True)
    other.load(torch.tensor([512.0, 3.0], dtype=torch.float64))
    assert (other.scale, other.good_steps) == (512.0, 3)
    assert not LossScaler(enabled=False).lower()


def test_a_gradient_too_small_for_float16_survives():
    module = Factor()
    engine = TorchEngine(module, SGD)
    x = torch.full((4,), 1.0, dtype=torch.float16)
    report = engine.train_step([x], loss_of(module, 1e-9))  # float16's smallest number is 6e-8
    assert report.grad_norm == pytest.approx(2e-9, rel=1e-3) and not report.skipped


def test_an_overflow_is_taken_again_with_a_lower_scale_and_loses_nothing():
    module = Factor()
    engine = TorchEngine(module, SGD)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float16)
    report = engine.train_step([x, x], loss_of(module, 1.0))
    assert not report.skipped and engine.skipped_total == 0
    assert engine.scaler.scale == INITIAL / 16
    torch.testing.assert_close(engine.weights.masters["weight"].detach(), 1 - 0.5 * 2 * x.float())


def test_a_nan_is_not_the_scales_fault():
    module = Factor()
    engine = TorchEngine(module, SGD)
    x = torch.full((4,), float("nan"), dtype=torch.float16)
    assert engine.train_step([x], loss_of(module, 1.0)).skipped
    assert engine.scaler.scale == INITIAL and engine.skipped_total == 1
    assert torch.equal(module.weight.detach(), torch.ones(4, dtype=torch.float16))


def test_the_scale_is_part_of_the_state():
    module = Factor()
    engine = TorchEngine(module, SGD)
    engine.train_step([torch.ones(4, dtype=torch.float16)], loss_of(module, 2.0))
    other = TorchEngine(Factor(), SGD)
    other.load_state_dict(engine.state_dict())
    assert (other.scaler.scale, other.scaler.good_steps) == (engine.scaler.scale, 1)
    wide = TorchEngine(Factor(torch.float32), SGD)
    wide.load_state_dict({**engine.state_dict(), "counters": engine.state_dict()["counters"][:4]})
    assert wide.scaler.scale == 1.0 and wide.learned_tokens["update"] == 0


def test_a_turing_card_trains_in_scaled_float16():
    choice = choose(Device("cuda", "Tesla T4", (7, 5), 16 << 30), "2.13.0", {"triton"})
    assert (choice.dtype, choice.master_dtype, choice.grad_scaling) == ("float16", "float32", True)
    assert choice.attention == "sdpa"


def test_a_run_that_scaled_nothing_does_not_hand_its_scale_on():
    module = Factor(torch.bfloat16)
    engine = TorchEngine(module, SGD)
    engine.train_step([torch.ones(4, dtype=torch.bfloat16)], loss_of(module, 2.0))
    old = torch.tensor([1.0, 0.0], dtype=torch.float64)  # as earlier versions wrote it
    for state in (engine.state_dict(), {**engine.state_dict(), "loss_scale": old}):
        other = TorchEngine(Factor(torch.float16), SGD)
        other.load_state_dict(state)
        assert other.scaler.scale == INITIAL
