"""One-step-off-policy: the rollout of the next step beside the update of this one, with weights one step old."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer_resume import trajectory
from trainer_helpers import make_trainer, weights

from verl import notices
from verl.config import load_config, needs_old_log_probs, resolve, validate
from verl.dataflow import NodeError
from verl.dataflow.executor import StepResult
from verl.errors import ConfigError
from verl.trainer.base import Trainer

OFF = {"trainer__schedule": "one_step_off"}


def run(model: Path, folder: Path, **changes: Any) -> tuple[Trainer, list[StepResult]]:
    """A run and what each of its steps made."""
    results: list[StepResult] = []
    trainer = make_trainer(model, folder, **changes)
    real = trainer.run_flow

    def run_flow(*arguments: Any, **options: Any) -> StepResult:
        results.append(real(*arguments, **options))
        return results[-1]

    trainer.run_flow = run_flow
    trainer.stays_open = True
    trainer.fit()
    return trainer, results


def samples(result: StepResult) -> tuple[list[str], torch.Tensor]:
    frame = result.frames["sample"]
    return frame.non_tensor_batch["sample_id"].tolist(), frame.batch["responses"]


def same(one: list[StepResult], other: list[StepResult]) -> None:
    for a, b in zip(one, other, strict=True):
        assert samples(a)[0] == samples(b)[0] and torch.equal(samples(a)[1], samples(b)[1])
        names = [name for name in a.metrics if not name.startswith(("timing", "perf")) and "seconds" not in name]
        assert {n: a.metrics[n] for n in names} == {n: b.metrics[n] for n in names}


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "grpo"},
        {"algorithm": "ppo", "actor_rollout_ref__actor__use_kl_loss": True, "trainer__critic_warmup": 1},
        {"algorithm": "remax", "algorithm__rollout_correction__bypass_mode": True},
        {"algorithm": "dapo", "data__gen_batch_size": 3, "actor_rollout_ref__rollout__n": 4},
        {"algorithm": "grpo", "actor_rollout_ref__model__lora_rank": 2, "actor_rollout_ref__actor__use_kl_loss": True},
    ],
    ids=["grpo", "ppo-critic-reference", "remax", "dapo", "lora"],
)
def test_overlapped_equals_one_after_the_other(tiny_model_dir, tmp_path, changes):
    changes = {**OFF, "trainer__total_training_steps": 3, **changes}
    fast, steps = run(tiny_model_dir, tmp_path / "fast", **changes)
    slow, reference = run(tiny_model_dir, tmp_path / "slow", trainer__executor="serial", **changes)
    same(steps, reference)
    mine, theirs = weights(fast), weights(slow)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    for trainer in (fast, slow):
        trainer.close()


def test_rows_are_those_of_the_step_before_and_the_rollout_runs_beside_the_update(tiny_model_dir, tmp_path):
    trainer, steps = run(tiny_model_dir, tmp_path, **OFF, trainer__total_training_steps=4)
    assert [step.lag for step in steps] == [0, 1, 1, 1]
    assert [step.metrics.get("rollout_corr/rollout_is_mean") is not None for step in steps] == [True] * 4
    assert trainer.metrics["training/rollout_staleness"] == 1
    assert steps[0].read["generate"] == steps[1].read["generate"] == {"actor.weights": 0}
    assert steps[3].read["generate"] == {"actor.weights": 2} and steps[3].read["old_logp"] == {"actor.weights": 3}
    for now, later in pairwise(steps):
        spans = {name: (begin, end) for name, begin, end in now.spans if name in ("old_logp", "update_actor")}
        begin, end = next((begin, end) for name, begin, end in later.spans if name == "generate")
        assert begin < spans["update_actor"][1] and spans["old_logp"][0] < end, "at the same time"
    # with the schedule sync nothing of this is there, and the first rollout is the same
    plain, in_step = run(tiny_model_dir, tmp_path / "sync", trainer__total_training_steps=2)
    assert torch.equal(samples(steps[0])[1], samples(in_step[0])[1])
    assert samples(steps[1])[0] == samples(in_step[1])[0]
    assert plain.pipeline is None and plain.roles.rollout is None and in_step[1].lag is None
    assert "training/rollout_staleness" not in plain.metrics
    for trained in (trainer, plain):
        trained.close()


class Stopped(Exception):
    """Ends a run between two steps."""


def stop_at(step: int):
    def callback(trainer: Trainer, metrics: dict[str, float]) -> None:
        if trainer.global_steps == step:
            raise Stopped

    return callback


@pytest.mark.parametrize("algorithm", ["ppo", "dapo"])
def test_resume_equals_no_stop_with_rows_in_flight(tiny_model_dir, tmp_path, algorithm):
    changes = {
        **OFF,
        "algorithm": algorithm,
        "validation": True,
        "trainer__total_training_steps": 5,
        "trainer__test_freq": 2,
        "trainer__save_freq": 2,
        "actor_rollout_ref__rollout__n": 4,
        "data__gen_batch_size": 3,
    }
    straight, whole = run(tiny_model_dir, tmp_path / "straight", **changes)
    broken = make_trainer(tiny_model_dir, tmp_path / "broken", **changes)
    broken.callbacks = (stop_at(3),)  # step 3 is lost; the rows of step 3 are those of the checkpoint of step 2
    with pytest.raises(Stopped):
        broken.fit()
    torch.manual_seed(1)
    again, rest = run(tiny_model_dir, tmp_path / "broken", **changes)
    assert [result.step for result in rest] == [3, 4, 5] and rest[0].lag == 1
    same(whole[2:], rest)
    mine, theirs = weights(again), weights(straight)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert trajectory(tmp_path / "broken") == trajectory(tmp_path / "straight")
    for trainer in (straight, again):
        trainer.close()


def test_a_run_without_the_schedule_answers_the_pending_prompts_anew(tiny_model_dir, tmp_path):
    first = make_trainer(tiny_model_dir, tmp_path, **OFF, trainer__save_freq=1, trainer__total_training_steps=3)
    first.callbacks = (stop_at(1),)
    with pytest.raises(Stopped):
        first.fit()
    pending = first.pipeline.pending
    assert pending.step == 2
    again, results = run(tiny_model_dir, tmp_path, trainer__total_training_steps=2)
    again.close()
    assert samples(results[0])[0] == samples(pending)[0] and results[0].lag is None
    assert any("answered anew" in line for line in notices.seen())


def test_single_steps_and_validation_have_the_newest_weights(tiny_model_dir, tmp_path):
    trainer = make_trainer(tiny_model_dir, tmp_path, **OFF, validation=True, trainer__total_training_steps=3)
    trainer.train_step()
    assert trainer.pipeline.pending.step == 2
    trainer.validate()
    copies = trainer.roles.rollout.workers[0].model.state_dict()
    live = trainer.roles.actor.workers[0].model.state_dict()
    assert all(torch.equal(copies[name], live[name]) for name in live)
    assert all(copies[name].data_ptr() != live[name].data_ptr() for name in live)
    assert trainer.train_step().lag == 1
    with pytest.raises(ConfigError, match="leave the batch out"):
        trainer.train_step(trainer.loader.next_batch())
    assert trainer.describe()["rollout_engine"] == trainer.roles.rollout.describe()["rollout_engine"]
    trainer.close()


def test_a_rollout_that_fails_ends_the_step(tiny_model_dir, tmp_path):
    trainer = make_trainer(tiny_model_dir, tmp_path, **OFF, trainer__total_training_steps=4)
    worker = trainer.roles.rollout.workers[0]
    real = worker.hybrid.rollout_mode

    def rollout_mode():
        if trainer.global_steps == 1:
            raise RuntimeError("the engine is gone")
        return real()

    worker.hybrid.rollout_mode = rollout_mode
    with pytest.raises(NodeError, match=r"generate.*the engine is gone"):
        trainer.fit()
    assert trainer.global_steps == 1 and trainer.mid_step


def config(*overrides: str):
    return load_config(["algorithm.name=grpo", "trainer.schedule=one_step_off", *overrides])


def test_importance_weights_are_on_by_default_and_no_shortcut_is_taken():
    assert resolve(config()).algorithm.rollout_correction.rollout_is == "token"
    assert (
        resolve(config("algorithm.rollout_correction.rollout_is=sequence")).algorithm.rollout_correction.rollout_is
        == "sequence"
    )
    bypass = resolve(config("algorithm.rollout_correction.bypass_mode=true"))
    assert bypass.algorithm.rollout_correction.rollout_is is None
    assert needs_old_log_probs(config()) and not needs_old_log_probs(load_config(["algorithm.name=grpo"]))


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["algorithm.name=online_dpo", "actor_rollout_ref.rollout.n=2"], "is for PPO and its kin"),
        (["sft.train_files=a.parquet"], "has no SFT steps in between"),
        (
            [
                "algorithm.filter_groups.enable=true",
                "algorithm.filter_groups.carry=true",
                "actor_rollout_ref.rollout.n=2",
            ],
            "would make them two",
        ),
        (["algorithm.rollout_correction.rollout_is=null"], "trains on samples of older weights"),
        (["trainer.n_gpus_per_node=2"], "needs devices of the rollout's own"),
        (["actor_rollout_ref.rollout.tensor_model_parallel_size=2"], "has all weights"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(overrides, problem):
    with pytest.raises(ConfigError) as caught:
        validate(config(*overrides), need_data=False, need_model=False)
    assert any("trainer.schedule=one_step_off" in text and problem in text for text in caught.value.problems)
