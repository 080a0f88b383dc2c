"""The documentation as a site: it builds without a network, holds every page, and asks nobody for anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import verl

ROOT = Path(verl.__file__).parent.parent
CONFIG = ROOT / "mkdocs.yml"

pytestmark = pytest.mark.skipif(not CONFIG.is_file(), reason="not run from a clone")


def pages(nav) -> list[str]:
    """Every file of the navigation."""
    if isinstance(nav, str):
        return [nav]
    items = nav.values() if isinstance(nav, dict) else nav
    return [page for item in items for page in pages(item)]


def test_the_navigation_has_every_page_once():
    named = pages(yaml.safe_load(CONFIG.read_text())["nav"])
    assert sorted(named) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_it_builds_and_needs_no_network(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    built = list((tmp_path / "site").glob("*.html"))
    assert len(built) > 10
    for page in built:
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(?:https?:)?//[^"]*"', text), page.name
    broken = [m for page in built for m in re.findall(r'href="([\w./-]+\.md)[#"]', page.read_text(encoding="utf-8"))]
    assert not broken
