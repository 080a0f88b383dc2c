"""Training on a CUDA GPU: memory that really runs out, optimizers in 8 bits and on the host, weights that leave."""

from __future__ import annotations

import gc
import importlib.util
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import make_model, sample_batch, save_tiny_model

from verl import notices
from verl.algorithms.entropy import entropy_loss
from verl.algorithms.kl import kl_loss
from verl.algorithms.registry import get_policy_loss_fn
from verl.config import load_config, resolve
from verl.errors import TrainingError
from verl.metrics import Metrics
from verl.models.offload import HostWeights
from verl.models.packing import packed_lengths
from verl.models.settings import ModelSettings
from verl.single_controller import LocalWorkerGroup
from verl.train_engine.optimizers import BITSANDBYTES, OPTIMIZERS, OptimizerSettings
from verl.train_engine.plan import plan_for
from verl.train_engine.torch_engine import TorchEngine
from verl.workers.actor import Actor
from verl.workers.critic import Critic
from verl.workers.probs_diff import probs_difference
from verl.workers.settings import ActorSettings, CriticSettings, Cut, RolloutSettings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="the package bitsandbytes is not installed"
)
EVERY = [pytest.param(kind, marks=needs_bitsandbytes if kind in BITSANDBYTES else ()) for kind in OPTIMIZERS]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "max_position_embeddings": 2048}
VOCABULARY = 32768


@pytest.fixture(autouse=True)
def clean():
    notices.reset()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m"
    return str(save_tiny_model(path, "qwen2", vocab_size=VOCABULARY, **SIZES))


def dtype_here() -> str:
    return "bfloat16" if torch.cuda.get_device_capability() >= (8, 0) else "float32"


def settings_of(folder: str, cut: Cut, **optimizer) -> ActorSettings:
    loss = resolve(load_config(["actor_rollout_ref.actor.calculate_entropy=false"])).actor_rollout_ref.actor
    return ActorSettings(
        model=ModelSettings(folder, dtype=dtype_here(), device="cuda"),
        optimizer=OptimizerSettings(**{"lr": 1e-3, **optimizer}),
        rollout=RolloutSettings(response_width=512),
        loss=loss,
        update_cut=cut,
        log_prob_cut=cut,
    )


def big_batch(rows: int = 48, length: int = 480):
    rng = np.random.default_rng(0)
    made = []
    for i in range(rows):
        prompt = np.random.default_rng(i // 4).integers(5, VOCABULARY, 32).tolist()
        made.append((prompt, rng.integers(5, VOCABULARY, length).tolist(), [1] * length))
    batch = sample_batch(made)
    shape = batch.batch["responses"].shape
    for key in ("advantages", "old_log_probs", "rollout_log_probs", "values", "returns"):
        noise = torch.from_numpy(rng.normal(size=shape)).float()
        batch.batch[key] = noise if key in ("advantages", "values", "returns") else -10 + 0.1 * noise
    return batch


def updated(group, batch) -> tuple[dict[str, torch.Tensor], Metrics]:
    plan = plan_for(batch, packed_lengths(batch), mini_batch_prompts=100, epochs=1)
    metrics = group.update(batch, plan)
    return {name: tensor.clone() for name, tensor in group.state_dict().items()}, metrics


def leave_only(room: int) -> None:
    """From now on this process may hold ``room`` bytes more than it does."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)


@pytest.mark.parametrize("offload", [False, True])
def test_an_update_survives_a_gpu_that_is_really_full(folder, offload):
    batch = big_batch()  # 24,000 tokens, whose logits alone take 1.5 GB in half precision
    whole = Cut(max_tokens=10**6)
    group = LocalWorkerGroup(Actor, settings_of(folder, whole, offload=offload))
    leave_only(900 << 20)
    state, metrics = updated(group, batch)
    learned = group.workers[0].engine.learned_tokens["update"]
    assert 0 < learned < 24000
    assert any("Out of memory in the update of the actor" in line for line in notices.seen())
    torch.cuda.set_per_process_memory_fraction(1.0)
    calm = LocalWorkerGroup(Actor, settings_of(folder, Cut(max_tokens=learned), offload=offload))
    expected, same = updated(calm, batch)
    assert metrics["actor/pg_loss"] == pytest.approx(same["actor/pg_loss"], rel=1e-3, abs=1e-4)
    for name, tensor in expected.items():
        if name.startswith(("live/", "master/")):
            # kernels that add with atomics do not repeat bit for bit
            assert (tensor - state[name]).float().norm() <= 2e-3 * tensor.float().norm(), name


def test_log_probs_survive_too_and_what_can_never_fit_is_one_sentence(folder):
    batch = big_batch()
    expected = LocalWorkerGroup(Actor, settings_of(folder, Cut(max_tokens=1000))).compute_log_prob(batch)
    group = LocalWorkerGroup(Actor, settings_of(folder, Cut(max_tokens=10**6)))
    leave_only(400 << 20)
    got = group.compute_log_prob(batch)
    torch.testing.assert_close(got.batch["old_log_probs"], expected.batch["old_log_probs"], atol=0.1, rtol=0)
    leave_only(4 << 20)
    with pytest.raises(TrainingError, match=r"a single sequence of \d+ tokens does not fit .*data\.max_"):
        updated(group, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", EVERY)
def test_resuming_is_as_if_there_had_been_no_stop(kind, dtype):
    def engine():
        model = make_model("llama", dtype=dtype, hidden_size=128, intermediate_size=512).cuda()
        return TorchEngine(model, OptimizerSettings(lr=1e-3, kind=kind))

    def train(engine, first, last):
        for step in range(first, last):
            ids = torch.randint(0, 96, (4, 16), generator=torch.Generator().manual_seed(step)).cuda()
            loss = lambda ids: (engine.module(input_ids=ids, labels=ids).loss.float(), Metrics())  # noqa: E731
            engine.train_step([ids], loss)

    straight, before, after = engine(), engine(), engine()
    train(straight, 0, 4)
    train(before, 0, 2)
    pointers = [p.data_ptr() for p in after.module.parameters()]
    after.load_state_dict({name: tensor.cpu() for name, tensor in before.state_dict().items()})
    train(after, 2, 4)
    assert pointers == [p.data_ptr() for p in after.module.parameters()]
    for name, p in straight.module.named_parameters():
        torch.testing.assert_close(p, dict(after.module.named_parameters())[name], atol=2e-4, rtol=0)


@needs_bitsandbytes
def test_eight_bit_moments_take_a_quarter_of_the_memory():
    held = {}
    for kind in ("adamw", "adamw8bit"):
        module = torch.nn.Linear(4096, 4096, bias=False, device="cuda")
        engine = TorchEngine(module, OptimizerSettings(lr=1e-3, kind=kind))
        x = torch.randn(4, 4096, device="cuda")
        before = torch.cuda.memory_allocated()
        engine.train_step([x], lambda x, module=module: (module(x).square().mean(), Metrics()))
        held[kind] = torch.cuda.memory_allocated() - before
    assert held["adamw8bit"] < 0.3 * held["adamw"]


def test_the_optimizer_on_the_host_gives_the_same_weights(folder):
    batch = big_batch(rows=8, length=40)
    states = []
    for offload in (False, True):
        group = LocalWorkerGroup(Actor, settings_of(folder, Cut(), offload=offload))
        if offload:
            masters = group.workers[0].engine.weights.masters.values()
            assert all(master.device.type == "cpu" and master.is_pinned() for master in masters)
        states.append(updated(group, batch)[0])
    for name, tensor in states[0].items():
        if name.startswith("live/"):
            assert (tensor - states[1][name]).float().norm() <= 2e-3 * tensor.float().norm(), name


def test_a_critic_whose_weights_leave_trains_the_same_and_frees_the_gpu(folder):
    batch = big_batch(rows=8, length=40)
    states, held = [], []
    for offload in (False, True):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        model = ModelSettings(folder, dtype=dtype_here(), device="cuda", param_offload=offload)
        group = LocalWorkerGroup(Critic, CriticSettings(model, OptimizerSettings(lr=1e-3)))
        held.append(torch.cuda.memory_allocated() - before)
        states.append({name: tensor.cpu() for name, tensor in updated(group, batch)[0].items()})
        assert group.workers[0].host_weights is None or not group.workers[0].host_weights.present
        del group
    weights = sum(t.numel() * t.element_size() for name, t in states[0].items() if name.startswith("live/"))
    assert held[0] - held[1] > 0.9 * weights
    for name, tensor in states[0].items():
        if name.startswith("live/"):
            assert (tensor - states[1][name]).float().norm() <= 2e-3 * tensor.float().norm(), name


def test_frozen_weights_come_back_as_they_were():
    model = make_model("qwen2").cuda()
    ids = torch.arange(5, 20, device="cuda")[None]
    expected = model(ids).logits
    before = torch.cuda.memory_allocated()
    weights = HostWeights(model, frozen=True)
    assert torch.cuda.memory_allocated() <= before - 0.9 * weights.bytes
    for _ in range(3):
        with weights.here():
            assert torch.equal(model(ids).logits, expected)


def test_the_loss_and_its_metrics_do_not_make_the_host_wait():
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (8, 16)
    old, new, other = (torch.randn(shape, device="cuda", generator=generator) - 3 for _ in range(3))
    mask = torch.ones(shape, dtype=torch.long, device="cuda")
    config = resolve(load_config([])).actor_rollout_ref.actor
    loss_of = get_policy_loss_fn("vanilla")
    from verl.algorithms.aggregation import GlobalCounts, use_counts

    bag = Metrics()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with use_counts(GlobalCounts(128.0, 8.0, 16.0)):
            for _ in range(3):
                new.requires_grad_()
                loss, metrics = loss_of(old, new, other, mask, "token-mean", config)
                bag.merge(metrics)
                bag.merge(entropy_loss(-new, mask, "token-mean")[1])
                bag.merge(kl_loss(new, old, mask, "token-mean", "low_var_kl")[1])
                bag.merge(probs_difference(old, new, mask))
                bag.add("actor/loss", loss, reduce="sum")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = bag.results()
    assert found["actor/loss"] == pytest.approx(3 * float(loss.detach()), rel=1e-5)


def test_five_updates_do_not_depend_on_recomputation(folder):
    batch = big_batch(rows=8, length=40)
    states = []
    for every in (None, 1, 2):
        settings = settings_of(folder, Cut(max_rows=4))
        model = replace(settings.model, gradient_checkpointing=every is not None, checkpoint_every=every or 1)
        states.append(updated(LocalWorkerGroup(Actor, replace(settings, model=model)), batch)[0])
    for other in states[1:]:
        for name, tensor in states[0].items():
            if name.startswith("live/"):
                assert (tensor - other[name]).float().norm() <= 2e-3 * tensor.float().norm(), name
