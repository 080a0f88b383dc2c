"""The Dockerfiles: what they copy exists, what they install is ours, and the container begins as promised."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

import verl

ROOT = Path(verl.__file__).parent.parent
FILES = sorted((ROOT / "docker").glob("Dockerfile.*"))

pytestmark = pytest.mark.skipif(not FILES, reason="not run from a clone")
each = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)


def instructions(path: Path) -> list[tuple[str, str]]:
    """(INSTRUCTION, rest) with continuations joined and comments left out."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(line.split(None, 1)[0], line.split(None, 1)[1].strip()) for line in joined]


def rest_of(path: Path, name: str) -> list[str]:
    return [rest for instruction, rest in instructions(path) if instruction == name]


def ignored() -> list[str]:
    return [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line]


def test_both_are_here():
    assert [path.name for path in FILES] == ["Dockerfile.cpu", "Dockerfile.cuda"]


@each
def test_only_known_instructions(path):
    known = {"FROM", "ARG", "ENV", "WORKDIR", "COPY", "RUN", "VOLUME", "EXPOSE", "CMD"}
    assert {name for name, _ in instructions(path)} <= known and instructions(path)[0][0] == "FROM"


@each
def test_what_is_copied_exists_and_is_not_ignored(path):
    copied = [word for rest in rest_of(path, "COPY") for word in shlex.split(rest)[:-1]]
    assert {"pyproject.toml", "verl"} <= {name.removeprefix("./") for name in copied}
    missing = [name for name in copied if not (ROOT / name).exists()]
    assert not missing
    assert not {name.rstrip("/") for name in copied} & set(ignored())


@each
def test_files_named_in_run_commands_were_copied(path):
    copied = " ".join(rest_of(path, "COPY"))
    named = {word for rest in rest_of(path, "RUN") for word in re.findall(r"[\w./]*constraints[\w.]*\.txt", rest)}
    assert named and all(name in copied for name in named)


@each
def test_extras_exist(path):
    text = (ROOT / "pyproject.toml").read_text()
    extras = {
        name
        for rest in rest_of(path, "RUN")
        for names in re.findall(r"\.\[([\w,]+)\]", rest)
        for name in names.split(",")
    }
    assert "serve" in extras
    assert all(re.search(rf"^{name} = \[", text, re.M) for name in extras)


@each
def test_a_shell_at_start_in_the_data_folder(path):
    assert json.loads(rest_of(path, "CMD")[0]) == ["bash"]
    assert rest_of(path, "WORKDIR")[-1] == "/data" and rest_of(path, "VOLUME") == ["/data"]
    environment = " ".join(rest_of(path, "ENV"))
    assert "HF_HOME=/data/" in environment and "VERL_CACHE=/data/" in environment


def test_vllm_is_ready_in_the_cuda_image():
    cuda = ROOT / "docker" / "Dockerfile.cuda"
    assert any(re.search(r"pip install .*\bvllm\b", rest) for rest in rest_of(cuda, "RUN"))
    pins = dict(line.split("==") for line in (ROOT / "docker/constraints.cuda.txt").read_text().split() if "==" in line)
    assert set(pins) == {"vllm", "torch"}
