"""Checkpoints from outside: cut, changed, parts missing, of another model: refused with a message or read right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from cases_fuzz import fuzz, refused, values
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import save_tiny_model
from trainer_helpers import make_trainer, weights

from verl.checkpoint import CheckpointStore, read_protos, read_state, write_protos
from verl.checkpoint.manifest import write_manifest
from verl.protocol import DataProto


@pytest.fixture(scope="module")
def saved(tiny_model_dir, tmp_path_factory):
    """A run's folder with a checkpoint of step 1 and left-over rows in it, and the weights that it holds."""
    folder = tmp_path_factory.mktemp("saved")
    trainer = make_trainer(tiny_model_dir, folder, trainer__total_training_steps=1, trainer__save_final=True)
    trainer.fit()
    rows = DataProto.from_dict(
        tensors={"x": torch.arange(4)}, non_tensors={"uid": ["a", "b", "c", "d"]}, meta_info={"k": [1, None]}
    )
    write_protos(folder / "global_step_1" / "train_state", {"left.prompt": rows})
    list_again(folder)
    return Saved(folder, weights(trainer))


class Saved:
    def __init__(self, folder, live):
        self.folder, self.live = folder, live

    def copy(self, name: str) -> Path:
        place = self.folder.parent / name
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.folder, place, symlinks=True)
        return place


def list_again(folder):
    """Make the manifest agree with the files, as somebody who edits a checkpoint could do."""
    (folder / "global_step_1" / "manifest.json").unlink(missing_ok=True)
    write_manifest(folder / "global_step_1", 1, 1, 0.5)


def change(data, path: Path):
    """Cut the file, take it away, change bytes of it, or change a value of its JSON."""
    kinds = ["cut", "gone", "bytes", "longer"] + (["value", "without"] if path.suffix == ".json" else [])
    kind, whole = data.draw(st.sampled_from(kinds)), path.read_bytes()
    if kind == "cut":
        path.write_bytes(whole[: data.draw(st.integers(0, max(len(whole) - 1, 0)))])
    elif kind == "gone":
        path.unlink()
    elif kind == "longer":
        path.write_bytes(whole + data.draw(st.binary(min_size=1, max_size=9)))
    elif kind == "bytes":
        changed = bytearray(whole)
        # the first bytes: headers and indices; what tensors hold cannot be told from other numbers
        for _ in range(data.draw(st.integers(1, 4))):
            if changed:
                changed[data.draw(st.integers(0, min(len(changed) - 1, 300)))] = data.draw(st.integers(0, 255))
        path.write_bytes(bytes(changed))
    else:
        document = json.loads(whole)
        node = document
        while isinstance(node, (dict, list)) and node:
            key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else list(range(len(node)))))
            if not isinstance(node[key], (dict, list)) or not node[key] or data.draw(st.booleans()):
                if kind == "without":
                    del node[key]
                else:
                    node[key] = data.draw(values)
                break
            node = node[key]
        path.write_text(json.dumps(document))
    return kind


def files_below(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


@given(data=st.data())
@fuzz(50)
def test_a_changed_checkpoint_is_found_whole_or_not_at_all(saved, data):
    """Whatever happened to its files, the store gives a complete checkpoint, None with a notice, or a message."""
    folder = saved.copy("found")
    path = data.draw(
        st.sampled_from([*files_below(folder / "global_step_1"), folder / "latest_checkpointed_iteration.txt"])
    )
    before = path.read_bytes()
    change(data, path)
    store, message = refused(lambda: CheckpointStore(folder, keep_last=1, keep_best=True))
    found, message = refused(store.find)
    refused(lambda: store.find("resume_path", folder / "global_step_1"))
    refused(store.best)
    whole = path.is_file() and len(path.read_bytes()) == len(before)
    if path.name not in ("manifest.json", "latest_checkpointed_iteration.txt"):
        assert (found is not None) == whole
    assert message is None  # mode auto always goes on
    store.save(2, lambda place: (place / "new").write_text("x"))  # and nothing of it disturbs the next save
    assert store.find() == folder / "global_step_2"


@given(data=st.data())
@fuzz(100)
def test_a_changed_state_is_read_or_refused(saved, data):
    state = saved.copy("state") / "global_step_1" / "train_state"
    change(data, data.draw(st.sampled_from(files_below(state))))
    for read in (read_state, read_protos):
        found, message = refused(lambda read=read: read(state))
        assert (found is None) == (message is not None)


@given(data=st.data())
@fuzz(20)
def test_a_run_resumes_from_a_changed_state_or_says_why_not(saved, tiny_model_dir, data):
    folder = saved.copy("resumed")
    state = folder / "global_step_1" / "train_state"
    change(data, data.draw(st.sampled_from(files_below(state))))
    list_again(folder)
    trainer, _message = refused(lambda: make_trainer(tiny_model_dir, folder, trainer__total_training_steps=2))
    if trainer is not None:
        now = weights(trainer)
        assert all(torch.equal(value, now[name]) for name, value in saved.live.items())
        trainer.roles.close()
    assert (folder / "global_step_1" / "actor" / "model.safetensors").is_file()  # nothing on disk was lost


@given(data=st.data())
@fuzz(25)
def test_a_changed_model_folder_is_refused_or_loads_as_it_was(saved, tiny_model_dir, data):
    """The tokenizer and the weights; of a changed config.json only that it is no crash."""
    folder = saved.folder.parent / "model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(tiny_model_dir, folder)
    path = data.draw(st.sampled_from(files_below(folder)))
    change(data, path)
    trainer, _ = refused(
        lambda: make_trainer(folder, folder / "run", algorithm=data.draw(st.sampled_from(["grpo", "ppo"])))
    )
    if trainer is not None:
        if path.name == "model.safetensors":
            assert path.stat().st_size == (tiny_model_dir / path.name).stat().st_size
        trainer.roles.close()


def test_a_checkpoint_of_another_model_or_algorithm_is_refused(saved, tiny_model_dir, tmp_path):
    folder = saved.copy("other")
    wider = save_tiny_model(tmp_path / "wider", hidden_size=64)
    for model, options in ((wider, {}), (tiny_model_dir, {"algorithm": "ppo"})):
        trainer, message = refused(lambda model=model, options=options: make_trainer(model, folder, **options))
        assert trainer is None and ("another model" in message or "another algorithm" in message)
