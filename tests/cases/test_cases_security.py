"""Reading a checkpoint runs no code, remote code is off unless asked for, and what a model writes stays text."""

from __future__ import annotations

import pickle
import re
import shutil
from pathlib import Path

import pytest
from cases_fuzz import refused
from tiny_models import save_tiny_model
from trainer_helpers import make_trainer

import verl
from verl.checkpoint import CheckpointStore
from verl.checkpoint.manifest import write_manifest
from verl.config import LEAVES, load_config, resolve
from verl.models.loading import load_tokenizer
from verl.models.settings import ModelSettings
from verl.protocol import DataProto


class Trap:
    """Unpickling one writes a file."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.fixture
def mark(tmp_path):
    mark = tmp_path / "unpickled"
    pickle.loads(pickle.dumps(Trap(mark)))
    assert mark.exists()  # the trap works
    mark.unlink()
    return mark


def test_a_pickle_in_place_of_any_file_of_a_checkpoint_does_nothing(tiny_model_dir, tmp_path, mark):
    """Whatever file is replaced, resuming refuses it or does not read it."""
    run = tmp_path / "run"
    trainer = make_trainer(
        tiny_model_dir, run, algorithm="ppo", trainer__total_training_steps=1, trainer__save_final=True
    )
    trainer.fit()
    step = run / "global_step_1"
    names = sorted(path.relative_to(step) for path in step.rglob("*") if path.is_file())
    assert {"actor", "critic", "train_state"} <= {name.parts[0] for name in names}
    trap = pickle.dumps(Trap(mark))
    for name in names:
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(run, copy, symlinks=True)
        (copy / "global_step_1" / name).write_bytes(trap)
        if name.name != "manifest.json":
            (copy / "global_step_1" / "manifest.json").unlink()
            write_manifest(copy / "global_step_1", 1, 1, None)
        again, message = refused(lambda copy=copy: make_trainer(tiny_model_dir, copy, algorithm="ppo"))
        if again is not None:
            again.roles.close()
        assert not mark.exists(), name
        assert (message is not None) == (name.parts[0] == "train_state"), name
    refused(lambda: DataProto.load_from_disk(copy / "global_step_1" / names[0]))
    assert CheckpointStore(run).find() == step and not mark.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_model_folder_with_a_pickle_is_refused(tmp_path, mark, name):
    from cases_actor import make_actor

    folder = save_tiny_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Trap(mark)))
    found, message = refused(lambda: make_actor(folder))
    assert found is None and message and not mark.exists()


def test_no_code_of_ours_unpickles_what_may_come_from_outside():
    """Only messages between processes that the run itself started are pickled: its reward workers, its ranks (over Ray
    and over the process group of the run), and the engines that it hosts."""
    allowed = {
        "comm/processes.py",
        "comm/threads.py",
        "rollout/remote/receiving.py",
        "rewards/wire.py",
        "rewards/worker.py",
        "rewards/slot.py",
        "rewards/source.py",
        "single_controller/ray/wire.py",
    }
    root = Path(verl.__file__).parent
    found = set()
    for file in root.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if re.search(
            r"pickle\.loads?\(|Unpickler|weights_only=False|allow_pickle=True|\beval\(\w*(text|input)|yaml\.load\(",
            text,
        ):
            found.add(file.relative_to(root).as_posix())
        assert not re.search(r"torch\.load\((?!.*weights_only=True)", text), file
    assert found <= allowed
    unpickled = re.findall(r".*pickle\.loads.*", (root / "comm" / "processes.py").read_text(encoding="utf-8"))
    assert len(unpickled) == 2 and all("_gather_bytes" in line or "self.rank" in line for line in unpickled)


REMOTE = """
import pathlib
pathlib.Path({mark!r}).touch()
from transformers import PretrainedConfig
class Evil(PretrainedConfig):
    model_type = "evil"
"""


def test_remote_code_is_off_unless_asked_for(tmp_path, mark):
    keys = [key for key in LEAVES if "trust_remote_code" in key]
    assert keys and all(not LEAVES[key].default for key in keys)
    config = resolve(load_config(["actor_rollout_ref.model.path=a/b"]))
    assert config.actor_rollout_ref.model.trust_remote_code is False and config.critic.model.trust_remote_code is False
    assert ModelSettings("x").trust_remote_code is False
    folder = save_tiny_model(tmp_path / "evil")
    text = (folder / "config.json").read_text()
    changed = text.replace('"model_type": "llama"', '"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}')
    assert changed != text
    (folder / "config.json").write_text(changed)
    (folder / "evil.py").write_text(REMOTE.format(mark=str(mark)))
    from cases_actor import make_actor

    for load in (lambda: make_actor(folder), lambda: load_tokenizer(str(folder))):
        refused(load)
        assert not mark.exists()
    assert refused(lambda: make_actor(folder))[1] is not None


def test_every_load_of_a_model_hands_the_setting_on():
    """No call of transformers' loaders in our code leaves ``trust_remote_code`` to chance or sets it to True."""
    root = Path(verl.__file__).parent
    for file in root.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert "trust_remote_code=True" not in text, file


def test_a_response_with_a_script_stays_text_in_the_report(tiny_model_dir, tmp_path):
    """From a real run; what a browser makes of worse texts is in tests/tracking/test_tracking_report.py."""
    from verl.tracking import write_report

    trainer = make_trainer(tiny_model_dir, tmp_path, trainer__total_training_steps=1)
    trainer.fit()
    evil = "</script><script>alert(1)</script>"
    samples = tmp_path / "samples.jsonl"
    line = samples.read_text().splitlines()[0]
    import json

    samples.write_text(json.dumps({**json.loads(line), "response": evil}) + "\n")
    page = write_report(tmp_path).read_text()
    assert "<script>alert(1)" not in page and "alert(1)" in page


def test_servers_listen_to_this_machine_only_unless_asked(tmp_path, monkeypatch):
    """``verl serve`` and ``verl dash`` as typed, up to the open port."""
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    import verl.cli.serve
    import verl.serving.server
    import verl.tracking.dash

    opened = []

    def serve(model, sock, **_):
        opened.append(sock.getsockname()[0])
        sock.close()

    monkeypatch.setattr(verl.serving.server, "serve", serve)
    folder = str(save_tiny_model(tmp_path / "model"))
    assert verl.cli.serve.main([folder, "--port", "0", "--device", "cpu"]) == 0
    server = verl.tracking.dash.make_server(tmp_path, 0)
    opened.append(server.server_address[0])
    server.server_close()
    assert opened == ["127.0.0.1", "127.0.0.1"]
