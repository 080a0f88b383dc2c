"""The tracker and its loggers: names, formats, TensorBoard read back, failures that do not stop a run."""

import io
import json
import math
import os
import subprocess
import sys
import textwrap

import pytest

from verl import notices
from verl.errors import ConfigError, MissingDependencyError, VerlError
from verl.metrics import Metrics
from verl.notices import notice
from verl.tracking import RunDirectory, RunInfo, Tracker, sample_row
from verl.tracking.jsonl import read_jsonl
from verl.tracking.loggers import check_names


@pytest.fixture(autouse=True)
def fresh_notices():
    notices.reset()
    yield
    notices.reset()


def make(tmp_path, loggers="console", **options):
    options.setdefault("stream", io.StringIO())
    info = options.pop("info", RunInfo(project="proj", experiment="exp", total_steps=4))
    return Tracker({"a": {"b": 1}}, loggers, RunDirectory(tmp_path / "run"), info, **options)


def test_a_pipe_gets_verls_line(tmp_path):
    out = io.StringIO()
    metrics = Metrics()
    metrics.add("actor/pg_loss", 0.123456789)
    metrics.add("perf/total_num_tokens", 1234567, reduce="sum")
    metrics.add("actor/grad_norm", math.nan)
    with make(tmp_path, stream=out) as tracker:
        tracker.log(metrics, 1)
        tracker.samples([sample_row(1, "val", "p", "r", 1.0)], 1)
    lines = out.getvalue().splitlines()
    assert lines[0] == "step:1 - actor/pg_loss:0.123457 - perf/total_num_tokens:1234567 - actor/grad_norm:nan"
    assert lines[1] == "step:1 - val sample | prompt: p | response: r | score: 1"
    record = RunDirectory(tmp_path / "run").read_metrics()[0]
    assert record["actor/pg_loss"] == 0.123456789 and math.isnan(record["actor/grad_norm"])


def test_document_lines(tmp_path):
    out = io.StringIO()
    with make(tmp_path, style="verl_steps", stream=out) as tracker:
        tracker.start()
        for phase, seconds in (
            ("gen", 0.82),
            ("reward", 0.1),
            ("adv", 0.15),
            ("update_critic", 0.41),
            ("update_actor", 0.67),
        ):
            tracker.phase_started(phase)
            tracker.phase_finished(phase, seconds)
        tracker.finish()
    assert out.getvalue().splitlines() == [
        "[INFO] Starting PPO training...",
        "[INFO] Generating sequences... (timing/gen: 0.82s)",
        "[INFO] Computing advantages... (timing/adv: 0.15s)",
        "[INFO] Updating critic... (timing/update_critic: 0.41s)",
        "[INFO] Updating actor... (timing/update_actor: 0.67s)",
        "[INFO] Training completed.",
    ]


def test_rl_trainer_lines(tmp_path):
    out = io.StringIO()
    with make(tmp_path, style="rl_trainer", stream=out) as tracker:
        for step in (1, 2):
            tracker.phase_finished("gen", 3.2, samples=4)
            for phase in ("update_critic", "update_actor"):
                with tracker.phase(phase):
                    pass
            metrics = {"kl_divergence": 0.023, "reward_mean": 0.25, "policy_loss": -0.187, "timing_s/step": 12.4}
            tracker.log(metrics, step)
    step_1 = [
        "[INFO] Rollout completed: 4 samples generated in 3.2s",
        "[INFO] PPO update started...",
        "[INFO] KL divergence: 0.023 | Reward mean: 0.25 | Policy loss: -0.187",
        "[INFO] Step 1 finished in 12.4s",
    ]
    assert out.getvalue().splitlines() == step_1 + [line.replace("Step 1", "Step 2") for line in step_1]


def test_names_are_checked_together_with_the_nearest(tmp_path):
    assert check_names("console") == ["console"] and check_names(["jsonl", "jsonl", "file"]) == ["jsonl", "file"]
    with pytest.raises(ConfigError) as error:
        check_names(["tensorbord", "console", "xyz"])
    assert len(error.value.problems) == 2
    assert (
        "did you mean 'tensorboard'?" in error.value.problems[0]
        and "there are console, jsonl" in error.value.problems[1]
    )
    with pytest.raises(ConfigError, match="unknown console style 'pretty'"):
        make(tmp_path, style="pretty")


def test_tensorboard_is_read_back_and_drops_steps_that_are_done_again(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with make(tmp_path, ["tensorboard"]) as tracker:
        for step in range(1, 7):
            tracker.log({"critic/score/mean": step / 10}, step)
        tracker.samples([sample_row(6, "val", "p <b>", "r\n# r", 1.0, "g")], 6)
    with make(tmp_path, ["tensorboard"], info=RunInfo(resume_step=4)) as tracker:
        tracker.log({"critic/score/mean": 99.0}, 5)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    points = [(event.step, round(event.value, 4)) for event in events.Scalars("critic/score/mean")]
    assert points == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 99.0)]
    records = RunDirectory(tmp_path / "run").read_metrics()
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]


def test_tensorboard_text(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with make(tmp_path, ["tensorboard"]) as tracker:
        tracker.samples([sample_row(6, "val", "p <b>", "r\n# r", 1.0, "g")], 6)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    text = events.Tensors("samples")[0].tensor_proto.string_val[0].decode()
    assert "    r\n    # r" in text and events.SummaryMetadata("samples").plugin_data.plugin_name == "text"


def test_file_logger(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "logs"))
    for resume in (0, 1):
        with make(tmp_path, ["file"], info=RunInfo("proj", "exp", resume_step=resume)) as tracker:
            for step in (1, 2) if resume == 0 else (2,):
                tracker.log({"a": step + resume}, step)
    rows = read_jsonl(tmp_path / "logs" / "proj" / "exp.jsonl")
    assert rows == [{"step": 1, "data": {"a": 1.0}}, {"step": 2, "data": {"a": 3.0}}]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab", "trackio", "clearml"])
def test_a_missing_package_names_its_command(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)  # what Python does for a module that must not be found
    with pytest.raises(MissingDependencyError, match=f"trainer.logger={name} needs .* pip install {name}"):
        make(tmp_path, [name])
    notice("the sink of the failed tracker is gone")
    assert RunDirectory(tmp_path / "run").read_notices() == []


FAKE_WANDB = """
import json, os
class Table:
    def __init__(self, columns, data):
        self.rows = [dict(zip(columns, row)) for row in data]
class Run:
    def __init__(self, settings):
        self.settings, self.steps = settings, []
    def log(self, values, step):
        if step in (2, 3, 4) and os.environ.get("FAKE_WANDB_DOWN"):
            raise ConnectionError("network is unreachable")
        self.steps.append([step, {k: getattr(v, "rows", v) for k, v in values.items()}])
    def finish(self):
        with open(os.environ["FAKE_WANDB_OUT"], "w") as file:
            json.dump([self.settings, self.steps], file)
def init(**settings):
    if os.environ.get("FAKE_WANDB_DOWN") == "start":
        raise RuntimeError("not logged in")
    return Run({k: v for k, v in settings.items() if k != "dir"})
"""


@pytest.fixture
def fake_wandb(tmp_path, monkeypatch):
    (tmp_path / "fakes").mkdir()
    (tmp_path / "fakes" / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(str(tmp_path / "fakes"))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("FAKE_WANDB_OUT", str(tmp_path / "out.json"))
    yield lambda: json.loads((tmp_path / "out.json").read_text())
    sys.modules.pop("wandb", None)


def test_wandb_gets_everything(tmp_path, fake_wandb):
    with make(tmp_path, ["wandb"]) as tracker:
        tracker.log({"a": 1.5}, 1)
        tracker.samples([sample_row(1, "val", "p", "r", None, 42)], 1)
    settings, steps = fake_wandb()
    assert settings == {"project": "proj", "name": "exp", "group": "exp", "config": {"a": {"b": 1}}}
    assert steps[0] == [1, {"a": 1.5}]
    assert steps[1][1]["samples"][0]["ground_truth"] == "42" and steps[1][1]["samples"][0]["score"] is None


def test_a_network_failure_does_not_stop_training_and_a_dead_logger_is_dropped(tmp_path, fake_wandb, monkeypatch):
    monkeypatch.setenv("FAKE_WANDB_DOWN", "later")
    out = io.StringIO()
    with make(tmp_path, ["console", "wandb"], stream=out, max_failures=3) as tracker:
        for step in range(1, 7):
            tracker.log({"a": step}, step)
    said = RunDirectory(tmp_path / "run").read_notices()
    assert len(said) == 2 and "failed: ConnectionError: network is unreachable" in said[0]
    assert "failed 3 times in a row and gets nothing any more" in said[1]
    assert out.getvalue().count("step:") == 6 and out.getvalue().count("[notice]") == 2
    assert [record["a"] for record in RunDirectory(tmp_path / "run").read_metrics()] == [1, 2, 3, 4, 5, 6]


def test_a_logger_that_cannot_start_is_one_sentence_before_training(tmp_path, fake_wandb, monkeypatch):
    monkeypatch.setenv("FAKE_WANDB_DOWN", "start")
    with pytest.raises(VerlError, match=r"'wandb' could not start \(RuntimeError: not logged in\)"):
        make(tmp_path, ["wandb"])


def test_notices_reach_console_and_record_also_those_said_before(tmp_path):
    notices.notice("said early")
    out = io.StringIO()
    with make(tmp_path, stream=out):
        notices.notice("said later")
    notices.notice("said after the end")
    texts = [line.split(" ", 1)[1] for line in RunDirectory(tmp_path / "run").read_notices()]
    assert texts == ["said early", "said later"]
    assert out.getvalue() == "[notice] said later\n"


def test_a_reader_that_goes_away_does_not_stop_the_run(tmp_path):
    """`verl train | head -1`: the pipe breaks; the record goes on."""
    script = textwrap.dedent(
        f"""
        import time
        from verl.tracking import RunDirectory, Tracker
        with Tracker({{}}, ["console"], RunDirectory({str(tmp_path / "run")!r})) as tracker:
            for step in range(300):
                tracker.log({{"some/metric": step}}, step)
                if step == 0:
                    time.sleep(2)  # until the reader is gone
        """
    )
    command = f'{sys.executable} -c "$TRAIN" | head -1'
    done = subprocess.run(["bash", "-c", command], env={**os.environ, "TRAIN": script}, capture_output=True, text=True)
    assert done.stdout == "step:0 - some/metric:0\n"
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert "failed 3 times in a row" in done.stderr
    assert len(RunDirectory(tmp_path / "run").read_metrics()) == 300


def test_importing_tracking_loads_no_heavy_package():
    code = (
        "import sys, verl.tracking, verl.tracking.tracker; "
        "print([m for m in ('torch', 'transformers', 'ray', 'plotly', 'rich', 'tensorboard') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
