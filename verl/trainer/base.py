"""The trainer: one loop, whatever the algorithm. What a step does is the dataflow's business."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from verl.checkpoint import CheckpointStore, only_run
from verl.config import Config, processes, to_dict
from verl.dataflow import Dataflow, FlowSet, OneStepOff
from verl.dataflow.executor import StepResult
from verl.dataflow.flow import Batch
from verl.errors import ConfigError
from verl.hardware import machine_memory_bytes
from verl.hardware.memory_watch import MemoryWatch, resident_bytes
from verl.metrics import Metrics
from verl.notices import notice
from verl.protocol import DataProto
from verl.tracking import RunDirectory, RunInfo, Tracker, step_metrics, write_report
from verl.trainer.build import Plan
from verl.trainer.evaluation import Evaluation
from verl.trainer.interrupts import steps_end_first, what_is_kept
from verl.trainer.phases import phase_of, phase_seconds
from verl.trainer.placement import devices_described
from verl.trainer.profiling import FOLDER, StepProfiler
from verl.trainer.recipe import Recipe, recipe_of
from verl.trainer.roles import Roles
from verl.trainer.runstate import check_maker, restore, save
from verl.trainer.samples import sample_rows
from verl.trainer.settings import algorithm_name

Callback = Callable[["Trainer", dict[str, float]], None]
ChangeFlow = Callable[[Dataflow, Roles], Dataflow]


class Trainer:
    """Trains what ``config`` describes.

    Args:
        config: as :func:`verl.config.load_config` gives it.
        train_rows, validation_rows: rows in memory in place of data files.
        style: of the console, see :class:`verl.tracking.Tracker`.
        callbacks: called after every step with the trainer and the step's metrics.
        change_flow: given the training step's dataflow and the roles, returns the dataflow to use: with a node more,
            or one less. What it returns is checked like any other. SFT steps in between are left as they are.
        stays_open: :meth:`fit` leaves the workers alive, so that one may go on with the trainer; :meth:`close` ends
            them.

    Attributes:
        global_steps: training steps done.
        total_steps: the step at which :meth:`fit` ends.
        metrics: of the last step.
        saved_steps: the last step of which there is a checkpoint, 0 before one.
        mid_step: a step has begun and was not finished, so the weights are between two steps.
    """

    def __init__(
        self,
        config: Config,
        *,
        train_rows: list[dict[str, Any]] | None = None,
        validation_rows: list[dict[str, Any]] | None = None,
        style: str = "auto",
        callbacks: tuple[Callback, ...] = (),
        change_flow: ChangeFlow | None = None,
        stays_open: bool = False,
    ):
        self.recipe: Recipe = recipe_of(config, train_rows=train_rows)
        self.plan: Plan = self.recipe.prepare(config, train_rows=train_rows, validation_rows=validation_rows)
        self.config = self.plan.config
        self.tokenizer, self.loader, self.total_steps = self.plan.tokenizer, self.plan.loader, self.plan.total_steps
        self.style, self.callbacks, self.stays_open = style, callbacks, stays_open
        self.tracker: Tracker | None = None  # while the run's record is open
        self.global_steps = 0
        self.timings: dict[str, float] = {}  # seconds spent between steps, told with the next one
        self.metrics: dict[str, float] = {}  # of the last step
        trainer = self.config.trainer
        self.run_dir = RunDirectory(trainer.default_local_dir)
        self.memory_watch = MemoryWatch(machine_memory_bytes())
        self.profiler = StepProfiler(
            trainer.profile_steps,
            Path(trainer.profile_dir or Path(trainer.default_local_dir) / FOLDER),
            cuda=self.plan.choice.device.kind == "cuda",
        )
        self._alone = contextlib.ExitStack()  # until close(): no other process may run in this folder
        self._alone.enter_context(only_run(self.run_dir.path))
        self.store = CheckpointStore(
            Path(trainer.default_local_dir), keep_last=trainer.max_actor_ckpt_to_keep, keep_best=trainer.keep_best
        )
        with contextlib.ExitStack() as undo:  # what fails here leaves no workers, and the folder free
            undo.callback(self._alone.close)
            self.resume_from = self.store.find(trainer.resume_mode, trainer.resume_from_path)
            if self.resume_from is not None:
                check_maker(self.config, self.resume_from)
            self.roles: Roles = self.recipe.roles(self.plan)
            undo.callback(self.roles.close)
            self._load(change_flow)
            undo.pop_all()

    def _load(self, change_flow: ChangeFlow | None) -> None:
        """Build the flows over the loaded roles, and go on from the checkpoint if there is one."""
        self.evaluation: Evaluation = self.recipe.evaluation(self.plan, self.roles)
        train = list(self.recipe.flows(self.plan, self.roles, self._draw_more))
        if change_flow is not None:
            train[0] = change_flow(train[0], self.roles)
        self.flows = FlowSet({"train": train, **self.evaluation.flows}, choose=self.recipe.choose)
        self.flows.validate(steps=range(1, min(self.total_steps, 256) + 1))
        self.pipeline: OneStepOff | None = None
        if self.config.trainer.schedule == "one_step_off":
            self.pipeline = OneStepOff(train[0], self._draw, self.sync_rollout)
        self.prompts_back: DataProto | None = None  # of a step that was begun and is taken anew
        if self.resume_from is not None:
            restore(self, self.resume_from)
        self.saved_steps, self.mid_step = self.global_steps, False

    # ---- the loop ----------------------------------------------------------------------------------------------

    def fit(self) -> dict[str, float]:
        """Train to the last step; returns the metrics of the last step. This is the only loop there is."""
        with self._running():
            self._validate_before()
            with steps_end_first() as interrupt:
                for step, batch in self._batches():
                    self._step(step, batch)
                    if interrupt.asked:
                        self._save_what_is_done()
                        interrupt.end()
        return self.metrics

    def train_step(self, batch: DataProto | None = None) -> StepResult:
        """One step by itself, of the next prompts or of ``batch``; the record stays open until :meth:`close`."""
        self.open()
        if batch is not None and self.pipeline is not None:
            raise ConfigError("trainer.schedule=one_step_off draws its prompts ahead: leave the batch out")
        return self._step(self.global_steps + 1, self._prompts() if batch is None else batch)

    def _step(self, step: int, batch: DataProto | None) -> StepResult:
        return self.run_flow(self.pipeline or self.flows.flow("train", step), batch, step, commit=True)

    def run_flow(self, flow: Dataflow | OneStepOff, batch: Batch, step: int, *, commit: bool) -> StepResult:
        """Run a flow whose scores count for this step, and with ``commit`` finish the step that it was."""
        started = time.perf_counter()
        self.mid_step = commit
        self.roles.begin_step()
        with self.profiler.step(step if commit else 0, self.config.trainer.executor) as executor:
            result = flow.run(batch, step, executor, self._on_event)
        self.mid_step = False
        self.roles.end_step()
        if commit:
            self._commit(result, time.perf_counter() - started)
        return result

    def _commit(self, result: StepResult, seconds: float) -> None:
        """The step is done: count it, and do what is due after it."""
        self.global_steps = step = result.step
        metrics = self._measure(result, seconds)
        if self._due(self.config.trainer.test_freq):
            metrics.merge(self.validate())
        self.metrics = metrics.results()
        assert self.tracker is not None
        self.tracker.log(self.metrics, step)
        self._show_samples(result)
        if self._due(self.config.trainer.save_freq, final=self.config.trainer.save_final):
            self.save()
        for callback in self.callbacks:
            callback(self, self.metrics)

    def fit_with_scores(self) -> tuple[float | None, float | None]:
        """:meth:`fit`, and the headline validation score before and after it (None where there is no validation)."""
        scores: list[float | None] = []
        self.evaluation.on_score = scores.append
        self.fit()
        return (scores[0], scores[-1]) if scores else (None, None)

    def describe(self) -> dict[str, Any]:
        """The model, its size, dtype and device, and the engine that generates."""
        return self.roles.describe()

    def _batches(self) -> Iterator[tuple[int, DataProto | None]]:
        """(global step, prompts) of every step that is left; None: its rows are there already."""
        if self.config.trainer.val_only:
            return
        if self.global_steps >= self.total_steps:
            notice(
                f"Nothing to do: step {self.global_steps} of {self.total_steps} is done already. More steps: raise "
                "trainer.total_epochs or trainer.total_training_steps; anew: trainer.resume_mode=disable."
            )
        for step in range(self.global_steps + 1, self.total_steps + 1):
            yield step, self._prompts()

    def _prompts(self) -> DataProto | None:
        if self.pipeline is not None and self.pipeline.pending is not None:
            return None
        back, self.prompts_back = self.prompts_back, None
        return self.loader.next_batch() if back is None else back

    def _draw(self, step: int) -> DataProto | None:
        """Prompts of a step whose rows are made ahead; None after the last step."""
        return self.loader.next_batch() if step <= self.total_steps else None

    def sync_rollout(self) -> None:
        """Send the present weights to a rollout that has a copy of its own."""
        version = self.flows.versions.get("actor.weights", 0)
        if self.roles.rollout is not None and self.roles.sent_version != version:
            with self._phase("send_weights"):
                self.roles.send_weights(version)

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
        held = resident_bytes()
        if growth := self.memory_watch.after_step(held):
            notice(growth)
        response, tokens = self.recipe.tokens(result)
        loops = tuple(name for flow in self.flows.flows["train"] for name in flow.loops)
        phases = {**phase_seconds(result, loops=loops), **self.timings}
        self.timings = {}
        metrics = Metrics()
        metrics.add("training/global_step", result.step, reduce="last")
        metrics.add("perf/process_memory_gb", held / 1024**3, reduce="max")
        metrics.add("training/epoch", self.loader.epoch, reduce="last")
        if result.lag is not None:
            metrics.add("training/rollout_staleness", result.lag, reduce="last")
        metrics.merge(result.metrics)
        return metrics.merge(step_metrics(phases, response, tokens, seconds, processes(self.config)))

    def _on_event(self, node: str, event: str, info: dict[str, Any]) -> None:
        self.profiler.event(node, event)
        phase, tracker = phase_of(node), self.tracker
        if tracker is None:
            return
        if event == "start":
            tracker.phase_started(phase)
        elif event == "rows" and phase == "gen":
            tracker.progress(phase, info["done"], info["total"])
        elif event == "end":
            tracker.phase_finished(phase, info["seconds"], info["rows"])

    @contextlib.contextmanager
    def _phase(self, phase: str) -> Iterator[None]:
        """Shown, where there is a record open, and told with the next step as ``timing_s/{phase}``."""
        started = time.perf_counter()
        if self.tracker is not None:
            self.tracker.phase_started(phase)
        yield
        self.timings[phase] = time.perf_counter() - started
        if self.tracker is not None:
            self.tracker.phase_finished(phase, self.timings[phase])

    def _show_samples(self, result: StepResult) -> None:
        """A few rows of the batch for the record, the user's own prompts, and the dump of all rows if asked for."""
        trainer = self.config.trainer
        assert self.tracker is not None
        sampled = self.recipe.sampled(result)
        if sampled:
            rows = range(min(len(result.frames["sample"]), 8))
            self.tracker.run_dir.append_samples(
                sample_rows(result.frames, self.tokenizer, step=self.global_steps, split="train", rows=rows)
            )
        if sampled and trainer.rollout_data_dir:
            self.evaluation.dump(result.frames, trainer.rollout_data_dir, self.global_steps)
        if trainer.sample_prompts and trainer.sample_freq > 0 and self.global_steps % trainer.sample_freq == 0:
            self.sync_rollout()
            shown = self.evaluation.preview(self.flows, self.global_steps)
            self.tracker.samples(shown, self.global_steps)

    # ---- between steps -------------------------------------------------------------------------------------------

    def validate(self) -> Metrics:
        """Score every validation row once; the metrics, with the seconds that it took."""
        if self.plan.validation is None:
            raise ConfigError("there is nothing to validate on: set data.val_files")
        self.sync_rollout()
        with self._phase("testing"):
            metrics, shown = self.evaluation.validate(self.flows, self.global_steps)
        metrics.add("timing_s/testing", self.timings.pop("testing"), reduce="sum")
        if self.tracker is not None:
            self.tracker.samples(shown, self.global_steps)
        return metrics

    _validate = validate  # verl's name

    def _validate_before(self) -> None:
        """Validation before the first step, at step 0; a resumed run has it on record already."""
        trainer = self.config.trainer
        wanted = trainer.val_only or (trainer.val_before_train and trainer.test_freq > 0 and self.global_steps == 0)
        if wanted and self.plan.validation is not None:
            self.metrics = self.validate().results()
            assert self.tracker is not None
            self.tracker.log(self.metrics, self.global_steps)

    def save(self) -> Path:
        """Write a checkpoint of the steps done."""
        with self._phase("save_checkpoint"):
            path = self.store.save(self.global_steps, lambda folder: save(self, folder), score=self.evaluation.score)
        self.saved_steps = self.global_steps
        return path

    def _save_what_is_done(self) -> None:
        """At an end before the last step: what a run that saves at its end would save."""
        if self.config.trainer.save_final and self.saved_steps < self.global_steps:
            self.save()

    def info(self) -> RunInfo:
        trainer = self.config.trainer
        return RunInfo(
            project=trainer.project_name,
            experiment=trainer.experiment_name,
            algorithm=algorithm_name(self.config),
            model=str(self.config.actor_rollout_ref.model.path),
            device=devices_described(self.config, self.plan.choice),
            total_steps=self.total_steps,
            resume_step=self.global_steps,
        )

    # ---- the run's record ----------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin the record, if it is not open."""
        if self.tracker is None:
            self.tracker = Tracker(
                to_dict(self.config), self.config.trainer.logger, self.run_dir, self.info(), style=self.style,
                seed=self.config.trainer.seed, device=self.plan.choice.device.described,
            )  # fmt: skip
            self.tracker.start()

    def close(self) -> None:
        """End the record, with its report, and the workers. A second call does nothing."""
        self._end_record(completed=False)
        self.roles.close()
        self._alone.close()

    def _end_record(self, *, completed: bool) -> None:
        tracker, self.tracker = self.tracker, None
        if tracker is None:
            return
        if completed:
            tracker.finish()
        tracker.close()
        if completed or self.global_steps:
            write_report(self.run_dir.path)

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """The record is open; it and the workers are ended however the run ends, unless they were there before."""
        before, completed = self.tracker, False
        self.open()
        try:
            yield
            completed = True
        except KeyboardInterrupt as error:
            error.args = error.args or (what_is_kept(self),)
            raise
        finally:
            if before is None:
                self._end_record(completed=completed)
            if not self.stays_open:
                self.close()
