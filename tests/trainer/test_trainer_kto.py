"""KTO and its kin, from labelled answers, on a tiny model."""

from __future__ import annotations

import math

import pytest
import torch
from learning_helpers import assert_equal, labelled, make_learner, pairs, two_ranks, weights
from tiny_models import make_tokenizer, save_tiny_model
from transformers import AutoModelForCausalLM

from verl.config.names import LABEL_LOSSES
from verl.errors import ConfigError, DataError
from verl.notices import seen

SGD = {"actor_rollout_ref__actor__optim__optimizer": "SGD", "actor_rollout_ref__actor__optim__weight_decay": 0.0}
MICRO = "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("other"), seed=7)


def total(network, prompt: str, answer: str) -> torch.Tensor:
    """Summed log-prob of an answer with its end, from a plain forward pass."""
    tokenizer = make_tokenizer()
    before = tokenizer(prompt).input_ids
    ids = torch.tensor([[*before, *tokenizer(answer).input_ids, tokenizer.eos_token_id]])
    log_probs = network(ids).logits[0, :-1].float().log_softmax(-1)
    return log_probs.gather(-1, ids[0, 1:, None])[len(before) - 1 :, 0].sum()


def test_a_step_is_that_of_a_plain_implementation(model, other, tmp_path):
    rows = labelled(3)
    settings = {**SGD, "actor_rollout_ref__actor__grad_clip": 0, "preference__ref_model_path": str(other)}
    trainer = make_learner(
        model, tmp_path, "kto", rows, trainer__total_training_steps=1, data__train_batch_size=6, data__shuffle=False,
        preference__desirable_weight=1.5, **settings,
    )  # fmt: skip
    metrics = trainer.fit()
    network, reference = (AutoModelForCausalLM.from_pretrained(path) for path in (model, other))
    kl = torch.zeros(())
    with torch.no_grad():
        for number, row in enumerate(rows):
            answer = rows[(number + 1) % len(rows)]["completion"]
            kl += total(network, row["prompt"], answer) - total(reference, row["prompt"], answer)
    kl = (kl / len(rows)).clamp(min=0)
    losses = []
    for row in rows:
        ratio = total(network, row["prompt"], row["completion"])
        ratio = ratio - total(reference, row["prompt"], row["completion"]).detach()
        sign, weight = (1, 1.5) if row["label"] else (-1, 1.0)
        losses.append(weight * (1 - torch.sigmoid(sign * 0.1 * (ratio - kl))))
    loss = torch.stack(losses).mean()
    loss.backward()
    assert metrics["kl"] == pytest.approx(float(kl), rel=1e-4, abs=1e-5)
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    after = weights(trainer)
    for name, p in network.named_parameters():
        assert torch.allclose(after[f"live/{name}"], p.detach() - 1e-3 * p.grad, atol=1e-6), name


@pytest.mark.parametrize("loss", LABEL_LOSSES)
def test_micro_batches_and_ranks_change_nothing(model, other, tmp_path, monkeypatch, loss):
    settings = {**SGD, "preference__loss_type": loss, "data__train_batch_size": 7}
    settings["preference__ref_model_path"] = str(other)
    runs = {}
    for name, more in (("whole", {}), ("cut", {MICRO: 1}), ("two", {})):
        if name == "two":
            two_ranks(monkeypatch)
        trainer = make_learner(model, tmp_path / name, "kto", labelled(), stays_open=True, **settings, **more)
        metrics = trainer.fit()
        runs[name] = metrics, weights(trainer), trainer.roles.actor.preference_state()
        trainer.close()
    assert runs["whole"][0]["actor/grad_norm"] > 0 and math.isfinite(runs["whole"][0]["train/loss"])
    for name in ("cut", "two"):
        for metric in ("train/loss", "rewards/margins"):
            assert runs[name][0][metric] == pytest.approx(runs["whole"][0][metric], rel=1e-4, abs=1e-6), metric
        assert_equal(runs[name][1], runs["whole"][1], 2e-6)
        assert runs[name][2] == pytest.approx(runs["whole"][2], rel=1e-5)
    assert (runs["whole"][2]["count"] > 0) == (loss == "bco")


def test_one_class_alone_trains(model, tmp_path):
    rows = [row for row in labelled() if row["label"]]
    metrics = make_learner(model, tmp_path, "kto", rows).fit()
    assert "rewards/rejected" not in metrics and math.isfinite(metrics["train/loss"])


def test_a_last_mini_batch_of_one_row_joins_the_one_before(model, tmp_path):
    trainer = make_learner(
        model, tmp_path, "kto", labelled(), data__train_batch_size=5, trainer__total_training_steps=1,
        actor_rollout_ref__actor__ppo_mini_batch_size=2,
    )  # fmt: skip
    plans = []
    worker = trainer.roles.actor.workers[0]
    plain = worker.update_labelled
    worker.update_labelled = lambda batch, plan, s: (
        plans.append([len(m.rows) for m in plan.mini_batches]),
        plain(batch, plan, s),
    )[1]
    trainer.fit()
    assert plans == [[2, 3]]


def test_resuming_keeps_the_running_mean(model, tmp_path):
    settings = {"preference__loss_type": "bco", "trainer__save_freq": 2, "trainer__total_training_steps": 4}
    whole = make_learner(model, tmp_path / "a", "kto", labelled(), **settings)
    whole.fit()
    half = make_learner(model, tmp_path / "b", "kto", labelled(), **settings)
    half.total_steps = 2
    half.fit()
    rest = make_learner(model, tmp_path / "b", "kto", labelled(), **settings)
    assert rest.roles.actor.preference_state()["count"] == 2
    rest.fit()
    assert_equal(weights(whole), weights(rest))
    assert whole.roles.actor.preference_state() == rest.roles.actor.preference_state()


def test_it_learns_what_is_desirable(model, tmp_path):
    rows = labelled(4)
    metrics = make_learner(
        model, tmp_path, "kto", rows, validation=rows, trainer__total_training_steps=20, trainer__test_freq=20,
        data__train_batch_size=8,
    ).fit()  # fmt: skip
    assert metrics["val/rewards/margins"] > 2 and metrics["val/loss"] < 0.4


def test_pairs_for_a_loss_of_labels_name_the_columns(model, tmp_path):
    with pytest.raises(DataError, match=r"no column 'completion' and no column 'label'"):
        make_learner(model, tmp_path, "kto", pairs())


def test_precomputing_cannot_know_mismatched_answers(model, tmp_path):
    with pytest.raises(ConfigError, match="mismatched answers"):
        make_learner(model, tmp_path, "kto", labelled(), preference__precompute_ref_log_probs=True)
    make_learner(
        model, tmp_path, "bco", labelled(), preference__precompute_ref_log_probs=True, trainer__total_training_steps=1
    ).fit()


def test_a_batch_of_one_row_has_a_kl_of_zero(model, other, tmp_path):
    rows = labelled(4)[:5]
    settings = {"data__train_batch_size": 4, "data__last_batch": "short", "data__shuffle": False}
    trainer = make_learner(
        model, tmp_path, "kto", rows, validation=rows, trainer__total_training_steps=2, data__val_batch_size=4,
        preference__ref_model_path=str(other), trainer__test_freq=2, **settings, **SGD,
    )  # fmt: skip
    metrics = trainer.fit()
    assert metrics["kl"] == 0 and metrics["actor/grad_norm"] > 0 and math.isfinite(metrics["val/loss"])
    assert any("a batch of one row" in text for text in seen())
