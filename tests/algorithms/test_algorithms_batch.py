"""Masked statistics, where rewards stand, group filters, pass@k and the metrics of a batch."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.batch_metrics import data_metrics, group_metrics, rollout_agreement
from verl.algorithms.group_filter import keep_varied_groups
from verl.algorithms.masked import masked_mean, masked_sum, masked_var, masked_whiten
from verl.algorithms.passk import best_of_k, pass_at_k, worst_of_k
from verl.algorithms.rewards_shaping import overlong_penalty, settle_rewards
from verl.errors import ConfigError, DataError, RewardError

torch.set_num_threads(1)
QUICK = settings(max_examples=40, deadline=None)


# ---------------------------------------------------------------- masked
@given(seed=st.integers(0, 10**6), rows=st.integers(0, 4), width=st.integers(1, 4))
@QUICK
def test_masked_statistics(seed, rows, width):
    rng = np.random.default_rng(seed)
    values, mask = rng.normal(size=(rows, width)), rng.random((rows, width)) < 0.6
    kept = values[mask]
    tensor = torch.from_numpy(np.where(mask, values, np.nan)).requires_grad_()
    flags = torch.from_numpy(mask)
    results = masked_sum(tensor, flags), masked_mean(tensor, flags), masked_var(tensor, flags)
    right = kept.sum(), kept.mean() if len(kept) else 0.0, kept.var(ddof=1) if len(kept) > 1 else 0.0
    assert [float(x.detach()) for x in results] == pytest.approx(right)
    (sum(results) + masked_whiten(tensor, flags).square().sum()).backward()
    assert tensor.grad.isfinite().all() and (tensor.grad[~flags] == 0).all()
    whitened = masked_whiten(tensor, flags).detach()
    assert (whitened[~flags] == 0).all()
    if len(kept) > 1:
        assert np.allclose(whitened[flags], (kept - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8))
        assert float(masked_whiten(tensor.detach(), flags, shift_mean=False)[flags].mean()) == pytest.approx(
            kept.mean()
        )


def test_b27_whitening_without_spread_is_exactly_zero():
    for values in ([[3.0]], [[0.1] * 1001]):
        tensor = torch.tensor(values)
        assert masked_whiten(tensor, torch.ones_like(tensor)).abs().sum() == 0
    assert masked_whiten(torch.full((2, 2), math.nan), torch.zeros(2, 2)).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_masked_mean_over_rows():
    values, mask = torch.tensor([[1.0, 3.0], [5.0, 7.0]]), torch.tensor([[1, 1], [0, 0]])
    assert masked_mean(values, mask, axis=-1).tolist() == [2, 0]


# ---------------------------------------------------------------- rewards
def test_where_rewards_stand():
    rewards = torch.tensor([[1.0, 2.0, 4.0, math.nan], [1.0, 1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0]])
    assert settle_rewards(rewards, mask).tolist() == [[1.0, 0.0, 6.0, 0.0], [0.0] * 4]
    assert settle_rewards(rewards, mask, "drop").tolist() == [[1.0, 0.0, 4.0, 0.0], [0.0] * 4]
    assert settle_rewards(rewards, mask, score_valid=torch.tensor([False, True])).abs().sum() == 0
    with pytest.raises(ConfigError, match="move_to_last, drop"):
        settle_rewards(rewards, mask, "keep")
    with pytest.raises(RewardError, match="row 0"):
        settle_rewards(rewards, torch.ones(2, 4))


def test_overlong_penalty():
    lengths = torch.tensor([10, 16, 18, 20, 25])
    assert overlong_penalty(lengths, 20, 4, 1.0).tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    for buffer in (0, 21):
        with pytest.raises(ConfigError, match="max_resp_len=20"):
            overlong_penalty(lengths, 20, buffer, 1.0)


# ---------------------------------------------------------------- groups
def test_groups_without_spread_are_filtered():
    values = [1.0, 0.0, 1.0, 1.0, 0.0, math.nan, 5.0]
    uid = ["a", "b", "a", "b", "c", "c", "d"]
    keep, metrics = keep_varied_groups(values, uid, [True] * 5 + [False, True])
    assert keep.tolist() == [False, True, False, True, False, False, False]
    assert metrics["training/filter_groups/kept"] == 1
    assert metrics["training/filter_groups/dropped"] == 3


def test_b17_zero_std_groups_are_counted():
    found = group_metrics([1, 1, 0, 1, 0, 0, 9], ["a", "a", "b", "b", "c", "c", "d"])
    assert found["training/zero_std_groups"] == 2
    assert found["training/zero_std_group_ratio"] == pytest.approx(2 / 3)
    assert found["training/group_accuracy"] == pytest.approx((1 + 0.5 + 0 + 1) / 4)
    assert found["training/groups_all_correct_ratio"] == 0.5
    failed = group_metrics([1, math.nan], ["a", "a"], score_valid=[True, False])
    assert failed["training/zero_std_groups"] == 0
    assert failed["training/group_accuracy"] == 1.0


# ---------------------------------------------------------------- pass@k
def test_b77_pass_at_k_is_unbiased():
    assert pass_at_k(4, 1, 4) == 1.0
    assert pass_at_k(4, 1, 2) == 0.5
    assert best_of_k([0.0, 1.0, 0.0, 0.0], 2) == 0.5


@given(scores=st.lists(st.floats(-5, 5), min_size=1, max_size=7), data=st.data())
@QUICK
def test_best_and_worst_of_k_average_over_all_subsets(scores, data):
    k = data.draw(st.integers(1, len(scores)))
    subsets = list(itertools.combinations(scores, k))
    assert best_of_k(scores, k) == pytest.approx(sum(map(max, subsets)) / len(subsets), abs=1e-9)
    assert worst_of_k(scores, k) == pytest.approx(sum(map(min, subsets)) / len(subsets), abs=1e-9)
    correct = [float(score > 0) for score in scores]
    assert best_of_k(correct, k) == pytest.approx(pass_at_k(len(scores), int(sum(correct)), k))


def test_impossible_pass_at_k():
    for args in ((4, 1, 5), (4, 1, 0), (0, 0, 1), (2, 3, 1)):
        with pytest.raises(DataError, match="pass@"):
            pass_at_k(*args)


# ---------------------------------------------------------------- metrics of a batch
def sample_batch():
    """Row 0 ends with a tool's output, row 1 is cut off by length, row 2 was aborted, the reward of row 3 failed."""
    nan = math.nan
    return {
        "attention_mask": torch.tensor(
            [[0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0]]
        ),
        "response_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]]),
        "token_level_scores": torch.tensor([[0.0, 0.0, 1.0, 0.0], [0, 0, 0, 0.5], [nan] * 4, [nan] * 4]),
        "advantages": torch.tensor([[1.0, 1.0, nan, nan], [-1.0] * 4, [nan] * 4, [0.0, nan, nan, nan]]),
        "score_valid": torch.tensor([True, True, True, False]),
        "finish_reason": np.array(["stop", "length", "abort", "stop"], dtype=object),
    }


def test_b80_data_metrics():
    found = data_metrics(sample_batch())
    assert found["critic/score/mean"] == 0.75
    assert (found["critic/score/max"], found["critic/score/min"]) == (1.0, 0.5)
    assert found["critic/advantages/mean"] == pytest.approx((2 - 4) / 6)
    assert found["response_length/mean"] == (3 + 4 + 0 + 1) / 4  # with the tool's output
    assert found["response_length/min"] == 0
    assert found["response_length_non_aborted/mean"] == pytest.approx(8 / 3)
    assert found["response_length/clip_ratio"] == 0.25
    assert found["response/aborted_ratio"] == 0.25  # B35
    assert found["prompt_length/mean"] == (2 + 3 + 1 + 3) / 4
    assert found["prompt_length/clip_ratio"] == 0.5
    assert found["reward/failed_rows"] == 1
    assert "critic/values/mean" not in found and "critic/rewards/mean" not in found
    assert found.finite()


def test_scores_of_rejected_tokens_are_reported():
    batch = {
        "response_mask": torch.tensor([[1, 0], [0, 0]]),
        "token_level_scores": torch.tensor([[0.0, 1.0], [0, 3.0]]),
    }
    assert data_metrics(batch)["critic/score/mean"] == 1.0
    assert data_metrics(dict(batch, generation_mask=torch.ones(2, 2)))["critic/score/mean"] == 2.0


def test_clip_ratio_without_finish_reasons():
    batch = sample_batch()
    del batch["finish_reason"]
    assert data_metrics(batch, max_prompt_length=2)["response_length/clip_ratio"] == 0.25


def test_explained_variance():
    returns = torch.tensor([[1.0, 3.0, math.nan]])
    batch = {"response_mask": torch.tensor([[1, 1, 0]]), "returns": returns, "values": returns / 2}
    assert data_metrics(batch)["critic/vf_explained_var"] == pytest.approx(0.75)


def test_rollout_agreement_looks_at_sampled_tokens():
    train, sampled = torch.tensor([[0.5, 0.25, 1.0]]).log(), torch.tensor([[0.25, 0.25, math.nan]]).log()
    found = rollout_agreement(train, sampled, torch.tensor([[1, 1, 0]]))
    assert found["training/rollout_probs_diff_mean"] == pytest.approx(0.125)
    assert found["training/rollout_probs_diff_max"] == pytest.approx(0.25)
    assert found["training/rollout_probs_diff_valid"] == 1
    assert rollout_agreement(train, sampled, torch.zeros(1, 3))["training/rollout_probs_diff_valid"] == 0
    same = rollout_agreement(train, train, torch.tensor([[1, 1, 0]]))
    assert same["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)
