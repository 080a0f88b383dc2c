"""The look at the machine that the tests run on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from verl.errors import ConfigError
from verl.hardware import choose, decide, installed_packages, probe, torch_dtype, torch_threads
from verl.hardware.choice import DTYPES
from verl.hardware.device import _cpuinfo, version_tuple


def test_the_cpu_is_always_there():
    device = probe("cpu")
    assert device.kind == "cpu" and device.count == 1 and device.name
    assert device.memory_bytes > 1 << 28
    assert device.threads == torch.get_num_threads() == torch_threads()


def test_the_best_device_is_taken_and_the_choice_follows():
    choice = decide()
    assert choice.device.kind == ("cuda" if torch.cuda.is_available() else choice.device.kind)
    assert choice == choose(choice.device, torch.__version__, installed_packages())
    x = torch.ones(2, 2, dtype=torch_dtype(choice.dtype), device=choice.device.kind)
    assert (x @ x).sum().item() == 8


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"'cuda' was asked for, but torch .* sees no CUDA GPU.*device=cpu"):
        probe("cuda")


@pytest.mark.parametrize("kind", ["tpu", "cuda:x", "gpu"])
def test_unknown_devices(kind):
    with pytest.raises(ConfigError, match="unknown device"):
        probe(kind)


def test_dtype_names_are_torch_names():
    assert [str(torch_dtype(name)) for name in DTYPES] == [f"torch.{name}" for name in DTYPES]


def test_cpuinfo(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text(
        "processor\t: 0\nmodel name\t: A CPU\nflags\t\t: fpu avx2 amx_bf16\n\nprocessor\t: 1\nflags\t: fpu\n"
    )
    fields = _cpuinfo(path)
    assert fields["model name"] == "A CPU" and "amx_bf16" in fields["flags"].split()
    assert _cpuinfo(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("text", "expected"), [("2.13.0+cu130", (2, 13)), ("2.6.0", (2, 6)), ("2.10.0a0+git1", (2, 10)), ("3.0", (3, 0))]
)
def test_versions(text, expected):
    assert version_tuple(text) == expected


def test_importing_the_room_loads_no_torch():
    code = "import sys, verl.hardware, verl.hardware.builds; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ).returncode == 0
