"""Resume equals no stop: at the end of an epoch, inside one, after a validation, after every step.

kill -9 in a step and in a save, and dynamic sampling, are in ``tests/trainer/test_trainer_resume.py``.
"""

from __future__ import annotations

import json

import pytest
import torch
from trainer_helpers import make_trainer, weights

from verl.tracking import is_time_metric

STEPS = 5
SETTINGS = {
    "trainer__total_training_steps": STEPS,
    "trainer__test_freq": 2,
    "data__train_batch_size": 6,  # 19 rows: three batches an epoch, and one row that is not drawn
    "actor_rollout_ref__rollout__n": 2,
    "data__max_response_length": 3,
}


class Stop(Exception):
    pass


def at(step):
    def stop(trainer, metrics):
        if trainer.global_steps == step:
            raise Stop

    return stop


def recorded(folder):
    """Step → every metric that does not depend on the clock; validation included."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows})
    return {r["step"]: {k: v for k, v in r.items() if not is_time_metric(k) and "seconds" not in k} for r in rows}


@pytest.fixture(scope="module", params=["grpo", "ppo"])
def straight(request, tiny_model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"straight_{request.param}")
    trainer = make_trainer(tiny_model_dir, folder, algorithm=request.param, validation=True, **SETTINGS)
    trainer.fit()
    roles = ("actor", "critic") if request.param == "ppo" else ("actor",)
    return request.param, recorded(folder), {role: weights(trainer, role) for role in roles}


@pytest.mark.parametrize(
    "stops",
    [(2,), (3,), (1, 2, 3, 4)],
    ids=["inside an epoch, after a validation", "at the end of an epoch", "after every step"],
)
def test_a_run_that_stops_anywhere_gives_the_same_numbers_and_weights(straight, stops, tiny_model_dir, tmp_path):
    algorithm, right, final = straight
    options = {**SETTINGS, "trainer__save_freq": 1}
    for step in stops:
        trainer = make_trainer(tiny_model_dir, tmp_path, algorithm=algorithm, validation=True, **options)
        trainer.callbacks = (at(step),)
        torch.manual_seed(step)  # what the process drew meanwhile must not matter
        with pytest.raises(Stop):
            trainer.fit()
    trainer = make_trainer(tiny_model_dir, tmp_path, algorithm=algorithm, validation=True, **options)
    assert trainer.global_steps == stops[-1]
    trainer.fit()
    assert recorded(tmp_path) == right and len(right) == STEPS
    for role, state in final.items():
        for name, now in weights(trainer, role).items():
            assert torch.equal(state[name], now), name
