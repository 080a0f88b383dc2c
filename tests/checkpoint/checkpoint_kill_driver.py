"""Kills real processes in the middle of a save, before each of its file-system operations in turn. No torch: forks.

Prints a JSON report {scenario: {kills, outcomes}}; an assertion that fails ends it with a traceback.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from verl import notices
from verl.checkpoint import CheckpointStore, step_of
from verl.checkpoint.layout import TRACKER, leftovers

OPERATIONS = {
    "open", "os.rename", "os.mkdir", "os.symlink", "os.link", "os.remove", "os.rmdir", "os.listdir", "os.scandir",
    "shutil.rmtree",
}  # fmt: skip


def kill_before(number: int) -> None:
    """From now on this process dies, with kill -9, before its ``number``-th file-system operation."""
    left = [number]

    def hook(event: str, arguments: tuple) -> None:
        if event in OPERATIONS:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def writer(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "actor").mkdir()
        (folder / "train_state").mkdir()
        (folder / "actor" / "model.bin").write_text(text * 50)
        (folder / "train_state" / "state.json").write_text(text)

    return write


def text_of(folder: Path) -> str:
    text = (folder / "train_state" / "state.json").read_text()
    assert (folder / "actor" / "model.bin").read_text() == text * 50
    return text


def killed_save(directory: Path, keep_last: int | None, step: int, text: str, number: int) -> bool:
    """Save in a child that dies before operation ``number``; False if it finished before that."""
    child = os.fork()
    if child == 0:
        kill_before(number)
        CheckpointStore(directory, keep_last).save(step, writer(text))
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return os.WIFSIGNALED(status)


def check_after(directory: Path, keep_last: int | None, allowed: dict[str, int]) -> str:
    """What a resumed run finds: one of the allowed contents. Then it saves the next step as if nothing had been."""
    store = CheckpointStore(directory, keep_last)
    assert leftovers(directory) == []
    found = store.find()
    outcome = "nothing" if found is None else text_of(found)
    assert outcome in allowed, outcome
    if found is not None:
        assert step_of(found) == allowed[outcome]
    if (directory / TRACKER).exists():
        assert found == directory / f"global_step_{(directory / TRACKER).read_text()}"
    saved = store.save(9, writer("next"))
    assert store.find() == saved and text_of(saved) == "next"
    assert text_of_link(directory, 9) == "next" * 50
    assert leftovers(directory) == []
    links = {path.name for path in (directory / "actor").iterdir()}
    folders = {path.name for path in directory.glob("global_step_*")}
    assert links == folders, (links, folders)
    if keep_last is not None:
        assert len(folders) <= keep_last
    return outcome


def text_of_link(directory: Path, step: int) -> str:
    return (directory / "actor" / f"global_step_{step}" / "model.bin").read_text()


def scenario(base: Path, keep_last: int | None, before: list[int], step: int, allowed: dict[str, int]) -> dict:
    template = base / "template"
    template.mkdir(parents=True)
    for earlier in before:
        CheckpointStore(template, keep_last).save(earlier, writer(f"old {earlier}"))
    outcomes: Counter[str] = Counter()
    number = 0
    while True:
        number += 1
        directory = base / f"kill_{number}"
        shutil.copytree(template, directory, symlinks=True)
        killed = killed_save(directory, keep_last, step, "new", number)
        outcomes[check_after(directory, keep_last, allowed)] += 1
        shutil.rmtree(directory)
        if not killed:
            return {"kills": number - 1, "outcomes": outcomes}


def main(base: Path) -> None:
    notices.add_sink(lambda text: None)
    os.fsync = lambda descriptor: None  # it guards against power cuts, not kills, and thousands of them take a minute
    report = {
        "first": scenario(base / "first", None, [], 1, {"nothing": 0, "new": 1}),
        "keep_one": scenario(base / "keep_one", 1, [1], 2, {"old 1": 1, "new": 2}),
        "redone": scenario(base / "redone", 2, [1, 2], 2, {"old 2": 2, "new": 2}),
        "thinned": scenario(base / "thinned", 2, [1, 2], 3, {"old 2": 2, "new": 3}),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
