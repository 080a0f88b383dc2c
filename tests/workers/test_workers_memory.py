"""Running out of memory in any phase: the result of smaller micro-batches, or an error that says what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_workers_invariance import OPTIMIZER, actor_settings, close, recorded_batch, updated
from tiny_models import save_tiny_model

from verl import notices
from verl.errors import TrainingError
from verl.models.settings import ModelSettings
from verl.single_controller import LocalWorkerGroup
from verl.train_engine.torch_engine import OptimizerSettings
from verl.workers.actor import Actor
from verl.workers.critic import Critic
from verl.workers.settings import CriticSettings, Cut

DROPOUT = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
ADAM = OptimizerSettings(lr=1e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("gpt2") / "m", "gpt2"))


@pytest.fixture(autouse=True)
def quiet():
    notices.reset()
    yield
    notices.reset()


class Shortage:
    """Raises the allocator's error in the backward pass of one layer, at its n-th call."""

    def __init__(self, model, at: int, layer: int = 0, error: Exception | None = None):
        self.calls, self.at, self.raised = 0, at, False
        self.error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        model.transformer.h[layer].register_full_backward_hook(self.hook)

    def hook(self, module, grad_input, grad_output):
        self.calls += 1
        if self.calls == self.at:
            self.raised = True
            raise self.error


def settings_with(folder, cut, *, dtype="float32", **changes):
    settings = actor_settings(folder, dtype=dtype, cut=cut)
    # dropout stays on, so that the result also depends on the generators being set back
    model = replace(settings.model, override_config=DROPOUT)
    return replace(settings, model=model, optimizer=ADAM, **changes)


def seeded_update(group, batch):
    torch.manual_seed(7)
    return updated(group, batch, steps=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_redone_after_a_shortage_is_bit_for_bit_the_one_with_smaller_micro_batches(folder, dtype):
    batch = recorded_batch(torch.float32)
    disturbed = LocalWorkerGroup(Actor, settings_with(folder, Cut(max_tokens=30), dtype=dtype))
    shortage = Shortage(disturbed.workers[0].model, at=2)  # the first micro-batch has been added already
    [state], metrics = seeded_update(disturbed, batch)
    assert shortage.raised
    learned = disturbed.workers[0].engine.learned_tokens["update"]
    assert 0 < learned < 30 and state["counters"][4] == learned
    assert any(f"at most {learned} tokens" in line for line in notices.seen())
    calm = LocalWorkerGroup(Actor, settings_with(folder, Cut(max_tokens=learned), dtype=dtype))
    [expected], same = seeded_update(calm, batch)
    for name in expected:
        if name != "counters":
            assert torch.equal(state[name], expected[name]), name
    assert metrics["actor/pg_loss"] == same["actor/pg_loss"]


def test_what_was_learned_is_saved_and_used_at_once(folder):
    group = LocalWorkerGroup(Actor, settings_with(folder, Cut(max_tokens=30)))
    Shortage(group.workers[0].model, at=2)
    [state], _ = seeded_update(group, recorded_batch(torch.float32))
    again = LocalWorkerGroup(Actor, settings_with(folder, Cut(max_tokens=30)))
    again.load_state_dict(state)
    worker = again.workers[0]
    assert worker.engine.learned_tokens == group.workers[0].engine.learned_tokens
    assert worker.budget("update", "").apply(Cut(max_rows=8)).max_tokens == worker.engine.learned_tokens["update"]


def test_all_ranks_take_the_step_again_when_one_of_them_is_short(folder):
    settings = actor_settings(folder)
    [reference], _ = updated(LocalWorkerGroup(Actor, settings), recorded_batch())
    group = LocalWorkerGroup(Actor, settings, world_size=2)
    shortage = Shortage(group.workers[1].model, at=1)
    states, _ = updated(group, recorded_batch())
    assert shortage.raised
    for state in states:
        close(reference, state, 1e-10)
    first, second = (worker.engine.learned_tokens for worker in group.workers)
    assert first == second and first["update"] > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_single_sequence_that_does_not_fit_names_phase_numbers_and_keys(folder, ranks):
    group = LocalWorkerGroup(Actor, actor_settings(folder, cut=Cut(max_rows=1)), world_size=ranks)
    before = {k: v.clone() for k, v in group.state_dict().items() if k.startswith("live/")}
    Shortage(group.workers[-1].model, at=2)
    with pytest.raises(TrainingError, match=r"update of the actor: a single sequence of \d+ tokens .*GiB.*data\.max_"):
        updated(group, recorded_batch())
    for name, tensor in before.items():
        assert torch.equal(tensor, group.state_dict()[name])


def test_other_errors_are_not_taken_for_a_shortage(folder):
    group = LocalWorkerGroup(Actor, actor_settings(folder))
    Shortage(group.workers[0].model, at=1, error=RuntimeError("size mismatch"))
    with pytest.raises(Exception, match="size mismatch"):
        updated(group, recorded_batch())


def test_forward_passes_go_on_with_smaller_micro_batches(folder):
    batch = recorded_batch()
    settings = actor_settings(folder, cut=Cut(max_tokens=30, key="rollout.log_prob_max_token_len_per_gpu"))
    expected = LocalWorkerGroup(Actor, settings).compute_log_prob(batch).batch["old_log_probs"]
    group = LocalWorkerGroup(Actor, settings)
    calls = []

    def hook(module, inputs):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate")

    group.workers[0].model.transformer.h[1].register_forward_pre_hook(hook)
    got = group.compute_log_prob(batch).batch["old_log_probs"]
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
    assert len(calls) > 2 and group.workers[0].engine.learned_tokens["forward"] > 0
    assert any("rollout.log_prob_max_token_len_per_gpu" in line for line in notices.seen())


def test_the_critic_survives_too(folder):
    settings = CriticSettings(ModelSettings(folder, dtype="float64"), OPTIMIZER)
    [reference], _ = updated(LocalWorkerGroup(Critic, settings), recorded_batch())
    group = LocalWorkerGroup(Critic, settings)
    shortage = Shortage(group.workers[0].model.model, at=1)
    [state], _ = updated(group, recorded_batch())
    assert shortage.raised
    close(reference, state, 1e-10)
