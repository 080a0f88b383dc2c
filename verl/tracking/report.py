"""``report.html``: the whole run on one page that opens offline, with curves, samples, config and notices."""

from __future__ import annotations

import base64
import functools
import gzip
import json
from pathlib import Path
from typing import Any

from verl.errors import MissingDependencyError
from verl.tracking.jsonl import jsonable, write_atomic
from verl.tracking.report_data import report_data
from verl.tracking.run_dir import RunDirectory

_ASSETS = Path(__file__).parent / "report_assets"


def write_report(run_dir: RunDirectory | str | Path) -> Path:
    """Write (or refresh) ``report.html`` of a run folder and return its path.

    The page holds everything it needs, the plotting library included (plotly.js, compressed), and asks the network for
    nothing. All texts of the run are data for its script and are shown as text, whatever they contain.
    """
    folder = run_dir if isinstance(run_dir, RunDirectory) else RunDirectory(run_dir)
    data = report_data(folder)
    page = _fill(
        (_ASSETS / "report.html").read_text(encoding="utf-8"),
        {
            "TITLE": _escape(data["title"]),
            "STYLE": (_ASSETS / "report.css").read_text(encoding="utf-8"),
            "DATA": script_json(data),
            "PLOTLY": _plotly(),
            "SCRIPT": "\n".join((_ASSETS / name).read_text(encoding="utf-8") for name in ("charts.js", "page.js")),
        },
    )
    path = folder.path / "report.html"
    write_atomic(path, page.encode("utf-8", errors="replace"))
    return path


def script_json(data: Any) -> str:
    """JSON that may stand inside a ``<script>`` element: no ``<``, ``>`` or ``&`` is left, so no text can end it."""
    text = json.dumps(jsonable(data), ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _fill(template: str, parts: dict[str, str]) -> str:
    """Replace each ``{{NAME}}`` once; what is filled in is not looked at again."""
    pieces = []
    rest = template
    for name, content in parts.items():
        before, mark, rest = rest.partition("{{" + name + "}}")
        assert mark, f"the template has no {name}, or in another order"
        pieces += [before, content]
    return "".join([*pieces, rest])


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


@functools.lru_cache(maxsize=1)
def _plotly() -> str:
    """plotly.js of the installed package, gzip and base64: 2 MB instead of 4.8; the browser unpacks it."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise MissingDependencyError("plotly", "the HTML report") from None
    return base64.b64encode(gzip.compress(get_plotlyjs().encode("utf-8"), compresslevel=6, mtime=0)).decode("ascii")
