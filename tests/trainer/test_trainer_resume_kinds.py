"""A checkpoint knows which kind of run made it, and another kind does not go on with it."""

from __future__ import annotations

import shutil

import pytest
from learning_helpers import answers, labelled, make_learner, pairs
from tiny_models import save_tiny_model
from trainer_helpers import make_trainer

from verl import notices
from verl.errors import CheckpointError

ROWS = {"dpo": pairs, "ipo": pairs, "simpo": pairs, "kto": labelled, "sft": answers}
SAVED = {"trainer__total_training_steps": 1, "trainer__save_final": True}


@pytest.fixture(scope="module")
def dpo(tiny_model_dir, tmp_path_factory):
    """The folder of a DPO run of one step."""
    folder = tmp_path_factory.mktemp("dpo") / "run"
    make_learner(tiny_model_dir, folder, "dpo", pairs(), **SAVED).fit()
    return folder


@pytest.mark.parametrize("algorithm", ["kto", "ipo", "sft"])
def test_another_kind_or_loss_is_refused_before_a_model_loads(tiny_model_dir, dpo, tmp_path, algorithm, monkeypatch):
    shutil.copytree(dpo, tmp_path / "run", symlinks=True)
    monkeypatch.setattr("verl.trainer.learners.build_roles", None)  # called only if a model is loaded
    with pytest.raises(CheckpointError) as caught:
        make_learner(tiny_model_dir, tmp_path / "run", algorithm, ROWS[algorithm]())
    said = str(caught.value)
    assert f"was made by dpo with preference.loss_type=sigmoid, and this run is {algorithm}" in said
    for remedy in ("trainer.default_local_dir", "actor_rollout_ref.model.path=", "trainer.resume_mode=disable"):
        assert remedy in said
    assert (tmp_path / "run" / "global_step_1" / "train_state").is_dir()


def test_the_remedies_work(tiny_model_dir, dpo, tmp_path):
    shutil.copytree(dpo, tmp_path / "run", symlinks=True)
    kept = tmp_path / "run" / "global_step_1" / "actor"
    own = make_learner(kept, tmp_path / "own", "kto", labelled(), trainer__total_training_steps=1)
    assert own.global_steps == 0 and own.fit()["training/global_step"] == 1
    anew = make_learner(tiny_model_dir, tmp_path / "run", "ipo", pairs(), trainer__resume_mode="disable")
    assert anew.global_steps == 0
    anew.close()


def test_the_same_kind_goes_on(tiny_model_dir, dpo, tmp_path):
    shutil.copytree(dpo, tmp_path / "run", symlinks=True)
    again = make_learner(tiny_model_dir, tmp_path / "run", "dpo", pairs(), actor_rollout_ref__actor__optim__lr=1e-4)
    assert again.global_steps == 1 and not any("began from" in text for text in notices.seen())
    again.close()


def test_a_checkpoint_from_before_kinds_were_kept_goes_on(tiny_model_dir, tmp_path, monkeypatch):
    with monkeypatch.context() as before:
        before.setattr("verl.trainer.runstate._maker", lambda config: None)
        make_learner(tiny_model_dir, tmp_path, "dpo", pairs(), **SAVED).fit()
    again = make_learner(tiny_model_dir, tmp_path, "dpo", pairs())
    assert again.global_steps == 1
    again.close()


def test_with_sft_steps_between_and_without(tiny_model_dir, tmp_path):
    import json

    file = tmp_path / "sft.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in answers()))
    between = {"sft__train_files": str(file), "sft__ratio": 0.5}
    make_learner(tiny_model_dir, tmp_path / "mixed", "dpo", pairs(), **SAVED, **between).fit()
    with pytest.raises(CheckpointError, match=r"made by dpo.* with SFT steps between \(sft.train_files\), and this"):
        make_learner(tiny_model_dir, tmp_path / "mixed", "dpo", pairs())


def test_another_estimator_goes_on_with_a_notice_and_another_model_is_told(tiny_model_dir, tmp_path):
    make_trainer(tiny_model_dir, tmp_path / "run", **SAVED).fit()
    other = save_tiny_model(tmp_path / "other")
    make_trainer(other, tmp_path / "run", algorithm="rloo").close()
    said = "\n".join(notices.seen())
    assert "made with algorithm.adv_estimator=grpo; the run goes on with algorithm.adv_estimator=rloo" in said
    assert f"began from {tiny_model_dir}" in said and f"path={other} gives way" in said
    with pytest.raises(CheckpointError, match="was made by grpo, and this run is dpo"):
        make_learner(tiny_model_dir, tmp_path / "run", "dpo", pairs())
