"""A value model class of the user's own (critic.model.custom_cls): used, trained, saved, or refused by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from verl.config import load_config, validate
from verl.errors import ConfigError, ModelError
from verl.models.settings import ModelSettings
from verl.models.value import load_value_model

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))

SOURCE = '''
import torch

class Mine(torch.nn.Module):
    """Counts: the value is a learned number for each token, summed so far."""
    def __init__(self, path):
        super().__init__()
        self.path = path
        self.table = torch.nn.Embedding(128, 1)

    def forward(self, input_ids, attention_mask):
        return (self.table(input_ids)[..., 0] * attention_mask).cumsum(1)

class Wrong(Mine):
    def forward(self, input_ids, attention_mask):
        return self.table(input_ids)

class Broken(Mine):
    def __init__(self, path):
        raise RuntimeError("no weights today")

class NoModule:
    def __init__(self, path):
        pass
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "critic.py"
    path.write_text(SOURCE)
    return path


def batch():
    from tiny_models import sample_batch

    return sample_batch([([5, 6, 7], [8, 9], [1, 1]), ([5], [7], [1])], extra_response=1)


def load(file, name="Mine"):
    return load_value_model(ModelSettings("some/model", custom_class=(str(file), name)))


def test_the_value_of_a_token_is_that_of_the_state_before_it(file):
    value = load(file)
    table = value.model.table.weight[:, 0]
    got = value(batch())
    assert value.model.path == "some/model" and got.shape == (2, 3)
    torch.testing.assert_close(got[0, 0], table[[5, 6, 7]].sum())
    torch.testing.assert_close(got[0, 1], table[[5, 6, 7, 8]].sum())
    torch.testing.assert_close(got[1, 0], table[5])
    assert got[0, 2] == 0 and got[1, 1] == 0
    got.sum().backward()
    assert value.model.table.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Absent", r"has no class 'Absent' .*its classes are Mine, Wrong, Broken, NoModule"),
        ("Broken", r"fails \(line \d+\): RuntimeError: no weights today"),
        ("NoModule", "no torch.nn.Module with weights"),
    ],
)
def test_what_does_not_work_is_one_sentence(file, name, said):
    with pytest.raises(ModelError, match=said):
        load(file, name)


def test_a_wrong_shape_and_a_file_that_fails(file, tmp_path):
    with pytest.raises(ModelError, match=r"gave \(2, 6, 1\) for rows of shape \(2, 6\)"):
        load(file, "Wrong")(batch())
    with pytest.raises(ModelError, match="there is no file"):
        load(tmp_path / "none.py")
    (tmp_path / "bad.py").write_text("x = 1 / 0\n")
    with pytest.raises(ModelError, match=r"fails when imported \(line 1\): ZeroDivisionError"):
        load(tmp_path / "bad.py")
    (tmp_path / "syntax.py").write_text("def (:\n")
    with pytest.raises(ModelError, match=r"syntax.py, line 1"):
        load(tmp_path / "syntax.py")


def test_A9_a_run_trains_and_saves_it(file, tiny_model_dir, tmp_path):
    from trainer_helpers import make_trainer, weights

    changes = {"critic__model__custom_cls__path": str(file), "critic__model__custom_cls__name": "Mine"}
    trainer = make_trainer(tiny_model_dir, tmp_path / "run", algorithm="ppo", **changes, trainer__save_final=True)
    before = weights(trainer, "critic")
    metrics = trainer.fit()
    after = weights(trainer, "critic")
    assert before.keys() == after.keys() == {"live/model.table.weight"}
    assert not torch.equal(before["live/model.table.weight"], after["live/model.table.weight"])
    assert metrics["critic/vf_loss"] >= 0
    saved = load_file(tmp_path / "run" / "global_step_2" / "critic" / "model.safetensors")
    torch.testing.assert_close(saved["table.weight"], after["live/model.table.weight"])


def test_the_keys_go_together(file):
    with pytest.raises(ConfigError, match=r"critic.model.custom_cls needs both path"):
        validate(load_config([f"critic.model.custom_cls.path={file}"]), need_data=False, need_model=False)
    both = [f"critic.model.custom_cls.path={file}", "critic.model.custom_cls.name=Mine"]
    validate(load_config(both), need_data=False, need_model=False)
    with pytest.raises(ConfigError, match="trains in one process"):
        validate(load_config([*both, "trainer.n_gpus_per_node=2"]), need_data=False, need_model=False)
