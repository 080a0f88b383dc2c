"""Ctrl-C and SIGTERM in training: the first lets the running step end, the second ends the run at once.

A step cannot be taken back, and half of one cannot be saved. Between two steps everything is there, on every rank: only
the controller hears the signal, and its workers, which live in sessions of their own, wait for its next call.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from verl.checkpoint.layout import step_name
from verl.notices import notice

if TYPE_CHECKING:
    from verl.trainer.base import Trainer


@dataclass
class Interrupt:
    """Whether the run was told to end, and the handler of that signal before training."""

    number: int = 0
    usual: Callable[[int, FrameType | None], Any] | None = None

    @property
    def asked(self) -> bool:
        return self.number != 0

    def end(self) -> None:
        """End as the signal would have: KeyboardInterrupt, or what the handler before raises."""
        if self.usual is not None:
            self.usual(self.number, None)
        raise KeyboardInterrupt


@contextlib.contextmanager
def steps_end_first() -> Iterator[Interrupt]:
    """Within, the first Ctrl-C or SIGTERM is only noted; after it they do what they did before.

    Outside the main thread, and for a signal that no Python function handled before, nothing changes.
    """
    found = Interrupt()
    before: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        found.number, found.usual = number, before[number]
        give_back()
        # notice() takes a lock, which the interrupted code may hold; another thread can wait for it
        threading.Thread(target=_tell, args=(number,), daemon=True).start()

    def give_back() -> None:
        for each, handler in before.items():
            signal.signal(each, handler)

    if threading.current_thread() is threading.main_thread():
        before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM) if callable(signal.getsignal(n))}
    for each in before:
        signal.signal(each, note)
    try:
        yield found
        if found.asked:
            found.end()  # it came after the last look
    except Exception as error:  # a step that did not survive it: some worker has heard the signal too
        if found.asked:
            notice(f"The run could not end in order: {error}")
            found.end()
        raise
    finally:
        if not found.asked:
            give_back()


def _tell(number: int) -> None:
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    notice(
        f"{name}: the run ends after the step that is running; a second one ends it at once.",
        key=f"{name} {time.time()}",
    )


def what_is_kept(trainer: Trainer) -> str:
    """For a run that ended early: which checkpoint there is, and what is lost."""
    done, saved, folder = trainer.global_steps, trainer.saved_steps, Path(trainer.run_dir.path)
    parts = [f"after step {done} of {trainer.total_steps}" if done else "before the first step was done"]
    if saved:
        parts.append(
            f"the checkpoint is {folder / step_name(saved)}; trainer.default_local_dir={folder} goes on from it"
        )
    if done > saved:
        lost = f"steps {saved + 1} to {done} are" if done > saved + 1 else f"step {done} is"
        parts.append(
            f"{lost} in no checkpoint (trainer.save_freq=N saves every N steps, trainer.save_final=true at a first "
            "Ctrl-C)"
        )
    elif not saved:
        parts.append("there was nothing to save")
    return "; ".join(parts)
