"""The gradient does not depend on how the batch was cut: micro-batches, padding, order, garbage, ranks (DESIGN 5)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from tiny_models import sample_batch, save_tiny_model

from verl.models import linear_logprob
from verl.models.packing import packed_lengths
from verl.models.settings import LoraSettings, ModelSettings
from verl.single_controller import LocalWorkerGroup
from verl.train_engine.plan import plan_for
from verl.train_engine.torch_engine import OptimizerSettings
from verl.workers.actor import Actor
from verl.workers.critic import Critic
from verl.workers.settings import ActorSettings, CriticSettings, Cut, RolloutSettings


@dataclass
class LossName:
    loss_mode: str = "vanilla"
    clip_cov_ratio: float = 0.2
    clip_cov_lb: float = -5.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 0.2
    ppo_kl_coef: float = 0.1


@dataclass
class LossConfig:
    loss_agg_mode: str = "token-mean"
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    entropy_coeff: float = 0.01
    calculate_entropy: bool = False
    use_kl_loss: bool = True
    kl_loss_coef: float = 0.1
    kl_loss_type: str = "low_var_kl"
    loss_scale_factor: float | None = None
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    policy_loss: LossName = field(default_factory=LossName)


WHOLE = Cut()
LORA = LoraSettings(rank=4, alpha=8)
OPTIMIZER = OptimizerSettings(lr=1e-2, kind="sgd", weight_decay=0.0, grad_clip=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("gpt2") / "m", "gpt2"))


def actor_settings(folder, *, dtype="float64", cut=WHOLE, **loss):
    mode = LossName(loss.pop("loss_mode", "vanilla"))
    return ActorSettings(
        model=ModelSettings(folder, dtype=dtype),
        optimizer=OPTIMIZER,
        rollout=RolloutSettings(response_width=8),
        loss=LossConfig(policy_loss=mode, **loss),
        update_cut=cut,
        log_prob_cut=cut,
    )


def recorded_batch(dtype=torch.float64, *, seed=0, garbage=False, extra_prompt=0, extra_response=0, order=None):
    """Ten recorded rows of three prompts with unequal lengths, one of them empty, with observation tokens."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(5, 90, n).tolist() for n in (3, 9, 5)]
    rows = []
    for i in range(10):
        length = [7, 2, 1, 5, 3, 0, 6, 4, 7, 2][i]
        mask = [1] * length
        if length > 5:
            mask[2] = 0
        rows.append((prompts[i % 3], rng.integers(5, 90, length).tolist(), mask))
    order = list(range(10)) if order is None else order
    batch = sample_batch([rows[i] for i in order], extra_prompt=extra_prompt, extra_response=extra_response)
    width, real = batch.batch["responses"].shape[1], 7
    noise = {
        k: torch.from_numpy(rng.normal(size=(10, real))).to(dtype)
        for k in ("advantages", "old", "ref", "values", "returns")
    }
    keep = batch.batch["response_mask"].bool()
    old = -3 + 0.3 * noise["old"]
    for name, grid in (
        ("advantages", noise["advantages"]), ("old_log_probs", old), ("ref_log_prob", old + 0.1 * noise["ref"]),
        ("rollout_log_probs", old), ("values", noise["values"]), ("returns", noise["returns"]),
    ):  # fmt: skip
        full = torch.zeros(10, width, dtype=dtype)
        full[:, :real] = grid[order]
        batch.batch[name] = full.masked_fill(~keep, float("nan") if garbage else 0.0)
    return batch


def updated(group, batch, *, steps=2, prompts=2):
    """The weights after updates of all mini-batches, and the metrics."""
    plan = plan_for(batch, packed_lengths(batch), mini_batch_prompts=prompts, epochs=steps)
    metrics = group.update(batch, plan)
    states = [w.engine.state_dict() for w in group.workers]
    return states, metrics


def close(one, two, tolerance):
    for name, tensor in one.items():
        if name.startswith("live/"):
            scale = tensor.double().norm().clamp_min(1e-12)
            assert (tensor.double() - two[name].double()).norm() / scale < tolerance, name


LOSS_MODES = ["vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo"]
AGG_MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@pytest.mark.parametrize("mode", LOSS_MODES)
def test_micro_batches_padding_garbage_order_and_ranks_change_nothing(folder, mode):
    settings = actor_settings(folder, loss_mode=mode)
    [reference], metrics = updated(LocalWorkerGroup(Actor, settings), recorded_batch())
    initial = LocalWorkerGroup(Actor, settings).state_dict()
    assert any(not torch.equal(initial[k], reference[k]) for k in initial if k.startswith("live/"))

    def check(what, group, batch):
        states, others = updated(group, batch)
        for state in states:
            close(reference, state, 1e-10)
        for name in ("actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/ppo_kl", "actor/grad_norm"):
            assert others[name] == pytest.approx(metrics[name], rel=1e-6, abs=1e-8), (what, name)

    check("micro rows", LocalWorkerGroup(Actor, replace(settings, update_cut=Cut(max_rows=2))), recorded_batch())
    check("micro tokens", LocalWorkerGroup(Actor, replace(settings, update_cut=Cut(max_tokens=17))), recorded_batch())
    check("padding", LocalWorkerGroup(Actor, settings), recorded_batch(extra_prompt=4, extra_response=3))
    check("garbage", LocalWorkerGroup(Actor, settings), recorded_batch(garbage=True))
    check("3 ranks", LocalWorkerGroup(Actor, settings, world_size=3), recorded_batch())
    check(
        "2 ranks, cut",
        LocalWorkerGroup(Actor, replace(settings, update_cut=Cut(max_rows=1)), world_size=2),
        recorded_batch(),
    )


@pytest.mark.parametrize("agg", AGG_MODES)
def test_every_aggregation_mode_is_invariant(folder, agg):
    settings = actor_settings(folder, loss_agg_mode=agg)
    [reference], _ = updated(LocalWorkerGroup(Actor, settings), recorded_batch())
    cut = replace(settings, update_cut=Cut(max_rows=1))
    for state in updated(LocalWorkerGroup(Actor, cut, world_size=2), recorded_batch())[0]:
        close(reference, state, 1e-10)


def test_fp32_gradients_agree_to_5e_6_of_their_norm(folder):
    settings = actor_settings(folder, dtype="float32")
    gradients = []
    for cut, ranks in ((Cut(), 1), (Cut(max_rows=1), 1), (Cut(max_tokens=20), 2)):
        group = LocalWorkerGroup(
            Actor,
            replace(settings, update_cut=cut, optimizer=replace(OPTIMIZER, lr=1.0, grad_clip=0.0)),
            world_size=ranks,
        )
        before = {k: v.clone() for k, v in group.state_dict().items()}
        states, _ = updated(group, recorded_batch(torch.float32), steps=1, prompts=3)
        gradients.append({k: before[k].double() - states[0][k].double() for k in before if k.startswith("live/")})
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            # with lr 1 the update is the gradient; the subtraction itself costs fp32 rounding of the weights
            rounding = 1.2e-7 * before[name].double().norm()
            assert (gradient - other[name]).norm() <= 5e-6 * gradient.norm() + rounding, name


def test_the_critic_is_invariant_too(folder):
    settings = CriticSettings(ModelSettings(folder, dtype="float64"), OPTIMIZER)
    [reference], metrics = updated(LocalWorkerGroup(Critic, settings), recorded_batch())
    assert metrics["critic/vf_loss"] > 0
    for changed, ranks, batch in (
        (Cut(max_rows=1), 1, recorded_batch(extra_prompt=3, garbage=True)),
        (Cut(max_tokens=15), 3, recorded_batch(extra_response=2)),
    ):
        group = LocalWorkerGroup(Critic, replace(settings, update_cut=changed), world_size=ranks)
        for state in updated(group, batch)[0]:
            close(reference, state, 1e-10)


def test_rows_without_advantage_cost_nothing_and_change_nothing(folder):
    settings = actor_settings(folder, entropy_coeff=0.0, use_kl_loss=False)
    batch = recorded_batch()
    batch.batch["advantages"][3:] = 0
    states, metrics = updated(LocalWorkerGroup(Actor, settings), batch, steps=1)
    assert metrics["actor/skipped_rows"] == 7
    forced = replace(settings, loss=replace(settings.loss, calculate_entropy=True))
    whole, everything = updated(LocalWorkerGroup(Actor, forced), batch, steps=1)
    assert everything["actor/skipped_rows"] == 0
    close(states[0], whole[0], 1e-12)


def test_without_old_log_probs_the_ratio_is_exactly_one(folder):
    batch = recorded_batch()
    del batch.batch["old_log_probs"]
    _, metrics = updated(
        LocalWorkerGroup(Actor, actor_settings(folder, cut=Cut(max_rows=1))), batch, steps=1, prompts=3
    )
    assert metrics["actor/ppo_kl"] == 0 and metrics["actor/pg_clipfrac"] == 0
    assert metrics["training/rollout_probs_diff_mean"] > 0


def test_a_nan_gradient_skips_the_step_and_leaves_the_weights_alone(folder):
    batch = recorded_batch()
    batch.batch["advantages"][0, 0] = float("nan")
    group = LocalWorkerGroup(Actor, actor_settings(folder))
    before = {k: v.clone() for k, v in group.state_dict().items() if k.startswith("live/")}
    _, metrics = updated(group, batch, steps=1, prompts=3)
    assert metrics["actor/skipped_steps"] == 1 and not np.isfinite(metrics["actor/grad_norm"])
    for name, tensor in before.items():
        assert torch.equal(tensor, group.state_dict()[name])


def test_training_in_scaled_float16_follows_fp32(folder):
    """Live weights in float16, masters in fp32: five updates within 2 % of the fp32 movement of the masters."""
    moved = {}
    for dtype in ("float32", "float16"):
        settings = actor_settings(folder, dtype=dtype, cut=Cut(max_rows=3))
        settings = replace(settings, optimizer=replace(OPTIMIZER, lr=0.05, grad_clip=0.0))
        group = LocalWorkerGroup(Actor, settings)
        engine = group.workers[0].engine
        before = {k: v.detach().clone() for k, v in engine.weights.named()}
        _, metrics = updated(group, recorded_batch(torch.float32), steps=5, prompts=3)
        assert metrics["actor/skipped_steps"] == 0 and engine.scaler.enabled == (dtype == "float16")
        moved[dtype] = torch.cat([(v.detach() - before[k]).flatten() for k, v in engine.weights.named()])
    assert (moved["float16"] - moved["float32"]).norm() < 0.02 * moved["float32"].norm()


def five_updates(folder, batch, *, world_size=1, prepare=None, **changes):
    """fp32 weights after five updates on recorded rollouts. ``prepare`` may change the worker's model."""
    settings = actor_settings(
        folder, dtype="float32", cut=changes.pop("cut", Cut(max_rows=4)), **changes.pop("loss", {})
    )
    settings = replace(settings, optimizer=replace(OPTIMIZER, lr=0.05))
    settings = replace(settings, model=replace(settings.model, **changes))
    group = LocalWorkerGroup(Actor, settings, world_size=world_size)
    states = [worker.engine.state_dict() for worker in group.workers]
    start = {name: tensor.clone() for name, tensor in states[0].items() if name.startswith("live/")}
    states, metrics = updated(group, batch, steps=5, prompts=3)
    assert metrics["actor/skipped_steps"] == 0
    return {name: states[-1][name].double() - start[name].double() for name in start}


def same_movement(one, two):
    """Each tensor moved the same way: within 5e-6 of its movement's norm a step, and fp32 rounding of the weights."""
    for name, movement in one.items():
        assert (movement - two[name]).norm() <= 5 * 5e-6 * movement.norm() + 3e-6, name


@pytest.mark.parametrize(
    "switch",
    [
        {"gradient_checkpointing": True},
        {"attention": "eager"},
        {"cut": Cut(max_rows=1)},
        {"cut": Cut(max_tokens=20), "world_size": 2},
        {"lora": LORA, "cut": Cut(max_rows=1)},
        {"lora": LORA, "gradient_checkpointing": True},
        {"lora": LORA, "world_size": 2},
    ],
    ids=lambda switch: "-".join(switch),
)
def test_five_fp32_updates_do_not_depend_on_a_switch_of_speed_or_memory(folder, switch):
    plain = {key: value for key, value in switch.items() if key == "lora"}
    batch = recorded_batch(torch.float32)
    reference = five_updates(folder, batch, **plain)
    assert any(movement.norm() > 1e-3 for movement in reference.values())
    same_movement(reference, five_updates(folder, batch, **switch))


def test_five_fp32_updates_do_not_depend_on_what_is_kept_for_the_backward_pass(folder, monkeypatch):
    batch = recorded_batch(torch.float32)
    loss = {"entropy_coeff": 0.0}  # with an entropy bonus the logits are always computed again
    kept = five_updates(folder, batch, loss=dict(loss))
    monkeypatch.setattr(linear_logprob, "_kept_bytes", lambda device: 0)
    monkeypatch.setattr(linear_logprob, "CHUNK_ELEMENTS", 7 * 96)
    same_movement(kept, five_updates(folder, batch, loss=dict(loss)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masters_and_moments_in_host_memory_change_nothing(folder, dtype):
    """On a CPU the host is the device, so offload must give the same bits; live weights are written from the copies."""
    states = []
    for offload in (False, True):
        settings = actor_settings(folder, dtype=dtype, cut=Cut(max_rows=4))
        settings = replace(settings, optimizer=OptimizerSettings(lr=1e-2, offload=offload))
        group = LocalWorkerGroup(Actor, settings)
        pointers = [p.data_ptr() for p in group.workers[0].model.parameters()]
        [state], _ = updated(group, recorded_batch(torch.float32), steps=5, prompts=3)
        assert pointers == [p.data_ptr() for p in group.workers[0].model.parameters()]
        again = LocalWorkerGroup(Actor, settings)
        again.load_state_dict(state)
        states += [state, updated(again, recorded_batch(torch.float32), steps=1)[0][0]]
    for here, there in ((states[0], states[2]), (states[1], states[3])):
        for name, tensor in here.items():
            assert torch.equal(tensor, there[name]), name
    assert ("master/transformer.wte.weight" in states[0]) == (dtype == "bfloat16")
    assert "master/transformer.wte.weight" in states[2]
