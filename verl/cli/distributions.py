"""Other distributions called ``verl`` in this environment: the name is shared with ByteDance's project."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlparse
from urllib.request import url2pathname


def foreign_distributions(
    package: Path, distributions: Iterable[importlib.metadata.Distribution] | None = None
) -> list[str]:
    """One sentence, with its remedy, for each installed distribution named verl that is not the running package.

    Args:
        package: folder of the running ``verl`` package.
        distributions: what to look at; all of this environment that are named verl if None.
    """
    if distributions is None:
        distributions = importlib.metadata.distributions(name="verl")
    problems: dict[str, None] = {}  # one found by two places of sys.path is said once
    for distribution in distributions:
        home = _home(distribution)
        if home is None or not home.is_dir() or home.resolve() == package.resolve():
            continue
        problem = (
            f"another distribution named verl, version {distribution.version}, is installed at {home} and one hides "
            f"the other (ByteDance has a project of that name): "
            f"pip uninstall verl, then pip install -e {package.parent}"
        )
        problems[problem] = None
    return list(problems)


def _home(distribution: importlib.metadata.Distribution) -> Path | None:
    """The package folder a distribution brings: beside its metadata, or where its editable install points."""
    direct = json.loads(distribution.read_text("direct_url.json") or "{}")
    if direct.get("dir_info", {}).get("editable"):
        return Path(url2pathname(unquote(urlparse(direct["url"]).path))) / "verl"
    located = distribution.locate_file("verl")
    return Path(str(located))
