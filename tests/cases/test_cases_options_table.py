"""Every option stands in exactly one table: it changes a run, must not change one, has an effect seen without one, or
a test of its own."""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from cases_fuzz import refused
from cases_option_effects import ELSEWHERE, RECORDS, REFUSALS, VIEWS
from cases_options import CUTS, RUNS
from tiny_models import save_tiny_model
from trainer_helpers import make_trainer

from verl.config import LEAVES
from verl.tracking import is_time_metric

CLOCK = re.compile("seconds|memory|time|perf/")
TESTS = Path(__file__).parents[1]
CLASSES = """
class First:
    def __init__(self, **_):
        self.rows = [{"raw_prompt": "1"}]
    def __len__(self):
        return 1
    def __getitem__(self, i):
        return self.rows[i]

class Second(First):
    def __init__(self, **_):
        self.rows = [{"raw_prompt": "22"}]

def first(solution_str, **kwargs):
    return 1.0

def second(solution_str, **kwargs):
    return 2.0
"""


def test_every_option_stands_in_one_table():
    counts = Counter(
        [key for base in (*RUNS.values(), *RECORDS.values()) for key in base.changes]
        + [key for _, _, changes in VIEWS for key in changes]
        + [*CUTS, *ELSEWHERE]
    )
    assert set(counts) - set(LEAVES) == set(), "no options"
    assert set(LEAVES) - set(counts) == set(), "options without evidence"
    assert [key for key, count in counts.items() if count > 1] == [], "in two tables"


@pytest.mark.parametrize("key", ELSEWHERE)
def test_the_test_of_an_option_exists_and_names_it(key):
    file, _, name = ELSEWHERE[key].partition("::")
    source = (TESTS / file).read_text(encoding="utf-8")
    function = next(n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == name)
    lines = source.splitlines()
    start = min([function.lineno, *(d.lineno for d in function.decorator_list)])
    text = "\n".join(lines[start - 1 : function.end_lineno])
    assert re.search(rf"(\b|_){key.rpartition('.')[2]}\b", text)


@pytest.fixture(scope="module")
def places(tiny_model_dir, tmp_path_factory):
    """What stands for a name in braces."""
    folder = tmp_path_factory.mktemp("places")
    for name in "ab":
        rows = [{"prompt": f"{name}{k}", "answer": "1"} for k in range(4)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "classes.py").write_text(CLASSES)
    trainer = make_trainer(tiny_model_dir, folder / "done", trainer__save_freq=1)
    trainer.fit()
    return {
        "{a}": str(folder / "a.jsonl"),
        "{b}": str(folder / "b.jsonl"),
        "{classes}": str(folder / "classes.py"),
        "{other}": str(save_tiny_model(folder / "other", seed=7)),
        "{done}": str(folder / "done"),
    }


def filled(values, places):
    def fill(value):
        if isinstance(value, str):
            for name, place in places.items():
                value = value.replace(name, place)
        return value

    return {key: fill(value) for key, value in values.items()}


def check_refusal(key, message):
    assert (message is not None) == (key in REFUSALS), message
    if message is not None:
        assert REFUSALS[key] in message


@pytest.mark.parametrize(
    ("number", "key"), [(i, key) for i, (_, _, changes) in enumerate(VIEWS) for key in changes], ids=lambda v: str(v)
)
def test_a_changed_option_changes_what_is_built(tiny_model_dir, places, number, key):
    view, base, changes = VIEWS[number]
    before = view(filled(base, places), tiny_model_dir)
    assert view(filled(base, places), tiny_model_dir) == before
    after, message = refused(lambda: view(filled({**base, key: changes[key]}, places), tiny_model_dir))
    check_refusal(key, message)
    assert after != before


def record(model, folder, base, values):
    """(files, metrics, samples, names, flows outside the steps) of a run."""
    values = {key.replace(".", "__"): value for key, value in values.items()}
    values = {"trainer__test_freq": 1, **values}
    trainer = make_trainer(model, folder, algorithm=base.algorithm, validation=True, **values)
    batches = []
    run = trainer.flows.run
    trainer.flows.run = lambda name, *rest: batches.append(name) or run(name, *rest)
    trainer.fit()
    root = trainer.run_dir.path
    files = sorted(str(p.relative_to(folder.parent)) for p in folder.parent.rglob("*") if p.is_file())
    files = [re.sub(r"tfevents.*", "tfevents", name) for name in files if "/workers/" not in name]
    rows = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    steps = [{k: v for k, v in row.items() if not is_time_metric(k) and not CLOCK.search(k)} for row in rows]
    samples = [
        (row["split"], row["step"], row["response"])
        for row in map(json.loads, (root / "samples.jsonl").read_text().splitlines())
    ]
    info = trainer.info()
    return files, steps, samples, (info.project, info.experiment), batches


def recorded(model, places, folder, base, values):
    """(record of a run in a folder of its own, message if it was refused)."""
    folder.mkdir()
    done, places = places["{done}"], {**places, "{folder}": str(folder / "extra"), "{done}": str(folder / "done")}
    if "{done}" in str(values):
        shutil.copytree(done, folder / "done", symlinks=True)
    return refused(lambda: record(model, folder / "run", base, filled(values, places)))


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, base in RECORDS.items() for key in base.changes])
def test_a_changed_option_changes_what_a_run_leaves(tiny_model_dir, places, tmp_path, name, key):
    base = RECORDS[name]
    before, message = recorded(tiny_model_dir, places, tmp_path / "0", base, base.given)
    assert message is None
    after, message = recorded(tiny_model_dir, places, tmp_path / "1", base, {**base.given, key: base.changes[key]})
    check_refusal(key, message)
    assert after != before
