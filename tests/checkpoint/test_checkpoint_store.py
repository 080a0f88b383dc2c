"""The folder of checkpoints: atomic saves, finding, retention, links, and clear errors."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from verl import notices
from verl.checkpoint import CheckpointStore, step_of
from verl.checkpoint.layout import DELETED, MANIFEST, REPLACED, SAVING, TRACKER, leftovers
from verl.errors import CheckpointError, ConfigError

ROOT = Path(__file__).parents[2]
FRESH_PROCESS = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


def writer(text: str = "x"):
    def write(folder: Path) -> None:
        (folder / "actor").mkdir()
        (folder / "actor" / "model.bin").write_text(text)
        (folder / "state.json").write_text(text)

    return write


def saved(directory: Path, *steps: int, **options) -> CheckpointStore:
    store = CheckpointStore(directory, **options)
    for step in steps:
        store.save(step, writer(f"step {step}"))
    return store


def steps_in(directory: Path) -> set[int]:
    return {step_of(path) for path in directory.glob("global_step_*")}


def tree(directory: Path) -> dict[str, bytes]:
    """Every file with its content: what must not change."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


# ---- saving and finding ----------------------------------------------------------------------------------------------


def test_a_save_is_complete_and_found(tmp_path):
    store = CheckpointStore(tmp_path / "deep" / "run")
    assert store.find() is None and not (tmp_path / "deep").exists() and notices.seen() == []
    path = store.save(7, writer("seven"), score=0.5)
    assert path == tmp_path / "deep" / "run" / "global_step_7" == store.find()
    assert (path.parent / TRACKER).read_text() == "7" and step_of(path) == 7
    manifest = json.loads((path / MANIFEST).read_text())
    assert manifest["files"] == {"actor/model.bin": 5, "state.json": 5}
    assert (manifest["step"], manifest["score"]) == (7, 0.5) and manifest["verl_version"]
    assert store.find("disable") is None and notices.seen() == []


def test_the_package_does_not_import_torch():
    code = "import sys; from verl.checkpoint import CheckpointStore; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=FRESH_PROCESS).returncode == 0


@pytest.mark.parametrize("name", ["global_step_", "global_step_x", "global_step_-1", "global_step_07", "step_7", "7"])
def test_step_of_other_names_is_an_error(name):
    with pytest.raises(CheckpointError, match="global_step_N"):
        step_of(f"/runs/{name}")


def test_an_exception_while_writing_changes_nothing(tmp_path):
    store = saved(tmp_path, 1, keep_last=1)
    before = tree(tmp_path)

    def fails(folder: Path) -> None:
        writer("half")(folder)
        raise RuntimeError("worker died")

    for step in (1, 2):
        with pytest.raises(RuntimeError, match="worker died"):
            store.save(step, fails)
    assert tree(tmp_path) == before and store.find() == tmp_path / "global_step_1"


def test_a_redone_step_replaces_the_old_one(tmp_path):
    store = saved(tmp_path, 1, 2)
    (tmp_path / "global_step_2" / "stale.bin").write_text("of the abandoned run")
    path = store.save(2, writer("again"))
    assert (path / "state.json").read_text() == "again" and not (path / "stale.bin").exists()
    assert (tmp_path / "actor" / "global_step_2" / "model.bin").read_text() == "again"
    assert leftovers(tmp_path) == []


def test_a_killed_replacement_is_moved_back_and_rubbish_removed(tmp_path):
    saved(tmp_path, 1, 2)
    before = tree(tmp_path)
    os.rename(tmp_path / "global_step_2", tmp_path / f"{REPLACED}global_step_2")
    for name in (f"{SAVING}global_step_2", f"{DELETED}global_step_0", f"{REPLACED}global_step_1"):
        writer("rubbish")(_made(tmp_path / name))
    (tmp_path / f"{SAVING}{TRACKER}").write_text("9")
    (tmp_path / ".saving-notes.txt").write_text("not ours: stays")
    store = CheckpointStore(tmp_path)
    (tmp_path / ".saving-notes.txt").unlink()
    assert tree(tmp_path) == before and store.find() == tmp_path / "global_step_2"


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    "tracker, reason", [("5", "no manifest|not a complete"), ("", "is empty"), ("abc\n", "'abc'"), (None, "is missing")]
)
def test_a_bad_tracker_falls_back_to_the_newest_complete_one(tmp_path, tracker, reason):
    store = saved(tmp_path, 3, 4)
    (tmp_path / TRACKER).unlink()
    if tracker is not None:
        (tmp_path / TRACKER).write_text(tracker)
    assert store.find() == tmp_path / "global_step_4"
    (said,) = notices.seen()
    assert "global_step_4" in said and re.search(reason, said)


def test_nothing_complete_starts_from_the_beginning_and_says_so(tmp_path):
    (tmp_path / TRACKER).write_text("5")
    (tmp_path / "global_step_5").mkdir()
    assert CheckpointStore(tmp_path).find() is None
    (said,) = notices.seen()
    assert "global_step_5" in said and "manifest.json" in said and "from the beginning" in said


def _truncate(folder):
    (folder / "actor" / "model.bin").write_text("st")


def _lose_a_file(folder):
    (folder / "state.json").unlink()


def _lose_manifest(folder):
    (folder / MANIFEST).unlink()


def _break_manifest(folder):
    (folder / MANIFEST).write_text('{"format": "verl.checkpoint/1", "files"')


def _foreign_manifest(folder):
    (folder / MANIFEST).write_text('{"format": "verl.checkpoint/1", "step": 2, "files": [1]}')


def _other_manifest(folder):
    (folder / MANIFEST).write_text('["something else"]')


@pytest.mark.parametrize(
    "damage, words",
    [
        (_truncate, "actor/model.bin has 2 bytes instead of 6"),
        (_lose_a_file, "state.json is missing"),
        (_lose_manifest, "has no manifest.json"),
        (_break_manifest, "manifest.json is damaged"),
        (_foreign_manifest, "manifest.json is damaged"),
        (_other_manifest, "not of the format"),
    ],
)
def test_a_damaged_checkpoint_is_not_resumed_from(tmp_path, damage, words):
    store = saved(tmp_path, 1, 2)
    damage(tmp_path / "global_step_2")
    assert store.find() == tmp_path / "global_step_1"
    assert words in notices.seen()[0]
    with pytest.raises(CheckpointError) as error:
        store.find("resume_path", tmp_path / "global_step_2")
    assert words in str(error.value) and "Complete ones" in str(error.value) and "global_step_1" in str(error.value)


def test_files_that_others_add_do_not_matter(tmp_path):
    store = saved(tmp_path, 1)
    (tmp_path / "global_step_1" / "notes.md").write_text("mine")
    assert store.find() == tmp_path / "global_step_1" and notices.seen() == []


def test_resume_path(tmp_path, monkeypatch):
    store = saved(tmp_path, 1, 2)
    other = CheckpointStore(tmp_path / "other")
    wanted = tmp_path / "global_step_1"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUN", str(tmp_path))
    for path in (wanted, str(wanted), "global_step_1", "$RUN/global_step_1/actor", "actor/global_step_1"):
        assert other.find("resume_path", path) == wanted.resolve()
    for path, words in [
        (tmp_path, "must name a global_step_N folder. Complete ones"),
        (tmp_path / "global_step_3", "There is no checkpoint"),
        (None, "resume_from_path"),
        ("", "resume_from_path"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            store.find("resume_path", path)
    with pytest.raises(ConfigError, match="auto, disable, resume_path"):
        store.find("always")


def test_a_renamed_checkpoint_is_noticed(tmp_path):
    store = saved(tmp_path, 1)
    os.rename(tmp_path / "global_step_1", tmp_path / "global_step_5")
    with pytest.raises(CheckpointError, match="says that it is step 1"):
        store.find("resume_path", tmp_path / "global_step_5")


# ---- retention -------------------------------------------------------------------------------------------------------


def test_keep_last(tmp_path):
    saved(tmp_path, 1, 2, 3, 4, keep_last=2)
    assert steps_in(tmp_path) == steps_in(tmp_path / "actor") == {3, 4}
    saved(tmp_path / "all", 1, 2, 3)
    assert steps_in(tmp_path / "all") == {1, 2, 3}
    with pytest.raises(ConfigError, match="at least 1"):
        CheckpointStore(tmp_path, keep_last=0)


@pytest.mark.parametrize("last, kept", [(1, {2, 5}), (2, {2, 4, 5}), (None, {1, 2, 3, 4, 5})])
def test_keep_best(tmp_path, last, kept):
    store = CheckpointStore(tmp_path, keep_last=last, keep_best=True)
    for step, score in {1: 0.1, 2: 0.9, 3: None, 4: float("nan"), 5: 0.3}.items():
        store.save(step, writer(), score=score)
    assert steps_in(tmp_path) == kept
    assert CheckpointStore(tmp_path).best() == tmp_path / "global_step_2"


def test_of_equal_scores_the_latest_is_best(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=True)
    for step, score in {1: 0.5, 2: 0.5, 3: 0.4}.items():
        store.save(step, writer(), score=score)
    assert steps_in(tmp_path) == {2, 3}
    assert saved(tmp_path / "unscored", 1).best() is None


def test_an_abandoned_future_does_not_push_out_the_new_steps(tmp_path):
    """Resumed from step 2 of 5: the steps saved now are the newest, although 4 and 5 are larger numbers."""
    saved(tmp_path, 1, 2, 3, 4, 5)
    store = CheckpointStore(tmp_path, keep_last=2)
    store.save(3, writer("redone"))
    assert steps_in(tmp_path) == {3, 5} and store.find() == tmp_path / "global_step_3"
    (tmp_path / TRACKER).unlink()
    assert store.find() == tmp_path / "global_step_3"
    store.save(4, writer("redone"))
    assert steps_in(tmp_path) == {3, 4}


def test_retention_leaves_what_it_does_not_know(tmp_path):
    foreign = tmp_path / "global_step_1"
    foreign.mkdir()
    (foreign / "model_world_size_1_rank_0.pt").write_text("of another program")
    saved(tmp_path, 2, 3, keep_last=1)
    assert steps_in(tmp_path) == {1, 3} and (foreign / "model_world_size_1_rank_0.pt").exists()


# ---- links -----------------------------------------------------------------------------------------------------------


def test_the_linked_model_loads_after_the_directory_was_moved(tmp_path, tiny_model_dir):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    store = CheckpointStore(tmp_path / "run")
    store.save(50, lambda folder: shutil.copytree(tiny_model_dir, folder / "actor"))
    link = tmp_path / "run" / "actor" / "global_step_50"
    assert os.readlink(link) == "../global_step_50/actor"
    os.rename(tmp_path / "run", tmp_path / "moved")
    moved = tmp_path / "moved" / "actor" / "global_step_50"
    model = AutoModelForCausalLM.from_pretrained(moved)
    original = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), original.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(moved)("1+1").input_ids


def test_links_are_repaired_at_the_start(tmp_path):
    saved(tmp_path, 1, 2)
    (tmp_path / "actor" / "global_step_2").unlink()
    shutil.rmtree(tmp_path / "global_step_1")
    CheckpointStore(tmp_path)
    assert sorted(path.name for path in (tmp_path / "actor").iterdir()) == ["global_step_2"]
    assert (tmp_path / "actor" / "global_step_2" / "model.bin").exists()


def test_a_checkpoint_without_actor_has_no_link(tmp_path):
    CheckpointStore(tmp_path).save(1, lambda folder: (folder / "state.json").write_text("{}"))
    assert not (tmp_path / "actor").exists() and notices.seen() == []


def test_something_in_the_place_of_the_link_stays(tmp_path):
    mine = tmp_path / "actor" / "global_step_1"
    mine.mkdir(parents=True)
    (mine / "precious.bin").write_text("mine")
    store = saved(tmp_path, 1, keep_last=1)
    assert (mine / "precious.bin").read_text() == "mine"
    assert store.find() == tmp_path / "global_step_1"
    assert f"load {tmp_path / 'global_step_1' / 'actor'} instead" in notices.seen()[0]


def test_hard_links_where_symbolic_ones_are_not_possible(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    store = saved(tmp_path, 1, keep_last=1)
    place = tmp_path / "actor" / "global_step_1"
    assert not place.is_symlink()
    assert os.path.samefile(place / "model.bin", tmp_path / "global_step_1" / "actor" / "model.bin")
    store.save(1, writer("redone"))
    assert (place / "model.bin").read_text() == "redone"
    store.save(2, writer("next"))
    assert steps_in(tmp_path) == steps_in(tmp_path / "actor") == {2}
    (said,) = notices.seen()
    assert "hard links" in said and "Operation not permitted" in said


# ---- what can go wrong with the disk ---------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 2 MB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = shutil.which("mount")
    if mount is None or subprocess.run([mount, "-t", "tmpfs", "-o", "size=2m", "none", place]).returncode:
        pytest.skip("a small file system cannot be mounted here (needs root and the right to mount)")
    yield place
    # lazily: torch.save leaves its file open when it fails
    subprocess.run(["umount", "-l", place], check=True)


def _fill_plainly(folder: Path) -> None:
    (folder / "big.bin").write_bytes(b"x" * 5_000_000)


def _fill_with_tensors(folder: Path) -> None:
    import torch

    from verl.checkpoint import write_state

    write_state(folder, {"w": torch.zeros(2_000_000)}, {})


@pytest.mark.parametrize("fill", [_fill_plainly, _fill_with_tensors])
def test_a_full_disk_loses_nothing(small_disk, fill):
    store = CheckpointStore(small_disk / "run", keep_last=1)
    store.save(1, lambda folder: (folder / "a.bin").write_bytes(b"a" * 400_000))
    before = tree(small_disk)
    with pytest.raises(CheckpointError) as error:
        store.save(2, fill)
    message = str(error.value)
    assert "is full" in message and "step 2 needs" in message and "1.7 MB are free" in message and "\n" not in message
    assert tree(small_disk) == before and store.find() == small_disk / "run" / "global_step_1"
    store.save(2, writer("small"))
    assert steps_in(small_disk / "run") == {2}


def test_a_full_disk_is_recognised_behind_the_errors_of_torch(small_disk):
    import torch

    store = saved(small_disk, 1)
    before = tree(small_disk)
    with pytest.raises(CheckpointError, match="is full"):
        store.save(2, lambda folder: torch.save(torch.zeros(2_000_000), folder / "w.pt"))
    assert tree(small_disk) == before


def test_a_full_disk_names_the_size_of_the_last_checkpoint(small_disk):
    store = CheckpointStore(small_disk)
    store.save(1, lambda folder: (folder / "a.bin").write_bytes(b"a" * 1_200_000))
    with pytest.raises(CheckpointError, match=r"needs about 1\.2 MB \(as global_step_1\)"):
        store.save(2, lambda folder: (folder / "a.bin").write_bytes(b"a" * 1_200_000))


def test_a_limit_of_file_size(tmp_path):
    code = (
        "import resource, sys, pathlib\n"
        "from verl.checkpoint import CheckpointStore\n"
        "store = CheckpointStore(sys.argv[1])\n"
        "store.save(1, lambda f: (f / 'a').write_bytes(b'x' * 1000))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "store.save(2, lambda f: (f / 'a').write_bytes(b'x' * 300_000))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=FRESH_PROCESS, capture_output=True, text=True)
    assert "CheckpointError" in ran.stderr and "limit of file size" in ran.stderr
    assert CheckpointStore(tmp_path).find() == tmp_path / "global_step_1"
    assert leftovers(tmp_path) == []


def test_no_permission_is_one_clear_sentence():
    place = Path(tempfile.mkdtemp())  # not tmp_path, whose parents nobody else may enter
    try:
        saved(place, 1)
        before = tree(place)
        place.chmod(0o555)
        code = (
            "import os, sys\nfrom verl.checkpoint import CheckpointStore\n"
            "if os.geteuid() == 0:\n    os.setgroups([])\n    os.setgid(65534)\n    os.setuid(65534)\n"
            "store = CheckpointStore(sys.argv[1])\nprint(store.find())\nstore.save(2, lambda folder: None)"
        )
        command = [sys.executable, "-c", code, str(place)]
        ran = subprocess.run(command, env=FRESH_PROCESS, capture_output=True, text=True)
        assert ran.stdout.strip() == str(place / "global_step_1")  # reading needs no right to write
        last = ran.stderr.strip().splitlines()[-1]
        assert "CheckpointError: The checkpoint of step 2 cannot be written" in last
        assert "Permission denied" in last and "trainer.default_local_dir" in last
        assert tree(place) == before
    finally:
        place.chmod(0o755)
        shutil.rmtree(place)


def test_a_file_in_the_place_of_the_directory(tmp_path):
    (tmp_path / "run").write_text("a file")
    store = CheckpointStore(tmp_path / "run")
    assert store.find() is None
    with pytest.raises(CheckpointError, match=r"cannot be written.*trainer\.default_local_dir"):
        store.save(1, writer())


def test_two_processes_do_not_save_at_once(tmp_path):
    saved(tmp_path, 1)
    code = (
        "import sys\nfrom verl.checkpoint import CheckpointStore\n"
        "def write(folder):\n"
        "    (folder / 'a').write_text('x')\n    print('saving', flush=True)\n    sys.stdin.read()\n"
        "CheckpointStore(sys.argv[1]).save(2, write)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(
        command, env=FRESH_PROCESS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "saving\n"
        store = CheckpointStore(tmp_path)  # does not clear away the other's work
        assert store.find() == tmp_path / "global_step_1"
        with pytest.raises(CheckpointError, match="Another process is saving"):
            store.save(3, writer())
        other.communicate("")
    assert other.returncode == 0 and store.find() == tmp_path / "global_step_2"


def test_kill_9_before_every_file_operation_of_a_save(tmp_path):
    driver = Path(__file__).with_name("checkpoint_kill_driver.py")
    ran = subprocess.run(
        [sys.executable, str(driver), str(tmp_path)], env=FRESH_PROCESS, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    for name, report in json.loads(ran.stdout).items():
        assert report["kills"] > 20, name
        assert len(report["outcomes"]) == 2 and min(report["outcomes"].values()) > 5, (name, report)
