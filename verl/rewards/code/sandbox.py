"""Running a program that a model wrote: a process of its own, with limits on time, memory, files and network.

What holds where the kernel has it (Linux 5.13 or newer with user namespaces): the program sees no network, writes only
in a folder that is deleted afterwards, reads only the interpreter and the system's libraries, and ends at its limits of
wall time, processor time, memory and file size, with everything that it started. :func:`enforced_here` says what holds
on this machine; the first program that runs with less is told as a notice.

What does not hold anywhere: it is no virtual machine. The program shares the kernel and the processor with the run and
may use 128 processes of its own until it is ended; memory is limited for each of them, not for all together. For
adversarial code use a container or a remote sandbox, and call that from a reward function.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from verl.notices import notice

_LAUNCHER = Path(__file__).with_name("launch.py")
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc", "/dev/null", "/dev/urandom", "/dev/zero")
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"}
_KEPT_OUTPUT = 1 << 20
_PROBE = "pass"


@dataclass(frozen=True)
class Limits:
    """``wall_s`` seconds of clock time, as many of processor time; bytes of memory and of each written file."""

    wall_s: float = 6.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 10 << 20


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        stdout, stderr: the first MiB of each.
        returncode: as a shell tells it, 128 + n for signal n; None if its time ran out.
        seconds: of clock time.
        enforced: what was kept from it: ``network``, ``processes``, ``files``, ``memory``.
    """

    stdout: str
    stderr: str
    returncode: int | None
    seconds: float
    enforced: dict[str, bool]

    @property
    def timed_out(self) -> bool:
        return self.returncode is None


def run_program(source: str, stdin: str = "", limits: Limits | None = None) -> Outcome:
    """Run Python source with ``stdin`` and wait for its end. Whatever it does, this returns within its limits."""
    outcome = _run(source, stdin, limits or Limits())
    _tell_of_holes(tuple(sorted(name for name, held in outcome.enforced.items() if not held)))
    return outcome


@functools.cache
def enforced_here() -> dict[str, bool]:
    """What this machine keeps from a program: ``network``, ``processes`` (of others), ``files``, ``memory``."""
    return _run(_PROBE, "", Limits(wall_s=30)).enforced


@functools.cache
def _tell_of_holes(names: tuple[str, ...]) -> None:
    if names:
        notice(
            f"Programs of the model run without limits on: {', '.join(names)}. This system lacks the means (landlock, "
            "network namespaces); run in a container if you do not trust the model's programs."
        )


def _run(source: str, stdin: str, limits: Limits) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="verl-program-") as folder:
        program = Path(folder) / "program.py"
        program.write_text(source, encoding="utf-8", errors="replace")
        with contextlib.ExitStack() as stack:
            # nameless: the program cannot open them again
            files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
            files[0].write(stdin.encode(errors="replace"))
            files[0].seek(0)
            return _wait(folder, program, files, limits)


def _wait(folder: str, program: Path, files: list, limits: Limits) -> Outcome:
    reading, writing = os.pipe()
    told = {
        "report_fd": writing,
        "memory_bytes": limits.memory_bytes,
        "cpu_s": max(1, int(limits.wall_s + 1)),
        "file_bytes": limits.file_bytes,
        "writable": [folder, "/dev/null"],
        "readable": _readable(),
    }
    started = time.monotonic()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", str(_LAUNCHER), json.dumps(told), str(program)],
            stdin=files[0], stdout=files[1], stderr=files[2], cwd=folder, pass_fds=(writing,),
            env={**_ENVIRONMENT, "HOME": folder, "TMPDIR": folder}, start_new_session=True,
        )  # fmt: skip
    finally:
        os.close(writing)
    try:
        returncode: int | None = process.wait(limits.wall_s)
    except subprocess.TimeoutExpired:
        returncode = None
    finally:
        _end(process)
    seconds = time.monotonic() - started
    with os.fdopen(reading, "rb") as report:
        enforced = json.loads(report.read() or b"{}")
    return Outcome(_text(files[1]), _text(files[2]), returncode, seconds, enforced)


def _end(process: subprocess.Popen) -> None:
    """Kill the program and what it started: all of them are in its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # all gone; macOS calls that "not permitted"
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@functools.cache
def _readable() -> list[str]:
    """The interpreter, its packages, and the system's libraries."""
    own = {sys.prefix, sys.base_prefix, sysconfig.get_paths()["purelib"], str(_LAUNCHER)}
    return sorted(own | {os.path.realpath(path) for path in own} | set(_SYSTEM))


def _text(file) -> str:
    file.seek(0)
    return file.read(_KEPT_OUTPUT).decode("utf-8", errors="replace")
