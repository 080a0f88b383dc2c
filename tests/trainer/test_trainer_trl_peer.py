"""Whole runs against TRL 1.16.0, where it is installed: the same rows, one micro-batch, no dropout, plain SGD, fp32."""

from __future__ import annotations

import pytest
import torch
from learning_helpers import answers, make_learner, pairs, weights
from tiny_models import make_tokenizer, save_tiny_model
from transformers import AutoModelForCausalLM

trl = pytest.importorskip("trl", minversion="1.16.0")
LR, STEPS, BATCH = 1e-2, 3, 4
OURS = {
    "actor_rollout_ref__actor__optim__optimizer": "SGD",
    "actor_rollout_ref__actor__optim__lr": LR,
    "actor_rollout_ref__actor__optim__weight_decay": 0.0,
    "actor_rollout_ref__actor__grad_clip": 0,
    "data__shuffle": False,
    "data__train_batch_size": BATCH,
    "trainer__total_training_steps": STEPS,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def theirs(model, folder, rows, trainer_class, config_class, **more):
    """(losses, weights) of TRL's trainer over the same batches."""
    from datasets import Dataset

    config = config_class(
        output_dir=str(folder), per_device_train_batch_size=BATCH, max_steps=STEPS, learning_rate=LR, optim="sgd",
        lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, max_grad_norm=0.0, use_cpu=True, bf16=False,
        gradient_checkpointing=False, train_sampling_strategy="sequential", logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, max_length=None, **more,
    )  # fmt: skip
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    dataset = Dataset.from_list(rows)
    trainer = trainer_class(model=network, args=config, train_dataset=dataset, processing_class=make_tokenizer())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: p.detach() for name, p in trainer.model.named_parameters()}


def compare(model, tmp_path, algorithm, rows, reference, **changes):
    trainer = make_learner(model, tmp_path / "ours", algorithm, rows, **OURS, **changes)
    losses = []
    trainer.callbacks = (lambda _, metrics: losses.append(metrics["train/loss"]),)
    trainer.fit()
    expected, after = reference
    assert losses == pytest.approx(expected, rel=1e-5, abs=1e-6)
    ours = weights(trainer)
    for name, value in after.items():
        assert torch.allclose(ours[f"live/{name}"], value, atol=1e-6), name


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "apo_zero", "nca_pair"])
def test_dpo(model, tmp_path, loss):
    rows = pairs(STEPS * BATCH)
    reference = theirs(model, tmp_path / "trl", rows, trl.DPOTrainer, trl.DPOConfig, beta=0.1, loss_type=[loss])
    compare(model, tmp_path, "dpo", rows, reference, preference__loss_type=loss)


def test_sft(model, tmp_path):
    rows = answers(STEPS * BATCH)
    renamed = [{"prompt": row["prompt"], "completion": row["response"]} for row in rows]
    reference = theirs(model, tmp_path / "trl", renamed, trl.SFTTrainer, trl.SFTConfig)
    compare(model, tmp_path, "sft", rows, reference)
