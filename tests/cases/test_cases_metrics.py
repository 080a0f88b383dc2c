"""Public cases B76 to B80: validation numbers, reducers, masks of metrics."""

from __future__ import annotations

import pytest
import torch
from cases_actor import make_actor, plan_of, recorded

from verl.algorithms.batch_metrics import data_metrics, rollout_agreement
from verl.data import PromptDataset, validation_batches
from verl.metrics import Metrics
from verl.trainer.validation_metrics import validation_metrics


def validated(scores_by_uid):
    return validation_metrics(
        {"uid": uid, "data_source": "s", "score": score, "valid": True, "extra": {}}
        for uid, scores in scores_by_uid.items()
        for score in scores
    )


def test_B76_equal_prompts_with_different_answers_are_two_prompts(tiny_tokenizer):
    data = PromptDataset([{"prompt": "1+1=", "ground_truth": answer} for answer in ("2", "3")], tiny_tokenizer)
    (batch,) = validation_batches(data)
    uids = list(batch.non_tensor_batch["uid"])
    assert len(set(uids)) == 2
    metrics = validated({uid: [score] for uid, score in zip(uids, (1.0, 0.0), strict=True)})
    assert metrics["val-core/s/reward/mean@1"] == 0.5 and not any("mean@2" in name for name in metrics)


def test_B77_best_of_k_is_exact():
    metrics = validated({"p": [1.0, 0.0, 0.0, 0.0]})
    assert metrics["val-core/s/reward/best@4/mean"] == 1.0
    assert metrics["val-aux/s/reward/best@2/mean"] == 0.5
    assert metrics["val-core/s/reward/mean@4"] == 0.25


def test_B79_reducers_are_declared_never_guessed():
    total = Metrics()
    for value in (0.2, 0.8):
        bag = Metrics()
        bag.add("env/terminal_rate", value)
        bag.add("actor/maximum_likelihood", value, reduce="min")
        total.merge(bag)
    assert total["env/terminal_rate"] == 0.5 and total["actor/maximum_likelihood"] == 0.2
    other = Metrics()
    other.add("env/terminal_rate", 1.0, reduce="max")
    with pytest.raises(ValueError, match="terminal_rate"):
        total.merge(other)


def test_B80_lengths_count_all_tokens_and_differences_only_trained_ones():
    mask = torch.tensor([[1, 0, 1, 0]])
    batch = {"response_mask": mask, "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0]])}
    assert data_metrics(batch)["response_length/mean"] == 3.0 and data_metrics(batch)["prompt_length/mean"] == 2.0
    new, old = torch.tensor([[-1.0, -9.0, -2.0, 0.0]]), torch.tensor([[-1.0, 0.0, -2.0, -9.0]])
    agreement = rollout_agreement(new, old, mask)
    assert agreement["training/rollout_probs_diff_max"] == 0.0
    assert agreement["training/rollout_probs_diff_mean"] == 0.0


def test_printed_numbers_are_over_the_mask_of_the_loss(tiny_model_dir):
    """What stands at masked positions changes no metric of the update, and the entropy is that of trained tokens."""
    printed = []
    for garbage in (0.0, float("nan"), 1e9):
        batch = recorded()
        keep = batch.batch["response_mask"].bool()
        for key in ("rollout_log_probs", "advantages"):
            batch.batch[key] = batch.batch[key].masked_fill(~keep, garbage)
        batch.batch["old_log_probs"] = torch.full(keep.shape, -2.0).masked_fill(~keep, garbage)
        batch.batch["ref_log_prob"] = torch.full(keep.shape, -2.5).masked_fill(~keep, garbage)
        actor = make_actor(tiny_model_dir, use_kl_loss=True, entropy_coeff=0.1)
        printed.append(actor.update(batch, plan_of(batch)).results())
    assert printed[0] == printed[1] == printed[2]
    tokens = recorded().batch["response_mask"].sum().item()
    assert tokens == 12 and printed[0]["actor/entropy"] > 0
