"""SFT steps between the steps of another algorithm."""

from __future__ import annotations

import json

import pytest
from learning_helpers import answers, assert_equal, make_learner, pairs, weights
from tiny_models import save_tiny_model
from trainer_rewards import digits_share

from verl.data import arithmetic_task
from verl.errors import CheckpointError, ConfigError
from verl.trainer.sft.mixed import is_sft, sft_steps, steps_in_all

RL = {
    "data__max_prompt_length": 32,
    "data__max_response_length": 5,
    "actor_rollout_ref__rollout__stop": ["\n"],
    "actor_rollout_ref__rollout__n": 2,
    "reward__reward_fn": digits_share,
    "reward__num_workers": 1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def sft_file(tmp_path):
    path = tmp_path / "sft.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in answers(5)))
    return str(path)


@pytest.mark.parametrize("ratio", [0.3, 0.1, 0.5, 0.25, 1 / 3, 0.9, 0.07])
def test_the_schedule_is_exact_and_even(ratio):
    kinds = [is_sft(step, ratio) for step in range(1, 1001)]
    for length in (1, 3, 10, 100, 997):
        counts = [sum(kinds[start : start + length]) for start in range(0, 1000 - length + 1)]
        assert max(counts) - min(counts) <= 1, length  # even: every stretch of steps has as many as any other
        assert abs(counts[0] - ratio * length) < 1
    assert sum(kinds) == sft_steps(1000, ratio)


def test_of_ten_steps_three():
    assert [step for step in range(1, 11) if is_sft(step, 0.3)] == [4, 7, 10]
    assert sum(is_sft(step, 0.3) for step in range(1, 11)) == 3
    assert sum(is_sft(step, 0.1) for step in range(1, 101)) == 10  # 0.1 is a tenth, not the float below it
    assert steps_in_all(7, 0.3) == 9 and steps_in_all(0, 0.3) == 0


def run(model, folder, sft_file, algorithm="ppo", rows=None, **changes):
    steps = []
    settings = {"trainer__total_training_steps": 10, "sft__train_files": sft_file, "sft__ratio": 0.3, **changes}
    settings = {**(RL if rows is None else {}), **settings}
    trainer = make_learner(model, folder, algorithm, rows or arithmetic_task("train", 5), **settings)
    trainer.callbacks = (lambda t, metrics: steps.append((t.global_steps, dict(metrics))),)
    return trainer, steps


def test_ppo_with_sft_steps(model, tmp_path, sft_file):
    trainer, steps = run(model, tmp_path / "run", sft_file, algorithm__use_kl_in_reward=True)
    trainer.fit()
    kinds = {step: "train/loss" in metrics for step, metrics in steps}
    assert [step for step, sft in kinds.items() if sft] == [4, 7, 10]
    for step, metrics in steps:
        kl = any("kl" in name for name in metrics)
        assert kl != kinds[step], f"step {step}: {list(metrics)}"
        assert ("critic/score/mean" in metrics) != kinds[step]
    assert [node.name for node in trainer.flows.flow("train", 4).nodes] == ["plan", "update_actor"]


def test_dpo_with_sft_steps(model, tmp_path, sft_file):
    trainer, steps = run(model, tmp_path / "run", sft_file, "dpo", pairs(), preference__precompute_ref_log_probs=True)
    trainer.fit()
    assert [step for step, metrics in steps if "train/tokens" in metrics] == [4, 7, 10]
    assert [step for step, metrics in steps if "rewards/margins" in metrics] == [1, 2, 3, 5, 6, 8, 9]


@pytest.mark.parametrize("stop", [3, 4])
def test_both_loaders_resume(model, tmp_path, sft_file, stop):
    settings = {"trainer__total_training_steps": 8, "trainer__save_freq": stop}
    whole, steps = run(model, tmp_path / "a", sft_file, **settings)
    whole.fit()
    half, _ = run(model, tmp_path / "b", sft_file, **settings)
    half.total_steps = stop
    half.fit()
    rest, later = run(model, tmp_path / "b", sft_file, **settings)
    assert rest.global_steps == stop and rest.loader.drawn == stop
    rest.fit()
    assert_equal(weights(whole), weights(rest))
    names = ("train/loss", "critic/score/mean")
    numbers = [{n: m.get(n) for n in names} for step, m in steps if step > stop]
    assert numbers == [{n: m.get(n) for n in names} for _, m in later]


def test_epochs_count_the_other_algorithms_data(model, tmp_path, sft_file):
    trainer, steps = run(
        model, tmp_path / "run", sft_file, "dpo", pairs(), trainer__total_training_steps=None, trainer__total_epochs=2,
        sft__ratio=0.5, data__train_batch_size=2, sft__train_batch_size=3,
    )  # fmt: skip
    trainer.fit()
    assert sum("rewards/margins" in metrics for _, metrics in steps) == 2 * 4
    assert sum("train/tokens" in metrics for _, metrics in steps) == 7  # the last step is the other algorithm's


def test_sft_in_sft_is_refused(model, tmp_path, sft_file):
    with pytest.raises(ConfigError, match="puts SFT steps between"):
        make_learner(model, tmp_path / "run", "sft", answers(), sft__train_files=sft_file)


def test_sft_steps_are_at_temperature_1(model, tmp_path, sft_file):
    losses = [
        make_learner(
            model, tmp_path / str(temperature), "grpo", arithmetic_task(), trainer__total_training_steps=2,
            sft__train_files=sft_file, sft__ratio=0.5, actor_rollout_ref__actor__optim__lr=1e-12,
            actor_rollout_ref__rollout__temperature=temperature, **RL,
        ).fit()["train/loss"]
        for temperature in (1.0, 0.5)
    ]  # fmt: skip
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_checkpoint_without_sft_steps_is_refused(model, tmp_path, sft_file):
    settings = {"trainer__total_training_steps": 1, "trainer__save_final": True}
    make_learner(model, tmp_path, "dpo", pairs(), **settings).fit()
    with pytest.raises(CheckpointError, match=r"this run is dpo .* with SFT steps between"):
        make_learner(model, tmp_path, "dpo", pairs(), sft__train_files=sft_file, sft__ratio=0.5)
