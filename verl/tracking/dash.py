"""The dashboard: a list of runs and their pages, over HTTP to this machine alone. Pages of running runs follow them."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Iterator
from datetime import datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

from verl.tracking import headline
from verl.tracking.jsonl import jsonable
from verl.tracking.plain import config_value
from verl.tracking.report import asset, page_of, report_page
from verl.tracking.report_compare import comparison_data
from verl.tracking.report_data import report_data
from verl.tracking.run_dir import RunDirectory

HOST = "127.0.0.1"
DEPTH = 3  # folders below the one that is served
SECONDS = 3  # between two looks of a page for news
RUNNING_SECONDS = 120  # a run whose record is younger is shown as running
_HOSTS = {"127.0.0.1", "localhost", "[::1]"}


def find_runs(folder: Path) -> dict[str, Path]:
    """Every run folder at or below ``folder`` by its name there, sorted; a run's earlier records are not listed."""
    found = {}
    for path in _with_metrics(folder, DEPTH):
        name = path.relative_to(folder).as_posix()
        found[folder.resolve().name if name == "." else name] = path
    return dict(sorted(found.items()))


def _with_metrics(folder: Path, depth: int) -> Iterator[Path]:
    try:
        if (folder / "metrics.jsonl").is_file():
            yield folder
        children = [child for child in folder.iterdir() if child.is_dir() and not child.is_symlink()]
    except OSError:
        return  # a folder that may not be read, or has just gone, holds nothing to show
    for child in children if depth else ():
        if not child.name.startswith((".", "global_step_")) and child.name not in ("earlier_runs", "actor", "critic"):
            yield from _with_metrics(child, depth - 1)


def make_server(folder: str | Path, port: int = 0) -> ThreadingHTTPServer:
    """A server of the runs below ``folder``, bound to this machine's own address; OSError if the port is taken."""
    root = Path(folder)

    class Handler(_Handler):
        served = root

    server = ThreadingHTTPServer((HOST, port), Handler)
    server.daemon_threads = True
    return server


class _Handler(BaseHTTPRequestHandler):
    served: Path
    server_version = "verl-dash"

    def do_GET(self) -> None:
        # a page of another site that points a name of its own at this machine must not read the runs
        if self.headers.get("Host", "").rsplit(":", 1)[0] not in _HOSTS:
            return self._send(HTTPStatus.FORBIDDEN, b"this server answers to localhost only", "text/plain")
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        runs = find_runs(self.served)
        wanted = [name for name in query.get("run", []) if name in runs]
        if parts.path == "/":
            return self._send(HTTPStatus.OK, index_page(self.served, runs), "text/html")
        if parts.path not in ("/page", "/data") or not wanted or len(wanted) != len(query.get("run", [])):
            return self._send(HTTPStatus.NOT_FOUND, b"there is no such page; / lists the runs", "text/plain")
        folders = [runs[name] for name in wanted]
        now = stamp(folders)
        if parts.path == "/data" and query.get("known") == [now]:
            return self._send(HTTPStatus.NO_CONTENT, b"", "application/json")
        kind, data = page_data(folders)
        url = "/data?" + urlencode([("run", name) for name in wanted])
        data["live"] = {"url": url, "seconds": SECONDS, "stamp": now}
        if parts.path == "/data":
            body = json.dumps(jsonable(data), ensure_ascii=False).encode("utf-8", errors="replace")
            return self._send(HTTPStatus.OK, body, "application/json")
        return self._send(HTTPStatus.OK, report_page(kind, data), "text/html")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing about each request."""


def page_data(folders: list[Path]) -> tuple[str, dict[str, Any]]:
    """Kind and data of the page for one run, or for several."""
    if len(folders) == 1:
        return "report", report_data(RunDirectory(folders[0]))
    return "compare", comparison_data([RunDirectory(folder) for folder in folders])


def stamp(folders: list[Path]) -> str:
    """Changes when a record of the runs does."""
    parts = []
    for folder in folders:
        for name in ("metrics.jsonl", "samples.jsonl", "notices.txt"):
            file = folder / name
            if file.exists():
                status = file.stat()
                parts.append(f"{status.st_size}.{status.st_mtime_ns}")
    return "-".join(parts)


def index_page(root: Path, runs: dict[str, Path]) -> bytes:
    """The list of runs, newest first, as HTML."""
    rows = sorted((_row(name, path) for name, path in runs.items()), key=lambda row: -row["changed"])
    body = "".join(_row_html(row) for row in rows) or (
        '<tr><td colspan="8" class="missing">No run yet: a folder with metrics.jsonl appears when training begins.</td>'
        "</tr>"
    )
    parts = {"ROOT": html.escape(str(root.resolve())), "ROWS": body}
    page = page_of(asset("dash.html"), parts, title="verl: runs", policy="; form-action 'self'")
    return page.encode("utf-8", errors="replace")


def _row(name: str, path: Path) -> dict[str, Any]:
    run = RunDirectory(path)
    records, config = run.read_metrics(), run.read_config()
    last = records[-1] if records else {}
    validations = [values for record in records if (values := headline.validation(record))]
    total = config_value(config, "trainer.total_training_steps")
    step = last.get("step", 0)
    changed = (path / "metrics.jsonl").stat().st_mtime
    model = str(config_value(config, "actor_rollout_ref.model.path") or "")
    reward = next((value for r in reversed(records) if (value := headline.first(r, headline.REWARD)) is not None), None)
    return {
        "name": name,
        "changed": changed,
        "running": time.time() - changed < RUNNING_SECONDS and not (total and step >= total),
        "algorithm": config_value(config, "algorithm.name", "algorithm.adv_estimator") or "",
        "model": model.rstrip("/").rsplit("/", 1)[-1],
        "steps": f"{step} of {total}" if total else str(step),
        "reward": "" if reward is None else f"{reward:.3f}",
        "validation": ", ".join(f"{value:.3f}" for value in validations[-1].values()) if validations else "",
    }


def _row_html(row: dict[str, Any]) -> str:
    name = html.escape(row["name"])
    when = datetime.fromtimestamp(row["changed"]).strftime("%Y-%m-%d %H:%M")
    state = '<b class="best">running</b>' if row["running"] else when
    cells = "".join(
        f"<td>{html.escape(str(row[key]))}</td>" for key in ("algorithm", "model", "steps", "reward", "validation")
    )
    return (
        f'<tr><td class="pick"><input type="checkbox" name="run" value="{name}" aria-label="compare {name}"></td>'
        f'<th><a href="/page?run={quote(row["name"], safe="")}">{name}</a></th>{cells}<td>{state}</td></tr>\n'
    )
