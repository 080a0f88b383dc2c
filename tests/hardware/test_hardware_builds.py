"""A torch build that does not fit is named with the wheel that does."""

from __future__ import annotations

import pytest

from verl.hardware.builds import (
    Driver,
    TorchBuild,
    build_problems,
    has_kernels,
    nvidia_driver,
    right_wheel,
    torch_build,
)

CU118 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_37", "sm_90")
CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
P40 = ("Tesla P40", (6, 1))
H200 = ("NVIDIA H200", (9, 0))


@pytest.mark.parametrize(
    ("architectures", "capability", "fits"),
    [
        (CU118, (6, 1), True),  # machine code of 6.0 runs on 6.1
        (CU118, (10, 0), False),
        (CU130, (6, 1), False),
        (CU130, (8, 9), True),
        (CU130, (12, 1), True),
        (("sm_80",), (9, 0), False),
        (("compute_80",), (9, 0), True),  # PTX is compiled for newer chips
        (("compute_80",), (7, 5), False),
        (("sm_90a",), (9, 0), True),
        (("sm_90a",), (9, 1), False),
        (("sm_100f",), (10, 3), True),
        (("gfx90a",), (9, 0), False),
        ((), (9, 0), False),
    ],
)
def test_kernels(architectures, capability, fits):
    assert has_kernels(architectures, capability) is fits


@pytest.mark.parametrize(
    ("capability", "driver", "part"),
    [
        ((6, 1), (12, 4), "torch==2.6.0 from PyTorch's wheel index cu118"),
        ((6, 1), (11, 8), "index cu118"),
        ((8, 0), (11, 4), "index cu118"),
        ((7, 0), (13, 0), "index cu126"),
        ((9, 0), (12, 2), "index cu126"),
        ((10, 0), (12, 8), "index cu128"),
        ((9, 0), (13, 0), "index cu130"),
    ],
)
def test_wheels(capability, driver, part):
    assert part in right_wheel(capability, driver)


@pytest.mark.parametrize(("capability", "driver"), [((3, 7), (11, 4)), ((9, 0), (10, 2)), ((10, 0), (11, 8))])
def test_no_wheel(capability, driver):
    assert right_wheel(capability, driver) is None
    problem = build_problems(TorchBuild("2.13.0+cu130", "13.0", CU130), Driver(driver, (("card", capability),)))
    assert "update the driver or use the CPU" in problem[0]


def test_no_kernels_for_the_chip():
    (problem,) = build_problems(TorchBuild("2.13.0+cu130", "13.0", CU130), Driver((13, 0), (P40, P40)))
    assert "no kernels for the GPU 'Tesla P40' (compute capability 6.1)" in problem
    assert "torch==2.6.0" in problem and "cu118" in problem


def test_newer_than_the_driver():
    (problem,) = build_problems(TorchBuild("2.13.0+cu130", "13.0", CU130), Driver((12, 4), (H200,)))
    assert "newer than the driver" in problem and "serves CUDA 12.4" in problem and "cu126" in problem


def test_a_cpu_build_beside_a_gpu():
    (problem,) = build_problems(TorchBuild("2.13.0+cpu", None), Driver((12, 4), (H200,)))
    assert "without CUDA" in problem and "cu126" in problem


def test_what_fits_is_silent():
    assert build_problems(TorchBuild("2.13.0+cu130", "13.0", CU130), Driver((13, 0), (H200,))) == []
    assert build_problems(TorchBuild("2.6.0+cu118", "11.8", CU118), Driver((12, 4), (P40,))) == []
    assert build_problems(TorchBuild("2.13.0+cpu", None), None) == []


def test_the_real_machine():
    import torch

    build, driver = torch_build(), nvidia_driver()
    assert build.version == torch.__version__
    assert (driver is not None) or not torch.cuda.is_available()
    if torch.cuda.is_available():
        assert build_problems(build, driver) == []
        assert driver.gpus[0] == (torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0))
