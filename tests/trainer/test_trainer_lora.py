"""Training with LoRA end to end: one model, a reference without weights of its own, a merged export."""

from __future__ import annotations

import torch
from trainer_helpers import make_trainer, weights
from transformers import AutoModelForCausalLM

from verl.hybrid import make_twin

LORA = {"actor_rollout_ref__model__lora_rank": 4, "actor_rollout_ref__actor__use_kl_loss": True}


def test_adapters_train_against_their_base_and_are_exported_merged(tiny_model_dir, tmp_path):
    trainer = make_trainer(tiny_model_dir, tmp_path, **LORA, trainer__save_final=True)
    assert trainer.roles.reference is None
    before = weights(trainer)
    metrics = trainer.fit()
    moved = {name for name, now in weights(trainer).items() if not torch.equal(before[name], now)}
    assert moved and all(".lora_" in name for name in moved)
    # the reference is the base: after a step the policy has left it
    assert metrics["actor/kl_loss"] > 0
    # the rollout samples from the adapted weights
    assert metrics["training/rollout_probs_diff_mean"] < 1e-4
    folder = tmp_path / "global_step_2" / "actor"
    assert (folder / "lora_adapter" / "adapter_config.json").is_file()
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    live = make_twin(trainer.roles.actor.workers[0].model)
    exported = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(exported(input_ids=ids).logits, live(input_ids=ids).logits, atol=1e-5, rtol=1e-5)


def test_the_base_as_reference_gives_the_log_probs_of_a_reference_model(tiny_model_dir, tmp_path):
    runs = {}
    for name, changes in (("adapters", LORA), ("full", {"actor_rollout_ref__actor__use_kl_loss": True})):
        trainer = make_trainer(tiny_model_dir, tmp_path / name, **changes)
        batch = trainer.train_step().frames["sample"]
        runs[name] = dict(zip(batch.non_tensor_batch["sample_id"], batch.batch["ref_log_prob"], strict=True))
    assert runs["adapters"].keys() == runs["full"].keys()
    for sample, values in runs["full"].items():
        torch.testing.assert_close(runs["adapters"][sample], values, atol=1e-5, rtol=1e-5)
