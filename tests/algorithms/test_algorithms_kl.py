"""KL estimators, the KL loss, the KL penalty in the reward, the coefficient's controllers, entropy, value loss."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms import core_algos
from verl.algorithms.aggregation import GlobalCounts
from verl.algorithms.entropy import entropy_from_logits, entropy_loss
from verl.algorithms.kl import kl_loss, kl_penalty
from verl.algorithms.kl_controller import AdaptiveKLController, get_kl_controller
from verl.algorithms.rewards_shaping import apply_kl_penalty
from verl.algorithms.value_loss import value_loss
from verl.errors import ConfigError

torch.set_num_threads(1)
NAMES = ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
NAMES += [name + "+" for name in NAMES]
POISON = [math.nan, math.inf, -math.inf, 1e9]


def value_and_grad(logp, ref, name):
    leaf = torch.tensor([[logp]], requires_grad=True)
    value = kl_penalty(leaf, torch.tensor([[ref]]), name)
    value.sum().backward()
    return float(value.detach()), float(leaf.grad)


@pytest.mark.parametrize(
    ("logp", "ref", "right"),
    [
        (-1.0, -2.0, {"k1": 1.0, "k2": 0.5, "abs": 1.0, "k3": 0.36788}),
        (-2.0, -1.0, {"k1": -1.0, "k2": 0.5, "abs": 1.0, "k3": 0.71828}),
    ],
)
def test_b14_values(logp, ref, right):
    for name, value in right.items():
        assert value_and_grad(logp, ref, name)[0] == pytest.approx(value, abs=1e-5)
        assert value_and_grad(logp, ref, name + "+")[0] == pytest.approx(value, abs=1e-5)


def test_b14_gradients():
    assert value_and_grad(-1.0, -2.0, "k3") == pytest.approx((0.36788, 0.63212), abs=1e-5)
    for name in ("k3+", "low_var_kl+", "k1+", "abs+", "k2", "mse+"):
        assert value_and_grad(-1.0, -2.0, name)[1] == pytest.approx(1.0)
    assert value_and_grad(-1.0, -2.0, "kl") == value_and_grad(-1.0, -2.0, "k1")
    assert value_and_grad(-1.0, -2.0, "mse") == value_and_grad(-1.0, -2.0, "k2")


def test_b13_k3_is_clamped():
    value, grad = value_and_grad(-60.0, -1.0, "low_var_kl")
    assert value == 10.0 and math.isfinite(grad)
    assert all(math.isfinite(x) for x in value_and_grad(-1e4, 0.0, "k3+"))


@given(logp=st.floats(-50, 0), ref=st.floats(-50, 0))
@settings(max_examples=50, deadline=None)
def test_k3_is_never_negative(logp, ref):
    assert value_and_grad(logp, ref, "k3")[0] >= 0


def test_unknown_estimators_are_refused():
    for name in ("full", "k4", ""):
        with pytest.raises(ConfigError, match="low_var_kl"):
            kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("poison", POISON)
def test_garbage_at_masked_positions(name, poison):
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
    logp = torch.tensor([[-1.0, poison, -2.0], [poison] * 3], requires_grad=True)
    ref = torch.tensor([[-2.0, poison, -1.5], [poison] * 3])
    loss, metrics = kl_loss(logp, ref, mask, "token-mean", name)
    loss.backward()
    clean = kl_penalty(torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.5]), name).mean()
    assert float(loss.detach()) == pytest.approx(float(clean), abs=1e-6)
    assert metrics["actor/kl_loss"] == pytest.approx(float(clean), abs=1e-6)
    assert logp.grad.isfinite().all() and (logp.grad[mask == 0] == 0).all()


def test_b15_the_kl_loss_pulls_towards_the_reference():
    logp = torch.tensor([[-1.0, -3.0]], requires_grad=True)
    loss, _ = kl_loss(logp, torch.tensor([[-2.0, -2.0]]), torch.ones(1, 2), counts=GlobalCounts(4, 2))
    loss.backward()
    assert logp.grad[0, 0] > 0 > logp.grad[0, 1]  # a step down the gradient lowers the first and raises the second


def test_b29_no_penalty_at_observation_tokens():
    scores, mask = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[1, 0, 1]])
    old, ref = torch.tensor([[-1.0, math.nan, -1.0]]), torch.tensor([[-2.0, 5.0, -1.5]])
    rewards, observed, metrics = apply_kl_penalty(scores, old, ref, mask, kl_coef=0.1)
    assert rewards[0].tolist() == pytest.approx([-0.1, 0.0, 0.95])
    assert observed == pytest.approx(0.75)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.75)
    assert metrics["actor/reward_kl_penalty_coeff"] == pytest.approx(0.1)


def test_b31_adaptive_controller():
    controller = get_kl_controller({"type": "adaptive", "kl_coef": 0.001, "target_kl": 0.1, "horizon": 10_000})
    controller.update(0.3, 1024)
    assert controller.value == pytest.approx(0.00102048)
    other = AdaptiveKLController(1.0, 0.1, 10_000)
    other.load_state_dict(controller.state_dict())
    other.update(0.0, 1024)
    assert other.value == pytest.approx(0.00102048 * (1 - 0.2 * 0.1024))
    other.update(math.nan, 1024)
    assert math.isfinite(other.value)


def test_fixed_controller_and_wrong_types():
    controller = get_kl_controller({"kl_coef": 0.02})
    controller.update(9.0, 1024)
    assert controller.value == 0.02
    with pytest.raises(ConfigError, match="fixed or adaptive"):
        get_kl_controller({"type": "auto"})
    with pytest.raises(ConfigError, match="horizon=0"):
        get_kl_controller({"type": "adaptive", "horizon": 0})


def test_entropy():
    assert float(entropy_from_logits(torch.zeros(4))) == pytest.approx(math.log(4))
    assert float(entropy_from_logits(torch.tensor([0.0, 0.0, -math.inf]))) == pytest.approx(math.log(2))
    assert float(entropy_from_logits(torch.tensor([1e4, 0.0]))) == pytest.approx(0.0)
    logits = torch.randn(1, 2, 5, generator=torch.Generator().manual_seed(0))
    p = logits.softmax(-1)
    right = float(-(p * p.log()).sum(-1)[0, 0])
    dirty = logits.clone()
    dirty[0, 1] = math.nan
    dirty.requires_grad_()
    loss = core_algos.compute_entropy_loss(dirty, torch.tensor([[1, 0]]))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(right, abs=1e-6)
    assert dirty.grad.isfinite().all()
    _, metrics = entropy_loss(torch.tensor([[right, math.nan]]), torch.tensor([[1, 0]]))
    assert metrics["actor/entropy"] == pytest.approx(right)


@pytest.mark.parametrize("poison", POISON)
def test_value_loss(poison):
    mask = torch.tensor([[1, 1, 0]])
    vpreds = torch.tensor([[2.0, 0.1, poison]], requires_grad=True)
    values, returns = torch.tensor([[0.0, 0.0, poison]]), torch.tensor([[0.0, 1.0, poison]])
    loss, metrics = value_loss(vpreds, returns, values, mask, cliprange_value=0.5)
    loss.backward()
    # token 0: max(2^2, 0.5^2) = 4; token 1: inside the clip range, 0.9^2
    assert float(loss.detach()) == pytest.approx(0.5 * (4 + 0.81) / 2)
    assert vpreds.grad[0].tolist() == pytest.approx([1.0, -0.45, 0.0])
    assert metrics["critic/vf_clipfrac"] == 0.0
    assert metrics["critic/vpred_mean"] == pytest.approx(1.05)
    # the clipped error is the larger one when the prediction has moved towards the return by more than the range
    moved, metrics = value_loss(torch.tensor([[1.0]]), torch.tensor([[1.0]]), torch.zeros(1, 1), torch.ones(1, 1), 0.5)
    assert float(moved) == pytest.approx(0.5 * 0.25)
    assert metrics["critic/vf_clipfrac"] == 1.0


def test_value_loss_under_verls_name():
    mask = torch.ones(2, 2)
    args = (torch.ones(2, 2), torch.zeros(2, 2), torch.ones(2, 2), mask, 0.5)
    assert float(core_algos.compute_value_loss(*args)[0]) == 0.5
    assert float(core_algos.compute_value_loss(*args, batch_num_tokens=8, dp_size=2)[0]) == 0.5
    assert float(core_algos.compute_value_loss(*args, batch_num_tokens=8)[0]) == 0.25
