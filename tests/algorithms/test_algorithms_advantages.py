"""Advantage estimators against slow references, the cases of public bug reports, and garbage at masked positions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms import core_algos
from verl.algorithms.advantages import compute_advantage, gae_unwhitened
from verl.algorithms.registry import get_adv_estimator_fn, registered_names
from verl.errors import ConfigError, RewardError

torch.set_num_threads(1)
QUICK = settings(max_examples=30, deadline=None)
BUILT_IN = [
    "gae",
    "gpg",
    "grpo",
    "grpo_passk",
    "grpo_vectorized",
    "opo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "rloo_vectorized",
]
GROUPED = ["gpg", "grpo", "grpo_passk", "grpo_vectorized", "opo", "rloo", "rloo_vectorized"]


def outcome_batch(scores, lengths=None, uid=None, width=3):
    """One response a row, its score at its last token."""
    lengths = lengths or [2] * len(scores)
    mask = torch.zeros(len(scores), width)
    rewards = torch.zeros(len(scores), width)
    for row, (score, length) in enumerate(zip(scores, lengths, strict=True)):
        mask[row, :length] = 1
        rewards[row, max(length - 1, 0)] = score
    uid = np.array(uid or ["a"] * len(scores), dtype=object)
    return {"token_level_rewards": rewards, "response_mask": mask, "uid": uid}


def first(name, batch, config=None):
    """The advantage at the first token of each row."""
    return compute_advantage(name, batch, config)["advantages"][:, 0].tolist()


def random_batch(seed, rows=6, width=5):
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, width)) < 0.6
    mask[rng.random(rows) < 0.15] = False
    rewards = np.where(mask, rng.normal(size=(rows, width)) * (rng.random((rows, 1)) < 0.8), 0.0)
    return {
        "token_level_rewards": torch.from_numpy(rewards).float(),
        "response_mask": torch.from_numpy(mask).long(),
        "uid": np.array([f"u{k}" for k in rng.integers(0, 3, rows)], dtype=object),
        "values": torch.from_numpy(rng.normal(size=(rows, width))).float(),
        "reward_baselines": torch.from_numpy(rng.normal(size=rows)).float(),
        "score_valid": torch.from_numpy(rng.random(rows) < 0.85),
    }


# ---------------------------------------------------------------- slow references
def valid_rows(batch):
    mask = batch["response_mask"].bool()
    return [bool(mask[i].any()) and bool(batch["score_valid"][i]) for i in range(len(mask))]


def reference_outcome(name, batch):
    """(B,) advantages of the group estimators, with loops and words."""
    mask = batch["response_mask"].bool()
    usable = valid_rows(batch)
    scores = [float(batch["token_level_rewards"][i].double()[mask[i]].sum()) for i in range(len(mask))]
    alpha = sum(usable) / max(sum(u and s != 0 for u, s in zip(usable, scores, strict=True)), 1)
    result = []
    for i in range(len(mask)):
        mates = [j for j in range(len(mask)) if usable[j] and batch["uid"][j] == batch["uid"][i]]
        if not usable[i] or len(mates) < 2:
            result.append(0.0)
            continue
        group = [scores[j] for j in mates]
        mean, std = np.mean(group), np.std(group, ddof=1)
        if name.startswith("grpo_passk"):
            ordered = sorted(group, reverse=True)
            lead = ordered[0] - ordered[1] if scores[i] == ordered[0] else 0.0
            result.append(lead / (std + 1e-6))
        elif name.startswith("grpo"):
            result.append(0.0 if std == 0 else (scores[i] - mean) / (std + 1e-6))
        elif name.startswith("rloo"):
            result.append(scores[i] - np.mean([scores[j] for j in mates if j != i]))
        elif name == "opo":
            lengths = [float(mask[j].sum()) for j in mates]
            result.append(scores[i] - np.dot(lengths, group) / sum(lengths))
        else:
            result.append(alpha * (scores[i] - mean))
    return result


def reference_gae(rewards, values, mask, gamma, lam):
    """GAE on the list of trainable steps of each row."""
    advantages = np.zeros(mask.shape)
    for i in range(len(mask)):
        steps = [t for t in range(mask.shape[1]) if mask[i, t]]
        for k, t in enumerate(steps):
            total = 0.0
            for ahead, s in enumerate(steps[k:]):
                following = float(values[i, steps[k + ahead + 1]]) if k + ahead + 1 < len(steps) else 0.0
                delta = float(rewards[i, s]) + gamma * following - float(values[i, s])
                total += (gamma * lam) ** ahead * delta
            advantages[i, t] = total
    return advantages


def reference_whiten(values, mask):
    kept = values[mask]
    if len(kept) < 2 or kept.max() == kept.min():
        return np.zeros(values.shape)
    return np.where(mask, (values - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8), 0.0)


def test_all_estimators_are_registered():
    assert set(BUILT_IN) <= set(registered_names()[0])


@pytest.mark.parametrize("name", GROUPED)
@given(seed=st.integers(0, 10**6))
@QUICK
def test_group_estimators_equal_the_reference(name, seed):
    batch = random_batch(seed)
    expected = torch.tensor(reference_outcome(name, batch)).float().unsqueeze(-1) * batch["response_mask"]
    assert torch.allclose(compute_advantage(name, batch)["advantages"], expected, atol=1e-5, rtol=1e-4)


@given(seed=st.integers(0, 10**6), gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([1.0, 0.5, 0.0]))
@QUICK
def test_gae_equals_the_reference(seed, gamma, lam):
    batch = random_batch(seed)
    mask = batch["response_mask"].bool().numpy()
    rows = np.array(valid_rows(batch))
    raw = reference_gae(batch["token_level_rewards"].double(), batch["values"].double(), mask, gamma, lam)
    found = compute_advantage("gae", batch, {"gamma": gamma, "lam": lam})
    usable = mask & rows[:, None]
    assert np.allclose(found["advantages"], reference_whiten(raw, usable), atol=1e-4)
    values = batch["values"].numpy()
    assert np.allclose(found["returns"], np.where(mask, np.where(usable, raw + values, values), 0), atol=1e-5)


@given(seed=st.integers(0, 10**6), gamma=st.sampled_from([1.0, 0.9]))
@QUICK
def test_reinforce_family_equals_the_reference(seed, gamma):
    batch = random_batch(seed)
    mask = batch["response_mask"].bool().numpy()
    usable = mask & np.array(valid_rows(batch))[:, None]
    rewards = np.where(usable, batch["token_level_rewards"].double().numpy(), 0.0)
    to_go = reference_gae(rewards, np.zeros(mask.shape), mask, gamma, 1.0)
    found = compute_advantage("reinforce_plus_plus", batch, {"gamma": gamma})
    assert np.allclose(found["advantages"], reference_whiten(to_go, usable), atol=1e-4)
    assert np.allclose(found["returns"], to_go, atol=1e-5)
    undiscounted = reference_gae(rewards, np.zeros(mask.shape), mask, 1.0, 1.0)
    baselines = batch["reward_baselines"].double().numpy()[:, None]
    assert np.allclose(
        compute_advantage("remax", batch)["advantages"], np.where(usable, undiscounted - baselines, 0.0), atol=1e-5
    )
    without_std = compute_advantage("grpo", batch, {"norm_adv_by_std_in_grpo": False})["advantages"].double().numpy()
    found = compute_advantage("reinforce_plus_plus_baseline", batch)["advantages"]
    assert np.allclose(found, reference_whiten(without_std, usable), atol=1e-4)


# ---------------------------------------------------------------- properties of all of them
@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e9])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=8, deadline=None)
def test_garbage_at_masked_positions_changes_nothing(name, poison, seed):
    batch = random_batch(seed)
    clean = compute_advantage(name, batch)
    masked = batch["response_mask"] == 0
    bad_rows = ~torch.tensor(valid_rows(batch))
    dirty = dict(batch, values=batch["values"].masked_fill(masked, poison))
    # A finite number at a masked position is a reward (it moves); of a row that does not count, everything is garbage.
    where = bad_rows.unsqueeze(-1) | (masked & torch.tensor(not math.isfinite(poison)))
    dirty["token_level_rewards"] = batch["token_level_rewards"].masked_fill(where, poison)
    dirty["reward_baselines"] = batch["reward_baselines"].masked_fill(bad_rows, poison)
    found = compute_advantage(name, dirty)
    for key in ("advantages", "returns"):
        assert torch.equal(found[key], clean[key])
        assert found[key].isfinite().all()
        assert (found[key][masked] == 0).all()
    assert (found["advantages"][bad_rows] == 0).all()


@pytest.mark.parametrize("name", BUILT_IN)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_row_order_and_padding_do_not_matter(name, seed):
    batch = random_batch(seed)
    expected = compute_advantage(name, batch)["advantages"]
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    moved = {key: value[order.numpy()] if key == "uid" else value[order] for key, value in batch.items()}
    for key in ("token_level_rewards", "values", "response_mask"):
        moved[key] = torch.nn.functional.pad(moved[key], (0, 3))
    found = compute_advantage(name, moved)["advantages"]
    assert torch.allclose(found[:, :5], expected[order], atol=1e-5)
    assert (found[:, 5:] == 0).all()


@pytest.mark.parametrize("name", BUILT_IN)
def test_empty_responses_single_rows_and_bf16(name):
    batch = random_batch(1, rows=1, width=4)
    batch["score_valid"] = torch.tensor([True])
    for mask in (torch.zeros(1, 4), torch.tensor([[1, 0, 0, 0]]), torch.tensor([[1, 1, 1, 1]])):
        found = compute_advantage(name, dict(batch, response_mask=mask))
        assert found["advantages"].isfinite().all()
    low = dict(random_batch(2), token_level_rewards=random_batch(2)["token_level_rewards"].bfloat16())
    assert compute_advantage(name, low)["advantages"].dtype == torch.float32
    none = {key: value[:0] for key, value in batch.items()}
    assert compute_advantage(name, none)["advantages"].shape == (0, 4)


# ---------------------------------------------------------------- the cases
@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized"])
def test_b17_groups_without_spread(name):
    assert first(name, outcome_batch([1, 1, 1, 1])) == [0.0] * 4
    exact = outcome_batch([0.1] * 3)
    exact["token_level_rewards"] = torch.tensor([[0.0, 0.1, 0.0]] * 3, dtype=torch.float64)
    assert first(name, exact) == [0.0] * 3  # although 0.1 + 0.1 + 0.1 is not 0.3 in binary
    assert first(name, outcome_batch([1, 0, 0, 0])) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


@pytest.mark.parametrize("name", [*GROUPED, "reinforce_plus_plus_baseline"])
def test_b19_a_group_of_one_has_advantage_zero(name):
    assert first(name, outcome_batch([3.0])) == [0.0]
    # and so has the only row of its group that was scored
    batch = dict(outcome_batch([3.0, 1.0]), score_valid=torch.tensor([True, False]))
    assert first(name, batch) == [0.0, 0.0]


@pytest.mark.parametrize("name", ["rloo", "rloo_vectorized"])
def test_b20_rloo(name):
    assert first(name, outcome_batch([1, 0, 0])) == pytest.approx([1.0, -0.5, -0.5])


def test_b20_opo():
    assert first("opo", outcome_batch([1, 0], lengths=[1, 3])) == pytest.approx([0.75, -0.25])


def test_b22_rewards_of_rejected_tokens_are_dropped():
    rewards, kept = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([[1, 0], [1, 1]])
    uid = np.array(["a", "a"], dtype=object)
    batch = {"token_level_rewards": rewards, "response_mask": kept, "uid": uid}
    rejected = compute_advantage("grpo", dict(batch, generation_mask=torch.ones(2, 2)))
    assert rejected["advantages"].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    fn = get_adv_estimator_fn("grpo")
    assert fn(rewards, kept, index=uid, rewards_at_masked="drop")[0].abs().sum() == 0
    moved = fn(rewards, kept, index=uid, rewards_at_masked="move_to_last")[0]
    assert moved[:, 0].tolist() == pytest.approx([0.7071, -0.7071], abs=1e-4)


def test_b23_gae_with_padding():
    mask, rewards = torch.tensor([[1, 1, 0]]), torch.tensor([[0.0, 1.0, 0.0]])
    adv, returns = gae_unwhitened(rewards, torch.tensor([[0.0, 0.0, 100.0]]), mask, 1.0, 0.95)
    assert adv[0].tolist() == pytest.approx([0.95, 1.0, 0.0])
    assert returns[0].tolist() == pytest.approx([0.95, 1.0, 0.0])
    adv, _ = gae_unwhitened(rewards, torch.tensor([[0.5, 0.25, 9.0]]), mask, 1.0, 0.95)
    assert adv[0].tolist() == pytest.approx([0.4625, 0.75, 0.0])


def test_b24_one_decay_per_trainable_step():
    adv, _ = gae_unwhitened(
        torch.tensor([[0.0, 0.0, 1.0]]), torch.zeros(1, 3), torch.tensor([[1, 0, 1]]), gamma=1.0, lam=0.5
    )
    assert adv[0].tolist() == [0.5, 0.0, 1.0]
    batch = {"token_level_rewards": torch.tensor([[0.0, 0.0, 1.0]]), "response_mask": torch.tensor([[1, 0, 1]])}
    assert compute_advantage("reinforce_plus_plus", batch, {"gamma": 0.5})["returns"][0].tolist() == [0.5, 0.0, 1.0]


@pytest.mark.parametrize("name", BUILT_IN)
def test_b25_a_terminal_reward_on_a_masked_token_is_not_lost(name):
    batch = {
        "token_level_rewards": torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
        "response_mask": torch.tensor([[1, 1, 0], [1, 1, 0]]),
        "uid": np.array(["a", "a"], dtype=object),
        "values": torch.zeros(2, 3),
        "reward_baselines": torch.tensor([0.5, 0.5]),
    }
    at_last = dict(batch, token_level_rewards=torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))
    found = compute_advantage(name, batch)["advantages"]
    assert torch.equal(found, compute_advantage(name, at_last)["advantages"])
    assert found[0, 1] > found[1, 1]


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("tokens", [0, 1])
def test_b27_too_few_tokens_to_whiten(name, tokens):
    batch = dict(outcome_batch([1.0], lengths=[tokens]), values=torch.zeros(1, 3))
    found = compute_advantage(name, batch)
    assert found["advantages"].tolist() == [[0.0, 0.0, 0.0]]
    assert found["metrics"]["training/advantage_whiten_degenerate"] == 1.0


def test_rows_without_a_score_count_in_no_group():
    batch = dict(outcome_batch([1.0, 0.0, math.nan]), score_valid=torch.tensor([True, True, False]))
    found = compute_advantage("grpo", batch)
    assert found["advantages"][:, 0].tolist() == pytest.approx([0.7071, -0.7071, 0.0], abs=1e-4)
    assert found["metrics"]["training/advantage_rows_excluded"] == 1.0


def test_a_broken_reward_must_be_marked():
    with pytest.raises(RewardError, match=r"row 1 .*score_valid=False"):
        compute_advantage("grpo", outcome_batch([1.0, math.nan]))


def test_missing_inputs_are_named():
    with pytest.raises(ConfigError, match="adv_estimator=gae needs values"):
        compute_advantage("gae", outcome_batch([1.0]))
    batch = outcome_batch([1.0])
    del batch["uid"]
    with pytest.raises(ConfigError, match="needs uid"):
        compute_advantage("rloo", batch)


def test_passk_gives_the_lead_to_the_best_alone():
    config = {"norm_adv_by_std_in_grpo": False}
    assert first("grpo_passk", outcome_batch([1.0, 0.25, 0.0]), config) == [0.75, 0.0, 0.0]
    assert first("grpo_passk", outcome_batch([1.0, 1.0, 0.0]), config) == [0.0, 0.0, 0.0]


def test_gpg_scales_by_the_share_of_outcomes_that_are_not_zero():
    assert first("gpg", outcome_batch([1, 0, 0, 0])) == pytest.approx([3.0, -1.0, -1.0, -1.0])


def test_the_names_of_public_scripts():
    batch = outcome_batch([1, 0, 0])
    rewards, mask, uid = batch["token_level_rewards"], batch["response_mask"], batch["uid"]
    rloo = core_algos.compute_rloo_outcome_advantage(rewards, mask, uid)[0]
    assert rloo[:, 0].tolist() == pytest.approx([1, -0.5, -0.5])
    plain = core_algos.compute_grpo_outcome_advantage(rewards, mask, uid, norm_adv_by_std_in_grpo=False)[0]
    assert plain[:, 0].tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    adv, returns = core_algos.compute_gae_advantage_return(rewards, torch.zeros(3, 3), mask, 1.0, 1.0)
    assert returns[0].tolist() == [1.0, 1.0, 0.0]
    assert float(adv[mask.bool()].mean()) == pytest.approx(0.0, abs=1e-6)
    remax, _ = core_algos.compute_remax_outcome_advantage(rewards, torch.tensor([0.5, 0.5, 0.5]), mask)
    assert remax[0].tolist() == [0.5, 0.5, 0.0]
