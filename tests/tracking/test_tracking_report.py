"""The report: self-contained, safe against what responses contain, and drawn by a real browser where there is one."""

import html.parser
import json
import math
import random
import re
import shutil
import subprocess
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.tracking import RunDirectory, sample_row, write_report
from verl.tracking.report import script_json
from verl.tracking.report_charts import chart_panels
from verl.tracking.report_data import report_data

EVIL = (
    "</script><script>document.title='HACKED'</script><!-- <img src=x onerror=\"document.title='HACKED'\"> & \u2028 答"
)


class Page(html.parser.HTMLParser):
    """Every element with its attributes, and the content of each script by id, as an HTML parser sees them."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.scripts, self._script = [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag == "script":
            self._script = dict(attributes).get("id", f"script{len(self.scripts)}")

    def handle_endtag(self, tag):
        self._script = None if tag == "script" else self._script

    def handle_data(self, data):
        if self._script is not None:
            self.scripts[self._script] = self.scripts.get(self._script, "") + data


def small_run(path, steps=6):
    run = RunDirectory(path)
    run.write_config(
        {"trainer": {"experiment_name": EVIL}, "actor_rollout_ref": {"model": {"path": "/m/Tiny"}}, "k": EVIL}
    )
    run.write_environment(seed=1)
    run.append_notice("something " + EVIL)
    for step in range(steps + 1):
        metrics = {"val-core/arith/acc/mean@1": 0.25 + 0.1 * step} if step % 3 == 0 else {}
        if step:
            for role, value in (("mean", step / 10), ("max", step / 5), ("min", 0.0)):
                metrics[f"critic/score/{role}"] = value
            metrics |= {"actor/grad_norm": math.nan if step == 2 else 1.0, "timing_s/gen": 2.0, "timing_s/adv": 0.5}
            metrics |= {"timing_s/step": 2.5, "<b>odd</b>/name": 1.0, "time": 0}
        run.append_metrics(metrics, step)
        run.append_samples(
            [sample_row(step, "train", EVIL, f"answer {step} {EVIL}", float(step % 2), "1", "stop", "u1")]
        )
    run.append_samples([sample_row(steps, "val", "failed one", "r", None)])
    run.close()
    return run


def test_the_page_is_one_file_without_requests_and_texts_stay_texts(tmp_path):
    small_run(tmp_path)
    text = write_report(tmp_path).read_text(encoding="utf-8")
    page = Page(text)
    assert not [element for element in page.elements if {"src", "srcset", "onerror"} & element[1].keys()]
    assert all(tag not in ("img", "link", "iframe") for tag, _ in page.elements)
    assert all(attributes["href"].startswith("#") for tag, attributes in page.elements if "href" in attributes)
    assert [tag for tag, _ in page.elements].count("script") == 3 and set(page.scripts) >= {"data", "plotly"}
    policy = next(a["content"] for t, a in page.elements if t == "meta" and a.get("http-equiv"))
    assert "default-src 'none'" in policy and "http" not in policy
    data = json.loads(page.scripts["data"])
    assert data["samples"][3]["response"] == f"answer 3 {EVIL}" and data["samples"][3]["prompt"] == EVIL
    assert (
        data["title"] == EVIL and data["config"]["k"] == EVIL and EVIL.split("\u2028")[0] in data["notices"][0]["text"]
    )


@settings(deadline=None)
@given(st.text() | st.lists(st.sampled_from(["</script", "<!--", "<script>", "&lt;", "]]>", "\u2029"])).map("".join))
def test_no_text_can_leave_the_script(text):
    encoded = script_json({"t": text})
    assert not set("<>&\u2028\u2029") & set(encoded)
    assert json.loads(encoded) == {"t": text}


def test_data_by_hand(tmp_path):
    data = report_data(small_run(tmp_path))
    facts = dict(data["facts"])
    assert facts["model"] == "Tiny" and facts["steps"] == "6" and facts["training time"] == "0:00:15"
    accuracy, reward = data["tiles"][0], data["tiles"][1]
    assert accuracy == {"label": "arith accuracy", "kind": "percent", "better": 1, "before": 0.25, "after": 0.85}
    assert reward["label"] == "reward" and reward["before"] == 0.1 and reward["after"] == 0.6
    titles = {panel["title"]: [chart["title"] for chart in panel["charts"]] for panel in data["panels"]}
    assert titles["Reward and validation"] == ["val-core/arith/acc", "critic/score"]
    assert titles["Policy"] == ["actor/grad_norm"] and titles["Everything else"] == ["timing_s/step", "<b>odd</b>/name"]
    charts = {chart["title"]: chart for panel in data["panels"] for chart in panel["charts"]}
    assert charts["critic/score"]["lines"] == [{"name": "mean", "y": [None, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]}]
    assert charts["critic/score"]["band"] == [[None, 0, 0, 0, 0, 0, 0], [None, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2]]
    assert charts["actor/grad_norm"]["lines"][0]["y"][:4] == [None, 1.0, None, 1.0]
    assert [phase["name"] for phase in data["phases"]] == ["gen", "adv"]
    assert data["steps"] == list(range(7)) and data["total_samples"] == 8


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(
                ["critic/score/mean", "critic/score/max", "a/min", "a/mean", "val-core/x/acc/mean@1", "val-core", "z"]
            ),
            st.floats(),
        ),
        max_size=5,
    )
)
def test_every_metric_is_on_the_page_exactly_once(metric_rows):
    records = [{"step": step, **row} for step, row in enumerate(metric_rows)]
    charts = [chart for panel in chart_panels(records) for chart in panel["charts"]]
    curves = sum(len(chart["lines"]) + 2 * (chart["band"] is not None) for chart in charts)
    hidden = {"critic/score/max"} & {name for row in metric_rows for name in row}
    names = {name for row in metric_rows for name in row}
    assert len(names) - len(hidden) <= curves <= len(names)
    assert all(len(line["y"]) == len(records) for chart in charts for line in chart["lines"])


def test_an_empty_run_and_a_folder_that_is_no_run(tmp_path):
    assert "script" in write_report(tmp_path / "new").read_text()
    data = report_data(RunDirectory(tmp_path / "new"))
    assert data["panels"] == [] and data["tiles"] == [] and data["samples"] == [] and data["title"] == "new"


def test_a_long_run_is_written_in_seconds_and_fifteen_megabytes(tmp_path):
    run, r = RunDirectory(tmp_path), random.Random(0)
    for step in range(1, 1001):
        run.append_metrics({f"group{k % 7}/metric{k}": r.gauss(0, 1) for k in range(60)}, step)
        run.append_samples([sample_row(step, "train", "p" * 600, "r" * 900, r.random()) for _ in range(5)])
    run.close()
    start = time.process_time()
    path = write_report(tmp_path)
    assert time.process_time() - start < 8
    assert path.stat().st_size < 15e6
    data = json.loads(Page(path.read_text(encoding="utf-8")).scripts["data"])
    assert len(data["samples"]) == 5000 and len(data["steps"]) == 1000


def test_too_many_samples_are_thinned_over_the_whole_run(tmp_path):
    run = RunDirectory(tmp_path)
    for step in range(1, 121):
        run.append_samples([sample_row(step, "train", "p", "r" * 100_000, 1.0)])
    data = report_data(run)
    steps = [row["step"] for row in data["samples"]]
    assert data["total_samples"] == 120 and 50 < len(steps) < 80 and max(steps) > 115 and min(steps) == 1
    assert len(script_json(data)) < 9e6


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium")
def test_a_real_browser_draws_it_and_runs_nothing_from_a_response(tmp_path):
    run_folder = tmp_path / "run"
    small_run(run_folder)
    path = write_report(run_folder)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", "--virtual-time-budget=8000", "--window-size=1400,2500"]
    done = subprocess.run(
        [
            CHROMIUM,
            *flags,
            f"--user-data-dir={tmp_path / 'profile'}",
            "--enable-logging=stderr",
            "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=600,
    )
    dom = done.stdout
    assert "CONSOLE" not in done.stderr, done.stderr  # no error of a script, no refusal by the page's policy
    assert "<title>HACKED" not in dom and len(re.findall(r"<img\b", dom)) == 0
    assert dom.count('class="main-svg"') >= 4  # plotly has drawn
    rows = re.findall(r'<div class="row"', dom)
    assert len(rows) == 8 and "answer 6 &lt;/script&gt;&lt;script&gt;" in dom
    assert '<div class="value">85.0<span>%</span>' in dom and "+60.0 points" in dom
