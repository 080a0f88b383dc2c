"""What this run ran on: versions, machine, command line. The content of ``environment.json``."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from verl.tracking.plain import hide_in_argument

PACKAGES = (
    "verl",
    "torch",
    "transformers",
    "tensordict",
    "numpy",
    "ray",
    "vllm",
    "sglang",
    "peft",
    "flash-attn",
    "triton",
)


def environment_record(seed: int | None = None, device: Any = None) -> dict[str, Any]:
    """Everything that decides whether a run can be repeated bit for bit, as plain data.

    Args:
        seed: the run's seed.
        device: what the hardware room chose (any plain description); the accelerators seen are recorded besides.
    """
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(hide_in_argument(argument) for argument in _command_line()),
        "working_directory": os.getcwd(),
        "seed": seed,
        "device": device,
        **_torch_record(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "memory_gb": _memory_gb(),
        "platform": platform.platform(),
        "hostname": platform.node(),
        "python": platform.python_version(),
        "packages": _versions(),
        "git_commit": _git_commit(Path.cwd()),
        "environment_variables": {k: os.environ[k] for k in _SHOWN_VARIABLES if k in os.environ},
    }


_SHOWN_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONHASHSEED", "HF_HUB_OFFLINE", "HF_ENDPOINT",
    "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "VLLM_DTYPE", "VLLM_ATTENTION_BACKEND",
)  # fmt: skip


def _command_line() -> list[str]:
    # sys.orig_argv keeps "-m verl.trainer.main_ppo", which sys.argv replaces by the path of the file.
    return list(sys.orig_argv) or list(sys.argv)


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _torch_record() -> dict[str, Any]:
    """Threads and accelerators, from torch if this process has loaded it (recording must not load it)."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    record: dict[str, Any] = {"threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        record["cuda"] = torch.version.cuda
        record["gpus"] = [
            {
                "name": properties.name,
                "memory_gb": round(properties.total_memory / 1024**3, 1),
                "compute_capability": f"{properties.major}.{properties.minor}",
            }
            for properties in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        ]
    return record


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gb() -> float:
    import psutil

    return round(psutil.virtual_memory().total / 1024**3, 1)


def _git_commit(folder: Path) -> str | None:
    """``<commit>`` or ``<commit> (with uncommitted changes)`` of the working directory; None outside a repository."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=5)
        if head.returncode != 0:
            return None
        status = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (OSError, subprocess.TimeoutExpired):  # no git, or a repository on a file system that does not answer
        return None
    return head.stdout.strip() + (" (with uncommitted changes)" if status.stdout.strip() else "")
