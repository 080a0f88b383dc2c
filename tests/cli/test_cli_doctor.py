"""``verl doctor`` on this machine and on simulated trouble."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import verl
from verl.cli.distributions import foreign_distributions
from verl.cli.doctor import Section, choice_section, examine
from verl.cli.main import main
from verl.cli.tables import plain
from verl.hardware import Device, choose

PACKAGE = Path(verl.__file__).parent


def titled(findings, title):
    return {row[0]: row[1:] for row in next(s for s in findings.sections if s.title.startswith(title)).rows}


def install(folder: Path, *, version="0.9.1", editable: Path | None = None, package=True) -> Path:
    """A site-packages folder with a distribution named verl, as an installer leaves it."""
    info = folder / f"verl-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verl\nVersion: {version}\n")
    if editable:
        (info / "direct_url.json").write_text(json.dumps({"url": editable.as_uri(), "dir_info": {"editable": True}}))
    elif package:
        (folder / "verl").mkdir()
    return folder


def found(*folders: Path) -> list[str]:
    distributions = importlib.metadata.distributions(name="verl", path=[str(f) for f in folders])
    return foreign_distributions(PACKAGE, distributions)


def test_the_other_distribution_of_this_name_is_noticed(tmp_path):
    (problem,) = found(install(tmp_path / "site"))
    assert "version 0.9.1" in problem and str(tmp_path / "site" / "verl") in problem
    assert "pip uninstall verl" in problem and f"pip install -e {PACKAGE.parent}" in problem


def test_our_own_installations_are_not(tmp_path):
    ours = install(tmp_path / "editable", version="0.1.0", editable=PACKAGE.parent)
    gone = install(tmp_path / "left-over", version="0.2", package=False)
    assert found(ours, gone, PACKAGE.parent) == []


def test_another_clone_is(tmp_path):
    clone = tmp_path / "an other clone"
    (clone / "verl").mkdir(parents=True)
    (problem,) = found(install(tmp_path / "site", version="0.0.1", editable=clone))
    assert str(clone / "verl") in problem


def test_this_machine(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    monkeypatch.delenv("VLLM_DTYPE", raising=False)
    findings = examine("cpu")
    assert titled(findings, "Chosen")["dtype"][0] in ("bfloat16", "float32")
    assert titled(findings, "Versions")["verl"] == (verl.__version__, str(PACKAGE))
    assert titled(findings, "Environment")["HF_ENDPOINT"] == ("https://mirror.example",)
    assert "VLLM_DTYPE" in titled(findings, "Environment")["not set"][0]
    assert "GiB free" in titled(findings, "Machine")["disk here"][0]
    assert titled(findings, "Quick-start")["SmolLM2-135M-Instruct"][0] in ("present", "not here")
    for section in findings.sections:
        assert len({len(row) for row in section.rows}) == 1, section.title
        assert all(isinstance(cell, str) for row in section.rows for cell in row), section.title


def test_a_bad_variable_is_a_problem(monkeypatch):
    monkeypatch.setenv("VLLM_DTYPE", "flot32")
    assert any("VLLM_DTYPE=flot32 is not a dtype" in problem for problem in examine("cpu").problems)


def test_every_choice_has_its_reason():
    p40 = Device("cuda", "Tesla P40", (6, 1), 24 << 30, count=2)
    rows = {row[0]: row[1:] for row in choice_section(choose(p40, "2.6.0+cu118", {"triton"})).rows}
    assert rows["device"] == ("2 x cuda", "the GPU 'Tesla P40' (compute capability 6.1)")
    assert rows["dtype"][0] == "float32" and rows["master dtype"][0] == "none"
    assert rows["triton"] == ("no", "Triton needs compute capability 7.0 or newer")
    assert all(reason for _, reason in rows.values())


def test_without_a_terminal_it_is_plain_text_and_the_exit_code_tells(capsys):
    code = main(["doctor", "--device", "cpu"])
    out = capsys.readouterr().out
    assert "\x1b" not in out and "Chosen here\n" in out
    assert code == (0 if "No problems found." in out else 2)


def test_a_device_that_does_not_exist(capsys):
    assert main(["doctor", "--device", "tpu"]) == 2
    assert "unknown device 'tpu'" in capsys.readouterr().err


def test_columns_are_aligned():
    section = Section("T", [("x", "longer", "1"), ("yyyy", "z", "22")])
    assert plain(section) == "T\n  x     longer  1\n  yyyy  z       22"


def test_without_torch_it_still_speaks(tmp_path):
    """An environment without any dependency: only the standard library and our package."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    start = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r})"
    code = f"{start}; from verl.cli import main; sys.exit(main(['doctor']))"
    command = [sys._base_executable, "-I", "-S", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert "torch" in result.stdout.split("to put right:")[1]
    assert "Machine\n" in result.stdout and "Chosen here" not in result.stdout


def test_one_that_two_paths_find_is_said_once(tmp_path):
    site = install(tmp_path / "site")
    distributions = [*importlib.metadata.distributions(name="verl", path=[str(site)])] * 2
    assert len(foreign_distributions(PACKAGE, distributions)) == 1
