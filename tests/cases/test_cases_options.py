"""No option without effect: changing one changes what is sampled, trained or printed; cuts of the work change nothing.

That every option is read at all is checked in tests/config/test_config_readers.py; that every one stands in one of the
tables, in test_cases_options_table.py.
"""

from __future__ import annotations

import functools
import json

import learning_helpers
import pytest
import torch
from cases_options import ACTOR, CUTS, ROLLOUT, RUNS
from tiny_models import save_tiny_model
from trainer_helpers import make_trainer, weights

from verl.tracking import is_time_metric

COMMON = {"trainer.total_training_steps": 2, "data.train_batch_size": 4, f"{ACTOR}.optim.lr": 0.02}
GENERATED = {
    "data.max_prompt_length": 64,
    f"{ACTOR}.ppo_mini_batch_size": 2,  # four steps: ratios leave 1
    f"{ROLLOUT}.n": 3,
}
LEARNED = {"dpo": learning_helpers.pairs, "rm": learning_helpers.pairs, "kto": learning_helpers.labelled}


@pytest.fixture(scope="module")
def outcome(tiny_model_dir, tmp_path_factory):
    """(metrics that do not depend on the clock, weights) of a short run of a base with changes."""
    rows = tmp_path_factory.mktemp("rows") / "answers.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in learning_helpers.answers(5)))
    places = {"{other}": save_tiny_model(tmp_path_factory.mktemp("other"), seed=7), "{answers}": rows}

    def run(name, changes):
        base, folder = RUNS[name], tmp_path_factory.mktemp("run")
        values = {**COMMON, **({} if base.algorithm in LEARNED else GENERATED), **base.given, **changes}
        values = {
            key.replace(".", "__"): str(places[value]) if isinstance(value, str) and value in places else value
            for key, value in values.items()
        }
        if base.algorithm in LEARNED:
            rows = LEARNED[base.algorithm]()
            trainer = learning_helpers.make_learner(tiny_model_dir, folder, base.algorithm, rows, **values)
        else:
            trainer = make_trainer(
                tiny_model_dir, folder, algorithm=base.algorithm, validation=base.validation, **values
            )
        metrics = trainer.fit()
        numbers = {k: v for k, v in metrics.items() if not is_time_metric(k) and "seconds" not in k}
        roles = ("actor", "critic") if base.algorithm == "ppo" else ("actor",)
        return numbers, {role: weights(trainer, role) for role in roles}

    return run


@pytest.fixture(scope="module")
def plain(outcome):
    """The run of a base as it is."""
    return functools.cache(lambda name: outcome(name, {}))


def differs(one, two):
    if one[0] != two[0] or any(one[1][role].keys() != two[1][role].keys() for role in one[1]):
        return True
    return any(not torch.equal(state[name], two[1][role][name]) for role, state in one[1].items() for name in state)


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, base in RUNS.items() for key in base.changes])
def test_a_changed_option_changes_the_run(plain, outcome, name, key):
    assert differs(plain(name), outcome(name, {key: RUNS[name].changes[key]}))


@pytest.mark.parametrize("name", RUNS)
def test_without_a_change_the_run_is_the_same(plain, outcome, name):
    assert not differs(plain(name), outcome(name, {}))


@pytest.mark.parametrize("key", CUTS)
def test_how_the_work_is_cut_changes_nothing(plain, outcome, key):
    metrics, states = outcome("grpo", {key: CUTS[key]})
    right, final = plain("grpo")
    for name in ("critic/score/mean", "response_length/mean", "prompt_length/mean"):
        assert metrics[name] == right[name]
    assert metrics["actor/pg_loss"] == pytest.approx(right["actor/pg_loss"], abs=1e-5)
    for name, value in final["actor"].items():
        torch.testing.assert_close(states["actor"][name], value, rtol=0, atol=5e-4)  # Adam's sign at gradients near 0
