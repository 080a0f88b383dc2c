"""Comparing runs on one page, and the dashboard that follows them."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
import threading
from contextlib import contextmanager

import pytest
from test_tracking_report import EVIL, Page

from verl.cli.main import main
from verl.tracking import RunDirectory, dash, sample_row
from verl.tracking.report import write_comparison
from verl.tracking.report_compare import comparison_data, run_names

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium")


def make_run(path, *, gain=1.0, steps=20, lr=1e-6, extra=None, note=EVIL):
    run = RunDirectory(path)
    config = {"algorithm": {"name": "grpo"}, "trainer": {"total_training_steps": 40}, "note": note}
    run.write_config({**config, "optim": {"lr": lr}, "secret": {"api_key": "x"}, **(extra or {})})
    run.write_environment(seed=1)
    for step in range(steps + 1):
        metrics = {"val-core/arith/acc/mean@1": gain * step / 100} if step % 10 == 0 else {}
        if step:
            metrics |= {f"critic/score/{role}": gain * step / 20 for role in ("mean", "max", "min")}
            metrics |= {"timing_s/step": 30.0, "response_length/mean": 12.0, "actor/lr": lr}
        run.append_metrics(metrics, step)
    run.append_samples([sample_row(steps, "train", f"ask {EVIL}", f"{path.name} says {EVIL}", 1.0, "1", "stop", "u")])
    run.close()
    return run


def test_numbers_by_hand(tmp_path):
    data = comparison_data([make_run(tmp_path / "a"), make_run(tmp_path / "b", gain=2.0, steps=10)])
    rows = {row["label"]: row["runs"] for row in data["numbers"]}
    assert rows["arith accuracy"][0] == {"first": 0.0, "last": 0.2, "best": 0.2, "at": 20}
    assert rows["reward"][1] == {"first": 0.1, "last": 1.0, "best": None, "at": None}
    assert rows["training time"][0]["last"] == 600 and "loss" not in rows
    assert [run["name"] for run in data["runs"]] == ["a", "b"]
    assert data["runs"][1]["minutes"][-1] == 5.0 and len(data["runs"][1]["steps"]) == 11
    charts = {chart["title"]: chart for panel in data["panels"] for chart in panel["charts"]}
    assert [line["run"] for line in charts["critic/score"]["lines"]] == [0, 1]
    assert charts["critic/score"]["lines"][1]["y"][-1] == 1.0 and charts["critic/score"]["band"] is None
    for chart in charts.values():
        for line in chart["lines"]:
            assert len(line["y"]) == len(data["runs"][line["run"]]["steps"])


def test_differences_of_configurations(tmp_path):
    data = comparison_data([make_run(tmp_path / "a"), make_run(tmp_path / "b", lr=5e-6, extra={"new": 1})])
    differs = {key: values for key, values in data["config"].items() if len(set(values)) > 1}
    assert differs == {"optim.lr": ["1e-06", "5e-06"], "new": [None, "1"]}
    assert data["config"]["algorithm.name"] == ["grpo", "grpo"] and "x" not in data["config"]["secret.api_key"]


def test_a_metric_that_only_one_run_has(tmp_path):
    one = make_run(tmp_path / "a")
    one.append_metrics({"critic/vf_loss": 0.5}, 3)
    one.close()
    data = comparison_data([one, make_run(tmp_path / "b")])
    panels = {panel["title"]: [chart["title"] for chart in panel["charts"]] for panel in data["panels"]}
    assert panels["Value model"] == ["critic/vf_loss"]


def test_names_tell_runs_apart(tmp_path):
    runs = [RunDirectory(tmp_path / place) for place in ("x/run", "y/run", "z/other")]
    assert run_names(runs) == ["x/run", "y/run", "z/other"]
    assert run_names([runs[0], runs[2]]) == ["run", "other"]
    assert run_names([runs[0], runs[0]]) == ["run (1)", "run (2)"]


def test_the_page_is_self_contained_and_safe(tmp_path):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b")
    page = Page(write_comparison([tmp_path / "a", tmp_path / "b"], tmp_path / "out" / "cmp.html").read_text("utf-8"))
    assert not [element for element in page.elements if {"src", "srcset", "onerror"} & element[1].keys()]
    policy = next(a["content"] for t, a in page.elements if t == "meta" and a.get("http-equiv"))
    assert "default-src 'none'" in policy and "connect-src" not in policy and "http" not in policy
    assert json.loads(page.scripts["data"])["samples"][1]["run"] == 1


def test_the_command(tmp_path, monkeypatch, capsys):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    assert main(["report", "a", "b"]) == 0
    assert capsys.readouterr().out == "comparison.html\n" and (tmp_path / "comparison.html").is_file()
    assert main(["report", "a", "b", "--output", "deep/er.html"]) == 0 and (tmp_path / "deep/er.html").is_file()
    assert main(["report", "a", "nothing"]) == 2
    assert main(["report", "a", "--output", "x.html"]) == 2
    assert "stays in its folder" in capsys.readouterr().err


def browse(url, profile, seconds=12):
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += [
        "--disable-component-update",
        "--disable-sync",
        f"--virtual-time-budget={seconds}000",
        "--window-size=1300,3000",
    ]
    command = [CHROMIUM, *flags, f"--user-data-dir={profile}", "--enable-logging=stderr", "--dump-dom", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert "CONSOLE" not in done.stderr, done.stderr
    assert "<title>HACKED" not in done.stdout and not re.findall(r"<img\b", done.stdout)
    return done.stdout


@needs_browser
def test_a_real_browser_draws_the_comparison(tmp_path):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", lr=5e-6, gain=2.0)
    page = write_comparison([tmp_path / "a", tmp_path / "b"], tmp_path / "cmp.html")
    dom = browse(page.as_uri(), tmp_path / "profile")
    assert dom.count('class="main-svg"') >= 4
    assert dom.count('class="run-card"') == 2 and '<b class="best">40.0 %</b>' in dom
    assert '<th class="mono">optim.lr</th><td class="mono">1e-06</td><td class="mono">5e-06</td>' in dom
    assert '<th class="mono">algorithm.name</th>' not in dom  # equal in both
    assert len(re.findall(r'<div class="row"', dom)) == 2 and "b says &lt;/script&gt;" in dom


# -- the dashboard ----------------------------------------------------------------------------------------------------
@contextmanager
def serving(folder):
    server = dash.make_server(folder)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def get(port, path, host="127.0.0.1"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.putrequest("GET", path, skip_host=True)
    connection.putheader("Host", f"{host}:{port}")
    connection.endheaders()
    reply = connection.getresponse()
    body = reply.read().decode()
    connection.close()
    return reply.status, body


def test_runs_are_found_and_earlier_records_are_not(tmp_path):
    for name in ("a", "sub/b", "a/earlier_runs/1", "deep/er/than/three/levels"):
        make_run(tmp_path / name, steps=1)
    assert list(dash.find_runs(tmp_path)) == ["a", "sub/b"]
    assert list(dash.find_runs(tmp_path / "a")) == ["a"]


def test_pages_data_and_refusals(tmp_path):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b <b>&'")
    (tmp_path / "secret.txt").write_text("geheim")
    with serving(tmp_path) as port:
        status, index = get(port, "/")
        assert status == 200 and "b &lt;b&gt;&amp;&#x27;" in index and "<b>&'" not in index and "20 of 40" in index
        status, page = get(port, "/page?run=a")
        assert status == 200 and "connect-src 'self'" in page
        status, both = get(port, "/page?run=a&run=b+%3Cb%3E%26%27")
        assert status == 200 and '"name":"b \\u003cb\\u003e\\u0026' in both
        status, data = get(port, "/data?run=a")
        live = json.loads(data)["live"]
        assert status == 200 and live["url"] == "/data?run=a"
        assert get(port, f"/data?run=a&known={live['stamp']}") == (204, "")
        RunDirectory(tmp_path / "a").append_metrics({"critic/score/mean": 9.0}, 21)
        status, data = get(port, f"/data?run=a&known={live['stamp']}")
        assert status == 200 and json.loads(data)["steps"][-1] == 21
        for path in (
            "/page",
            "/page?run=..",
            "/data?run=a&run=nope",
            "/secret.txt",
            "/../secret.txt",
            "/page?run=/etc",
        ):
            assert get(port, path)[0] == 404, path
        assert get(port, "/", host="evil.example")[0] == 403


@needs_browser
def test_a_page_follows_its_run(tmp_path, monkeypatch):
    make_run(tmp_path / "runs" / "a")
    calls, real = [], dash.stamp

    def stamp(folders):
        calls.append(1)
        if len(calls) == 3:  # the page has asked once before
            run = RunDirectory(folders[0])
            run.append_metrics({"actor/new_metric": 1.0}, 21)
            run.close()
        return real(folders)

    monkeypatch.setattr(dash, "stamp", stamp)
    with serving(tmp_path / "runs") as port:
        dom = browse(f"http://127.0.0.1:{port}/page?run=a", tmp_path / "profile")
    assert len(calls) >= 3 and "<i>actor/</i>new_metric" in dom and 'id="lost"' not in dom


@needs_browser
def test_the_list_is_drawn(tmp_path):
    make_run(tmp_path / "runs" / "a")
    with serving(tmp_path / "runs") as port:
        dom = browse(f"http://127.0.0.1:{port}/", tmp_path / "profile", seconds=3)  # it reloads after 10
    assert ">a</a>" in dom and '<b class="best">running</b>' in dom


def test_a_taken_port_and_a_missing_folder(tmp_path, capsys):
    with serving(tmp_path) as port:
        assert main(["dash", str(tmp_path), "--port", str(port)]) == 2
    assert main(["dash", str(tmp_path / "none")]) == 2
    err = capsys.readouterr().err
    assert "cannot be listened on" in err and "there is no folder" in err
