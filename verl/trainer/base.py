"""The trainer: one loop, whatever the algorithm. What a step does is the dataflow's business."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from verl.checkpoint import CheckpointStore
from verl.config import Config
from verl.dataflow import FlowSet
from verl.dataflow.executor import StepResult
from verl.metrics import Metrics
from verl.models.backbone import hidden_states  # noqa: F401  (imported early so that a broken torch shows before loading)
from verl.notices import notice
from verl.protocol import DataProto
from verl.tracking import RunDirectory, RunInfo, Tracker, step_metrics, write_report
from verl.trainer.build import Plan, prepare
from verl.trainer.evaluation import Evaluation
from verl.trainer.phases import phase_of, phase_seconds
from verl.trainer.ppo import ppo
from verl.trainer.roles import Roles, build_roles
from verl.trainer.runstate import restore, save
from verl.trainer.samples import sample_rows

Callback = Callable[["Trainer", dict[str, float]], None]


class Trainer:
    """Trains what ``config`` describes.

    Args:
        config: as :func:`verl.config.load_config` gives it.
        train_rows, validation_rows: rows in memory in place of data files.
        style: of the console, see :class:`verl.tracking.Tracker`.
        callbacks: called after every step with the trainer and the step's metrics.

    Attributes:
        global_steps: training steps done.
    """

    def __init__(
        self,
        config: Config,
        *,
        train_rows: list[dict[str, Any]] | None = None,
        validation_rows: list[dict[str, Any]] | None = None,
        style: str = "auto",
        callbacks: tuple[Callback, ...] = (),
    ):
        self.plan: Plan = prepare(config, train_rows=train_rows, validation_rows=validation_rows)
        self.config = self.plan.config
        self.tokenizer, self.loader, self.total_steps = self.plan.tokenizer, self.plan.loader, self.plan.total_steps
        self.style, self.callbacks = style, callbacks
        self.global_steps = 0
        self.timings: dict[str, float] = {}  # seconds spent between steps, told with the next one
        self.metrics: dict[str, float] = {}  # of the last step
        trainer = self.config.trainer
        self.run_dir = RunDirectory(trainer.default_local_dir)
        self.store = CheckpointStore(
            Path(trainer.default_local_dir), keep_last=trainer.max_actor_ckpt_to_keep, keep_best=trainer.keep_best
        )
        self.resume_from = self.store.find(trainer.resume_mode, trainer.resume_from_path)
        self.roles: Roles = build_roles(
            self.config, self.plan.choice, self.tokenizer, self.plan.prompt_columns, self.total_steps
        )
        self.evaluation = Evaluation(self.config, self.roles, self.tokenizer, self.plan.validation)
        train = ppo(self.roles, self.config, source=self._draw_more)
        self.flows = FlowSet({"train": train, **self.evaluation.flows})
        self.flows.validate(steps=range(1, min(self.total_steps, 256) + 1))
        if self.resume_from is not None:
            restore(self, self.resume_from)

    # ---- the loop ----------------------------------------------------------------------------------------------

    def fit(self) -> dict[str, float]:
        """Train to the last step; returns the metrics of the last step. This is the only loop there is."""
        with self._running() as tracker:
            self._validate_before()
            for step, batch in self._batches():
                started = time.perf_counter()
                self.roles.reward.begin_step()
                result = self.flows.run("train", batch, step, self.config.trainer.executor, self._on_event)
                self.roles.reward.end_step()
                self.global_steps = step
                metrics = self._measure(result, time.perf_counter() - started)
                if self._due(self.config.trainer.test_freq):
                    metrics.merge(self.validate())
                self.metrics = metrics.results()
                tracker.log(self.metrics, step)
                self._show_samples(result)
                if self._due(self.config.trainer.save_freq, final=self.config.trainer.save_final):
                    self.save()
                for callback in self.callbacks:
                    callback(self, self.metrics)
        return self.metrics

    def fit_with_scores(self) -> tuple[float | None, float | None]:
        """:meth:`fit`, and the headline validation score before and after it (None where there is no validation)."""
        scores: list[float | None] = []
        self.evaluation.on_score = scores.append
        self.fit()
        return (scores[0], scores[-1]) if scores else (None, None)

    def describe(self) -> dict[str, Any]:
        """The model, its size, dtype and device, and the engine that generates."""
        return self.roles.actor.describe()

    def _batches(self) -> Iterator[tuple[int, DataProto]]:
        """(global step, prompts) of every step that is left."""
        if self.config.trainer.val_only:
            return
        if self.global_steps >= self.total_steps:
            notice(f"Nothing to do: step {self.global_steps} of {self.total_steps} is done already.")
        for step in range(self.global_steps + 1, self.total_steps + 1):
            yield step, self.loader.next_batch()

    def _draw_more(self, draw: int) -> DataProto | None:
        """More prompts for dynamic sampling, continuing in draw order; None at the end of the data."""
        try:
            return self.loader.draw(self.config.data.gen_batch_size)
        except StopIteration:
            return None

    def _due(self, every: int, *, final: bool | None = None) -> bool:
        """Whether something that happens every so many steps happens now; it also does at the end, if it ever does."""
        last = self.global_steps == self.total_steps
        if every > 0 and self.global_steps % every == 0:
            return True
        return last and (every > 0 if final is None else final)

    # ---- parts of a step -----------------------------------------------------------------------------------------

    def _measure(self, result: StepResult, seconds: float) -> Metrics:
        """The step's metrics under verl's names."""
        samples = result.frames["sample"].batch
        tokens = samples["attention_mask"].sum().item()
        response = samples["attention_mask"][:, samples["prompts"].shape[1] :].sum().item()
        phases = {**phase_seconds(result, loops=tuple(self.flows.flow("train", result.step).loops)), **self.timings}
        self.timings = {}
        metrics = Metrics()
        metrics.add("training/global_step", result.step, reduce="last")
        metrics.add("training/epoch", self.loader.epoch, reduce="last")
        metrics.merge(result.metrics)
        return metrics.merge(step_metrics(phases, int(response), int(tokens), seconds))

    def _on_event(self, node: str, event: str, info: dict[str, Any]) -> None:
        phase = phase_of(node)
        if event == "start":
            self.tracker.phase_started(phase)
        elif event == "rows" and phase == "gen":
            self.tracker.progress(phase, info["done"], info["total"])
        elif event == "end":
            self.tracker.phase_finished(phase, info["seconds"], info["rows"])

    def _show_samples(self, result: StepResult) -> None:
        """A few rows of the batch for the record, the user's own prompts, and the dump of all rows if asked for."""
        trainer = self.config.trainer
        rows = range(min(len(result.frames["sample"]), 8))
        self.tracker.run_dir.append_samples(
            sample_rows(result.frames, self.tokenizer, step=self.global_steps, split="train", rows=rows)
        )
        if trainer.rollout_data_dir:
            self.evaluation.dump(result.frames, trainer.rollout_data_dir, self.global_steps)
        if trainer.sample_prompts and trainer.sample_freq > 0 and self.global_steps % trainer.sample_freq == 0:
            shown = self.evaluation.preview(self.flows, self.global_steps)
            self.tracker.samples(shown, self.global_steps)

    # ---- between steps -------------------------------------------------------------------------------------------

    def validate(self) -> Metrics:
        """Score every validation row once; the metrics, with the seconds that it took."""
        started = time.perf_counter()
        self.tracker.phase_started("testing")
        metrics, shown = self.evaluation.validate(self.flows, self.global_steps)
        seconds = time.perf_counter() - started
        self.tracker.phase_finished("testing", seconds)
        metrics.add("timing_s/testing", seconds, reduce="sum")
        self.tracker.samples(shown, self.global_steps)
        return metrics

    _validate = validate  # verl's name

    def _validate_before(self) -> None:
        """Validation before the first step, at step 0; a resumed run has it on record already."""
        trainer = self.config.trainer
        wanted = trainer.val_only or (trainer.val_before_train and trainer.test_freq > 0 and self.global_steps == 0)
        if wanted and self.plan.validation is not None:
            self.metrics = self.validate().results()
            self.tracker.log(self.metrics, self.global_steps)

    def save(self) -> Path:
        """Write a checkpoint of the steps done."""
        started = time.perf_counter()
        self.tracker.phase_started("save_checkpoint")
        path = self.store.save(self.global_steps, lambda folder: save(self, folder), score=self.evaluation.score)
        self.timings["save_checkpoint"] = time.perf_counter() - started
        self.tracker.phase_finished("save_checkpoint", self.timings["save_checkpoint"])
        return path

    def _running(self) -> _Running:
        return _Running(self)

    def info(self) -> RunInfo:
        trainer = self.config.trainer
        return RunInfo(
            project=trainer.project_name,
            experiment=trainer.experiment_name,
            algorithm=self.config.algorithm.adv_estimator.upper(),
            model=str(self.config.actor_rollout_ref.model.path),
            device=self.plan.choice.device.described,
            total_steps=self.total_steps,
            resume_step=self.global_steps,
        )


class _Running:
    """The tracker is open, and in the end the report is written and workers are closed, however the run ends."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def __enter__(self) -> Tracker:
        t = self.trainer
        t.tracker = Tracker(
            t.config, t.config.trainer.logger, t.run_dir, t.info(), style=t.style, seed=t.config.trainer.seed,
            device=t.plan.choice.device.described,
        )  # fmt: skip
        t.tracker.start()
        return t.tracker

    def __exit__(self, kind, error, traceback) -> None:
        t = self.trainer
        if kind is None:
            t.tracker.finish()
        t.tracker.close()
        t.roles.close()
        if kind is None or t.global_steps:
            write_report(t.run_dir.path)
