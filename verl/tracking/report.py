"""``report.html``: the whole run on one page that opens offline, with curves, samples, config and notices."""

from __future__ import annotations

import base64
import functools
import gzip
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.errors import MissingDependencyError
from verl.tracking.jsonl import jsonable, write_atomic
from verl.tracking.report_compare import comparison_data
from verl.tracking.report_data import report_data
from verl.tracking.run_dir import RunDirectory

_ASSETS = Path(__file__).parent / "report_assets"


def write_report(run_dir: RunDirectory | str | Path) -> Path:
    """Write (or refresh) ``report.html`` of a run folder and return its path.

    The page holds everything it needs, the plotting library included (plotly.js, compressed), and asks the network for
    nothing. All texts of the run are data for its script and are shown as text, whatever they contain.
    """
    folder = run_dir if isinstance(run_dir, RunDirectory) else RunDirectory(run_dir)
    path = folder.path / "report.html"
    write_atomic(path, report_page("report", report_data(folder)))
    return path


def write_comparison(run_dirs: Sequence[str | Path], path: str | Path) -> Path:
    """Write one page that compares runs: curves over each other, numbers, samples, and where their configs differ."""
    path = Path(path).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, report_page("compare", comparison_data([RunDirectory(folder) for folder in run_dirs])))
    return path


def report_page(kind: str, data: dict[str, Any]) -> bytes:
    """The page "report" (of one run) or "compare" over its data. With ``data["live"]`` it asks its server for news."""
    parts = {
        "SAMPLES": asset("samples.html"),
        "DATA": script_json(data),
        "PLOTLY": _plotly(),
        "SCRIPT": "\n".join(map(asset, ("charts.js", "page.js", f"{kind}.js"))),
    }
    policy = "; img-src data: blob:" + ("; connect-src 'self'" if data.get("live") else "")
    page = page_of(asset(f"{kind}.html") + asset("foot.html"), parts, title=data["title"], policy=policy)
    return page.encode("utf-8", errors="replace")


def page_of(body: str, parts: dict[str, str], *, title: str, policy: str = "") -> str:
    """An HTML page: the head that all pages share, and ``body`` with each ``{{NAME}}`` filled in once, in this order.

    Args:
        parts: HTML; what is filled in is not looked at again. title: text. policy: more of the content policy.
    """
    head = {"POLICY": policy, "TITLE": html.escape(title), "STYLE": asset("report.css")}
    pieces, rest = [], asset("head.html") + body
    for name, content in {**head, **parts}.items():
        before, mark, rest = rest.partition("{{" + name + "}}")
        assert mark, f"the template has no {name}, or in another order"
        pieces += [before, content]
    return "".join([*pieces, rest])


def asset(name: str) -> str:
    """A template, style or script of the pages."""
    return (_ASSETS / name).read_text(encoding="utf-8")


def script_json(data: Any) -> str:
    """JSON that may stand inside a ``<script>`` element: no ``<``, ``>`` or ``&`` is left, so no text can end it."""
    text = json.dumps(jsonable(data), ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


@functools.lru_cache(maxsize=1)
def _plotly() -> str:
    """plotly.js of the installed package, gzip and base64: 2 MB instead of 4.8; the browser unpacks it."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise MissingDependencyError("plotly", "the HTML report") from None
    return base64.b64encode(gzip.compress(get_plotlyjs().encode("utf-8"), compresslevel=6, mtime=0)).decode("ascii")
