"""The run folder: a torn line and a full disk lose nothing, a resume leaves no duplicates."""

import json
import math
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from verl import notices
from verl.errors import VerlError
from verl.tracking import RunDirectory
from verl.tracking.jsonl import JsonlFile, encode_line, jsonable, number, read_jsonl
from verl.tracking.plain import flatten, hide_in_argument, plain_config


@pytest.fixture(autouse=True)
def fresh_notices():
    notices.reset()
    yield
    notices.reset()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(st.text(), json_values, max_size=4), max_size=6))
def test_rows_come_back_whatever_they_hold(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file = JsonlFile(path)
    for row in rows:
        file.append([row])
    file.close()
    assert read_jsonl(path) == [jsonable(row) for row in rows]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(min_size=1), min_size=1, max_size=5), st.data())
def test_a_file_cut_anywhere_keeps_its_whole_lines_and_takes_more(tmp_path_factory, texts, draw):
    path = tmp_path_factory.mktemp("cut") / "rows.jsonl"
    lines = [encode_line({"text": text}) for text in texts]
    whole = b"".join(lines)
    cut = draw.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    kept = [i for i in range(len(lines)) if len(b"".join(lines[: i + 1])) - 1 <= cut]  # a line is whole without its \n
    file = JsonlFile(path)
    file.append([{"text": "new"}])
    file.close()
    assert [row["text"] for row in read_jsonl(path)] == [texts[i] for i in kept] + ["new"]
    assert all(json.loads(line) for line in path.read_bytes().split(b"\n") if line)


def test_line_separator_inside_a_text_is_no_line_end(tmp_path):
    file = JsonlFile(tmp_path / "a.jsonl")
    file.append([{"t": "one\u2028two\x85three"}, {"t": "\udc80"}])
    file.close()
    assert [row["t"] for row in read_jsonl(tmp_path / "a.jsonl")] == ["one\u2028two\x85three", "\udc80"]


def test_a_broken_line_in_the_middle_is_passed_over_and_said(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": \n{"a": 3}\n')
    assert [row["a"] for row in read_jsonl(path)] == [1, 3]
    assert "line 2" in notices.seen()[0]


def test_kill_minus_nine_while_writing_leaves_whole_records(tmp_path):
    script = textwrap.dedent(
        f"""
        from verl.tracking import RunDirectory
        run = RunDirectory({str(tmp_path)!r})
        step = 0
        while True:
            run.append_metrics({{"x": step, "long/" + "y" * 5000: 1.0}}, step)
            if step == 20:
                print("going", flush=True)
            step += 1
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "going\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    run = RunDirectory(tmp_path)
    steps = [record["step"] for record in run.read_metrics()]
    assert len(steps) >= 20 and steps == list(range(len(steps)))
    assert run.truncate_after(10) == len(steps) - 11
    run.append_metrics({"x": 11}, 11)
    assert [record["step"] for record in run.read_metrics()] == list(range(12))


def test_a_full_disk_loses_nothing(tmp_path):
    """A file-size limit makes write() fail (after a part was written) exactly as a full disk does."""
    script = textwrap.dedent(
        f"""
        import resource, signal
        from verl.tracking.jsonl import JsonlFile, read_jsonl
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        file = JsonlFile({str(tmp_path / "a.jsonl")!r})
        file.append([{{"i": 0}}])
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        try:
            file.append([{{"i": 1, "text": "x" * 500}}])
        except OSError as error:
            print("failed", error.errno, file.pending, [row["i"] for row in read_jsonl(file.path)], flush=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        file.append([{{"i": 2}}])
        file.close()
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("failed") and done.stdout.endswith("1 [0]\n")
    assert [row["i"] for row in read_jsonl(tmp_path / "a.jsonl")] == [0, 1, 2]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)  # of this process: untouched


def test_resume_cuts_metrics_and_samples_and_merges_one_step(tmp_path):
    run = RunDirectory(tmp_path / "deep" / "run")
    for step in range(1, 7):
        run.append_metrics({"loss": step}, step)
        run.append_samples([{"step": step, "response": str(step)}])
    assert run.truncate_after(4) == 4
    run.append_metrics({"loss": 50.0}, 5)
    run.append_metrics({"val-core/a/acc/mean@1": 0.5}, 5)
    records = run.read_metrics()
    assert [record["loss"] for record in records] == [1, 2, 3, 4, 50]
    assert records[-1]["val-core/a/acc/mean@1"] == 0.5 and records[-1]["step"] == 5
    assert [row["step"] for row in run.read_samples()] == [1, 2, 3, 4]
    assert not list(run.path.glob("*.tmp*")) and not list(run.path.glob(".*"))


def test_non_finite_numbers_are_strict_json_and_come_back(tmp_path):
    run = RunDirectory(tmp_path)
    run.append_metrics({"a": math.nan, "b": math.inf, "c": -math.inf, "d": np.float32(0.5)}, 1)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    record = run.read_metrics()[0]
    assert math.isnan(record["a"]) and record["b"] == math.inf and record["c"] == -math.inf and record["d"] == 0.5
    assert number("Infinity") == math.inf and number("text") is None and number(True) == 1.0


def test_jsonable_takes_tensors_and_arrays():
    import torch

    value = {"t": torch.tensor([1, 2]), "s": torch.tensor(1.5), "n": np.int64(3), "a": np.array([True]), "o": Path("x")}
    assert jsonable(value) == {"t": [1, 2], "s": 1.5, "n": 3, "a": [True], "o": "x"}


def test_a_file_in_the_way_and_a_folder_without_permission_are_one_clear_sentence(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(VerlError, match=r"a file of that name is in the way.*trainer.default_local_dir"):
            RunDirectory(path)
    with pytest.raises(VerlError, match="cannot be written"):
        RunDirectory("/proc/verl_run")
    if os.geteuid() != 0:
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(VerlError, match=r"cannot be written \(Permission denied\)"):
            RunDirectory(tmp_path / "closed")


@dataclass
class Optim:
    lr: float = 1e-5
    betas: tuple = (0.9, 0.999)


@dataclass
class Config:
    optim: Optim = field(default_factory=Optim)
    reward_kwargs: dict = field(default_factory=lambda: {"api_key": "sk-1", "max_tokens": 5, "url": "http://u:p@h/x"})
    reward_fn: object = len


def test_config_of_every_kind_is_written_without_secrets(tmp_path):
    run = RunDirectory(tmp_path)
    run.write_config(Config())
    text = (tmp_path / "config.yaml").read_text()
    config = yaml.safe_load(text)
    assert config["optim"] == {"lr": 1e-5, "betas": [0.9, 0.999]}
    assert config["reward_kwargs"] == {"api_key": "***", "max_tokens": 5, "url": "http://***@h/x"}
    assert config["reward_fn"] == "builtins.len" and "sk-1" not in text
    dot = OmegaConf.create({"a": {"b": "${c}"}, "c": 3, "d": {"hf_token": "x"}, "loss_agg_mode": "token-mean"})
    assert plain_config(dot) == {"a": {"b": 3}, "c": 3, "d": {"hf_token": "***"}, "loss_agg_mode": "token-mean"}
    assert hide_in_argument("+reward.api_key=sk-1") == "+reward.api_key=***"
    assert hide_in_argument("data.max_tokens=5") == "data.max_tokens=5"
    assert flatten({"a": {"b": 1, "e": {}}, "l": [1]}) == {"a.b": 1, "a.e": {}, "l": [1]}


def test_a_changed_config_is_said(tmp_path):
    run = RunDirectory(tmp_path)
    run.write_config({"a": {"b": 1}, "c": 2})
    assert notices.seen() == []
    run.write_config({"a": {"b": 5}, "c": 2})
    assert "a.b: 1 -> 5" in notices.seen()[0] and run.read_config() == {"a": {"b": 5}, "c": 2}


def test_environment_keeps_earlier_starts(tmp_path):
    run = RunDirectory(tmp_path)
    run.write_environment(seed=7, device="cpu, float32")
    run.write_environment(seed=7, resume_step=20)
    record = run.read_environment()
    assert record["seed"] == 7 and record["resumed_after_step"] == 20 and len(record["earlier_starts"]) == 1
    assert record["packages"]["numpy"] == np.__version__ and record["cpu"] and record["python"]
    assert "python" in record["command"]  # whatever started this process: pytest, or a worker of xdist


def test_a_run_from_the_beginning_sets_the_earlier_record_aside(tmp_path):
    run = RunDirectory(tmp_path)
    assert run.set_earlier_run_aside() is None
    run.append_metrics({"a": 1}, 1)
    (tmp_path / "global_step_1").mkdir()
    first = run.set_earlier_run_aside()
    run.append_metrics({"a": 2}, 1)
    second = run.set_earlier_run_aside()
    assert [first.name, second.name] == ["1", "2"] and run.read_metrics() == []
    assert read_jsonl(first / "metrics.jsonl")[0]["a"] == 1 and (tmp_path / "global_step_1").exists()


def test_notices_are_one_line_each(tmp_path):
    run = RunDirectory(tmp_path)
    run.append_notice("two\nlines \udc80")
    assert run.read_notices()[0].endswith(" two lines \\udc80")
