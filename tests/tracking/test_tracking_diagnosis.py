"""Trouble is recognised from the metrics, once each, and a healthy run is left in peace."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path

import pytest

from verl.tracking.diagnosis import FLAT_STEPS, KL_STEPS, SPREAD_STEPS, TRUNCATED_STEPS, Watch

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))


def healthy(step, seed=0):
    r = random.Random(1000 * seed + step)
    return {
        "critic/score/mean": 0.3 + 0.005 * step, "critic/score/max": 1.0, "critic/score/min": 0.0,
        "training/zero_std_group_ratio": min(0.9, 0.2 + 0.01 * step), "training/group_accuracy": 0.3 + 0.005 * step,
        "actor/kl_loss": 0.002 * step * r.random(), "actor/ppo_kl": r.gauss(0, 0.01),
        "response_length/clip_ratio": r.random() / 3, "response_length/max": 512.0,
    }  # fmt: skip


def told(rows, watch=None):
    """(step, name, text) of everything that a watch says about recorded steps."""
    watch = watch or Watch()
    return [(step, found.name, found.text) for step, row in rows for found in watch.observe(step, row)]


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_run_is_left_in_peace(seed):
    assert told((step, healthy(step, seed)) for step in range(1, 120)) == []


def test_flat_reward_with_one_and_the_same_score():
    rows = [(s, healthy(s) | {"critic/score/max": 0.0, "training/zero_std_group_ratio": 1.0}) for s in range(1, 40)]
    [(step, name, text)] = told(rows)
    assert step == FLAT_STEPS and name == "flat reward"
    assert "Every score is 0" in text and "reward function on a right answer" in text


def test_flat_groups_of_different_scores():
    rows = [(s, healthy(s) | {"training/zero_std_group_ratio": 1.0}) for s in range(1, 40)]
    [(step, _, text)] = told(rows)
    assert step == FLAT_STEPS and "too easy or too hard" in text and "filter_groups" in text


def test_flat_reward_needs_an_unbroken_row():
    rows = [(s, healthy(s) | {"training/zero_std_group_ratio": 1.0 if s % FLAT_STEPS else 0.5}) for s in range(1, 60)]
    assert told(rows) == []


def test_without_groups_the_whole_batch_is_compared():
    flat = {"critic/score/max": 0.5, "critic/score/min": 0.5}
    assert [name for _, name, _ in told((s, flat) for s in range(1, 30))] == ["flat reward"]
    assert told((s, {"train/loss": 1.0}) for s in range(1, 30)) == []  # nothing is scored: SFT


@pytest.mark.parametrize("name", ["actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"])
def test_kl_explosion(name):
    rows = [(s, healthy(s) | {name: 1e-3 * 2.0**s}) for s in range(1, 30)]
    [(step, found, text)] = told(rows)
    first = next(s for s in range(1, 30) if 1e-3 * 2.0**s > 1.0)
    assert found == "KL explosion" and step == first + KL_STEPS - 1 and name in text and "actor.optim.lr" in text


def test_a_kl_that_is_not_a_number():
    rows = [(s, healthy(s) | {"actor/kl_loss": math.nan if s > 3 else 0.0}) for s in range(1, 10)]
    assert [name for _, name, _ in told(rows)] == ["KL explosion"]


def test_one_step_of_high_kl_and_a_start_away_from_the_reference_are_no_explosion():
    assert told((s, healthy(s) | {"actor/kl_loss": 5.0 if s == 7 else 0.01}) for s in range(1, 30)) == []
    assert told((s, healthy(s) | {"actor/kl_loss": 2.0}) for s in range(1, 30)) == []


def test_reward_spread_explosion():
    rows = [(s, healthy(s) | {"critic/score/min": -(1.5**s), "critic/score/max": 1.5**s}) for s in range(1, 30)]
    [(step, name, text)] = told(rows)
    assert name == "reward spread explosion" and 'normalize="sigmoid"' in text
    assert step == next(s for s in range(1, 30) if 2 * 1.5**s > max(20, 10 * 3.0)) + SPREAD_STEPS - 1


def test_a_wide_reward_is_no_explosion():
    assert told((s, healthy(s) | {"critic/score/min": -100.0}) for s in range(1, 30)) == []


def test_truncated_answers():
    rows = [(s, healthy(s) | {"response_length/clip_ratio": 1.0}) for s in range(1, 30)]
    [(step, name, text)] = told(rows)
    assert step == TRUNCATED_STEPS and name == "all answers truncated" and "512 tokens" in text
    solved = [(s, healthy(s) | {"response_length/clip_ratio": 1.0, "critic/score/mean": 0.6}) for s in range(1, 30)]
    assert told(solved) == []


def test_a_finding_can_be_left_out():
    rows = [(s, healthy(s) | {"response_length/clip_ratio": 1.0}) for s in range(1, 30)]
    assert told(rows, Watch(ignore=["all answers truncated"])) == []


# -- real runs --------------------------------------------------------------------------------------------------------
def half(data_source, solution_str, ground_truth, extra_info=None):
    return 0.5


def growing(batch):
    from itertools import count

    growing.calls = getattr(growing, "calls", count())
    size = 3.0 ** next(growing.calls)
    return [size * (i % 2) for i in range(len(batch["responses"]))]


def run(tiny_model_dir, folder, steps, **changes):
    from trainer_helpers import make_trainer

    trainer = make_trainer(
        tiny_model_dir, folder, trainer__total_training_steps=steps, trainer__val_before_train=False, **changes
    )
    trainer.fit()
    return [line.partition(" ")[2] for line in (folder / "notices.txt").read_text().splitlines()]


def counted(notices, begin):
    return sum(text.startswith(begin) for text in notices)


def test_a_real_flat_run(tiny_model_dir, tmp_path):
    notices = run(tiny_model_dir, tmp_path, FLAT_STEPS + 2, reward__reward_fn=half)
    assert counted(notices, "Flat reward: for 10 steps (up to step 10)") == 1
    page = (tmp_path / "report.html").read_text()
    assert "Every score is 0.5" in page


def test_a_real_kl_explosion(tiny_model_dir, tmp_path):
    notices = run(
        tiny_model_dir, tmp_path, 8, actor_rollout_ref__actor__use_kl_loss=True,
        actor_rollout_ref__actor__kl_loss_coef=0.0001, actor_rollout_ref__actor__optim__lr=0.3,
    )  # fmt: skip
    assert counted(notices, "KL explosion: the policy is") == 1


def test_a_real_spread_explosion(tiny_model_dir, tmp_path):
    notices = run(tiny_model_dir, tmp_path, 9, reward__reward_fn=growing)
    assert counted(notices, "Reward spread explosion") == 1


def test_real_truncation_is_told_once_and_recorded_steps_say_the_same(tiny_model_dir, tmp_path):
    changes = {"actor_rollout_ref__rollout__ignore_eos": True, "actor_rollout_ref__rollout__stop": []}
    notices = run(tiny_model_dir, tmp_path, TRUNCATED_STEPS + 3, **changes)
    assert counted(notices, "All answers truncated: for 5 steps (up to step 5)") == 1
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    names = [name for _, name, _ in told((row["step"], row) for row in rows)]
    assert names.count("all answers truncated") == 1
