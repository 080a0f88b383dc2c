"""Runs one untrusted program, in a process of its own, after giving up what it must not have.

Started as ``python -I launch.py LIMITS PROGRAM`` by :mod:`verl.rewards.code.sandbox`, and imports nothing but the
standard library: it is not part of the package for the interpreter that runs it. The kernel's own means are used:
resource limits, namespaces for network and processes, and landlock (Linux 5.13) for files.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import runpy
import struct
import sys

_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_PR_SET_NO_NEW_PRIVS, _PR_SET_PDEATHSIG, _SIGKILL = 38, 1, 9
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # the same numbers on every architecture
_PATH_BENEATH = 1
_EXECUTE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_ALL_RIGHTS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1}
_ALL_RIGHTS = (1 << 15) - 1  # from ABI 3 on (truncate); later ABIs add rights that concern no file content


def main() -> None:
    limits = json.loads(sys.argv[1])
    program = sys.argv[2]
    enforced = isolate(limits)
    os.write(limits["report_fd"], json.dumps(enforced).encode())
    os.close(limits["report_fd"])
    if enforced["processes"]:
        _become_child_of_init()
    sys.argv[:] = [program]
    runpy.run_path(program, run_name="__main__")


def isolate(limits: dict) -> dict[str, bool]:
    """Give up network, files and resources; what this machine could enforce, by name."""
    libc = ctypes.CDLL(None, use_errno=True)
    linux = sys.platform == "linux"
    if linux:
        libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    own_user = linux and libc.unshare(_NEWUSER | _NEWNET | _NEWPID) == 0
    apart = own_user or (linux and libc.unshare(_NEWNET | _NEWPID) == 0)  # root needs no user namespace
    enforced = {
        "network": apart,  # a new namespace has no interface, not even a loopback that is up
        "processes": apart,
        "files": linux and _restrict_files(libc, limits["writable"], limits["readable"]),
    }
    memory, cpu, size = limits["memory_bytes"], limits["cpu_s"], limits["file_bytes"]
    enforced["memory"] = _limit(resource.RLIMIT_AS, memory)
    _limit(resource.RLIMIT_CPU, cpu)
    _limit(resource.RLIMIT_FSIZE, size)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, 64)
    if own_user:  # elsewhere the count would include all processes of the real user
        _limit(resource.RLIMIT_NPROC, 128)
    return enforced


def _become_child_of_init() -> None:
    """Return in a child of process 1 of the new process namespace. When that ends, the kernel ends all that it
    started, whatever session it is in; so this process waits for the first, and that one for the program."""
    for _ in range(2):
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)


def _restrict_files(libc, writable: list[str], readable: list[str]) -> bool:
    """Landlock: read what Python needs, write in the folder of this run, and touch nothing else."""
    abi = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if abi < 1:
        return False
    rights = _ALL_RIGHTS_BY_ABI.get(abi, _ALL_RIGHTS)
    wanted = struct.pack("<Q", rights)
    ruleset = libc.syscall(_LANDLOCK_CREATE, wanted, len(wanted), 0)
    if ruleset < 0:
        return False
    for paths, allowed in ((readable, _READ), (writable, rights)):
        for path in paths:
            if os.path.exists(path):
                _allow(libc, ruleset, path, allowed)
    done = libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0) == 0
    os.close(ruleset)
    return done


def _allow(libc, ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    if not os.path.isdir(path):
        rights &= ~_READ_DIR & 0b111 | (1 << 14)  # a file has no rights that are about folders
    rule = struct.pack("<Qi", rights, descriptor)  # packed, as the kernel declares it
    libc.syscall(_LANDLOCK_ADD, ruleset, _PATH_BENEATH, rule, 0)
    os.close(descriptor)


def _limit(kind: int, value: int) -> bool:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    try:
        resource.setrlimit(kind, (value, value))
    except (OSError, ValueError):  # macOS refuses some
        return False
    return True


if __name__ == "__main__":
    main()
