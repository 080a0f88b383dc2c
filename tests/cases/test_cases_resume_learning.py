"""Resume equals no stop for everything that learns from texts: answers, pairs, labels, reward models, two in turn."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from learning_helpers import answers, labelled, make_learner, pairs, weights
from test_cases_resume import Stop, at, recorded

STEPS = 3
SETTINGS = {"trainer__total_training_steps": STEPS, "trainer__test_freq": 1}  # two batches of four an epoch


@dataclass(frozen=True)
class Run:
    algorithm: str
    rows: list[dict[str, Any]]
    given: dict[str, Any] = field(default_factory=dict)


RUNS = {
    "sft": Run("sft", answers(), {"actor_rollout_ref__actor__optim__lr_scheduler_type": "cosine"}),
    "dpo": Run("dpo", pairs(), {"preference__sync_ref_model": True, "preference__ref_model_sync_steps": 2}),
    "kto": Run("kto", labelled(4)),
    "bco": Run("kto", labelled(4), {"preference__loss_type": "bco"}),
    "reward model": Run("rm", pairs()),
    "pairs and answers in turn": Run("dpo", pairs(), {"sft__train_files": "{answers}", "sft__ratio": 0.5}),
}


def make(name, model, folder, **more):
    run = RUNS[name]
    given = dict(run.given)
    if "sft__train_files" in given:
        given["sft__train_files"] = str(model.parent / "answers.jsonl")
    return make_learner(model, folder, run.algorithm, run.rows, validation=run.rows[:4], **SETTINGS, **given, **more)


def remembered(trainer):
    """What a checkpoint holds besides weights: a running mean, and where every loader stands."""
    memory = {name: kept.state_dict() for name, kept in trainer.recipe.memory(trainer.roles).items()}
    return memory, trainer.loader.state_dict()


@pytest.fixture(scope="module")
def straight(tiny_model_dir, tmp_path_factory):
    (tiny_model_dir.parent / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers(5)))
    done = {}

    def run(name):
        if name not in done:
            folder = tmp_path_factory.mktemp("straight")
            trainer = make(name, tiny_model_dir, folder)
            trainer.fit()
            done[name] = recorded(folder), weights(trainer), remembered(trainer)
        return done[name]

    return run


@pytest.mark.parametrize("stops", [(1,), (2,), (1, 2)], ids=["inside an epoch", "at the end of an epoch", "every step"])
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_stops_after_a_validation_goes_on_to_the_bit(straight, tiny_model_dir, tmp_path, name, stops):
    right, final, memory = straight(name)
    for step in stops:
        trainer = make(name, tiny_model_dir, tmp_path, trainer__save_freq=1)
        trainer.callbacks = (at(step),)
        torch.manual_seed(step)  # what the process drew meanwhile must not matter
        with pytest.raises(Stop):
            trainer.fit()
    trainer = make(name, tiny_model_dir, tmp_path, trainer__save_freq=1)
    assert trainer.global_steps == stops[-1]
    trainer.fit()
    assert recorded(tmp_path) == right and len(right) == STEPS
    assert remembered(trainer) == memory
    now = weights(trainer)
    assert now.keys() == final.keys() and all(torch.equal(final[key], now[key]) for key in final)
