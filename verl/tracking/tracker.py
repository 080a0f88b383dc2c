"""One object that the trainer tells everything: it passes metrics, samples, phases and notices on to the loggers."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, TextIO

from verl.errors import ConfigError, VerlError
from verl.notices import add_sink, seen
from verl.tracking.diagnosis import Watch
from verl.tracking.jsonl import number
from verl.tracking.loggers import BUILDERS, check_names
from verl.tracking.loggers.base import Console, Logger, RunInfo
from verl.tracking.loggers.console import LineConsole, RLTrainerConsole, VerlStepsConsole
from verl.tracking.loggers.files import RecordLogger
from verl.tracking.plain import plain_config
from verl.tracking.run_dir import RunDirectory

STYLES = ("auto", "live", "line", "verl_steps", "rl_trainer")


def make_console(style: str, info: RunInfo, stream: TextIO) -> Console:
    """The console of a style.

    ``auto`` is ``live`` in an interactive terminal or a notebook and ``line`` elsewhere; ``live`` in a pipe or a
    notebook is one short line a step;
    ``line`` is verl's ``step:N - key:value``; ``verl_steps`` and ``rl_trainer`` are ``[INFO]`` lines of the phases.
    """
    if style not in STYLES:
        raise ConfigError(f"unknown console style {style!r}; there are {', '.join(STYLES)}")
    if style in ("auto", "live"):
        from verl.tracking.live import LiveConsole, in_notebook, is_interactive

        for_people = style == "live" or is_interactive(stream) or in_notebook()
        return LiveConsole(info, stream) if for_people else LineConsole(info, stream)
    return {"line": LineConsole, "verl_steps": VerlStepsConsole, "rl_trainer": RLTrainerConsole}[style](info, stream)


class Tracker:
    """Passes a run's record on to the run folder (always), the console and the other loggers.

    A logger that fails never stops training: the first failure is a notice, and after ``max_failures`` in a row that
    logger is dropped with another. The run folder's own files are never dropped: what a full disk refuses is kept and
    written later. Use it as a context manager, so that the terminal is given back when training raises.

    Args:
        config: the resolved config (mapping, dataclass or OmegaConf); written to ``config.yaml``, secrets hidden.
        loggers: ``trainer.logger``, a name or a list of :data:`verl.tracking.loggers.NAMES`.
        run_dir: the run's folder.
        info: names and sizes for headings; its ``config`` and ``folder`` are filled in here. With ``resume_step`` the
            records after that step are cut off first; without, an earlier run's record in the folder is set aside.
        style: see :func:`make_console`; used when "console" is among the loggers.
        seed, device: recorded in ``environment.json``.
    """

    def __init__(
        self,
        config: Any,
        loggers: str | Sequence[str],
        run_dir: RunDirectory,
        info: RunInfo | None = None,
        *,
        style: str = "auto",
        stream: TextIO | None = None,
        seed: int | None = None,
        device: Any = None,
        max_failures: int = 3,
    ):
        names = check_names(loggers)
        self.run_dir = run_dir
        self.info = dataclasses.replace(info or RunInfo(), config=plain_config(config), folder=run_dir.path)
        self._max_failures = max_failures
        self._failures: dict[str, int] = {}
        self._watch = Watch()
        self._console: Console | None = None
        if "console" in names:
            self._console = make_console(style, self.info, stream or sys.stdout)
        if self.info.resume_step:
            run_dir.truncate_after(self.info.resume_step)
        else:
            run_dir.set_earlier_run_aside()
        for text in seen():  # said before there was a run folder
            run_dir.append_notice(text)
        self._remove_sink = add_sink(self.notice)
        self._loggers: list[Logger] = [RecordLogger(run_dir)]
        try:
            run_dir.write_config(self.info.config)
            run_dir.write_environment(seed, device or self.info.device or None, self.info.resume_step or None)
            self._loggers += [self._build(name) for name in names if name in BUILDERS]
        except BaseException:
            self.close()
            raise
        if self._console is not None:
            self._loggers.append(self._console)

    def _build(self, name: str) -> Logger:
        try:
            return BUILDERS[name](self.info)
        except VerlError:
            raise
        except Exception as error:
            raise VerlError(
                f"the logger '{name}' could not start ({type(error).__name__}: {error}); "
                f"put that right (log in, or its offline mode) or take '{name}' out of trainer.logger"
            ) from error

    # -- the record -----------------------------------------------------------------------------------------------
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of ``step`` (a :class:`verl.metrics.Metrics` or a dict of numbers) everywhere.

        What they show to go wrong is said once (:mod:`verl.tracking.diagnosis`).
        """
        plain = {}
        for name, value in metrics.items():
            plain[name] = number(value) if isinstance(value, (bool, int, float)) else float(value)
        for logger in list(self._loggers):
            self._guarded(logger, lambda logger=logger: logger.log(plain, step))
        for finding in self._watch.observe(step, plain):
            self.notice(finding.text)

    def samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Record and show sample generations (rows of :func:`verl.tracking.samples.sample_row`)."""
        if rows:
            for logger in list(self._loggers):
                self._guarded(logger, lambda logger=logger: logger.samples(rows, step))

    def notice(self, text: str) -> None:
        """One line on the console and in ``notices.txt``. :func:`verl.notices.notice` arrives here too."""
        try:
            self.run_dir.append_notice(text)
        except OSError as error:
            self._say(f"notices.txt could not be written: {error}")
        self._say(text)

    def _say(self, text: str) -> None:
        """To the console, or, with no console (any more), to standard error."""
        if self._console is not None:
            try:
                self._console.notice(text)
                return
            except (OSError, ValueError):  # the reader of the pipe has gone, or the stream is closed
                self._console = None
        print(f"[notice] {text}", file=sys.stderr, flush=True)

    # -- the course of a step --------------------------------------------------------------------------------------
    def start(self) -> None:
        """Training begins: the console shows itself."""
        self._to_console(lambda console: console.start())

    def phase_started(self, phase: str, samples: int | None = None) -> None:
        """``phase`` by verl's timing name: gen, reward, old_log_prob, ref, values, adv, update_critic, ..."""
        self._to_console(lambda console: console.phase_started(phase, samples))

    def progress(self, phase: str, done: int, total: int) -> None:
        """``done`` of ``total`` rows of a running phase are finished."""
        self._to_console(lambda console: console.progress(phase, done, total))

    def phase_finished(self, phase: str, seconds: float, samples: int | None = None) -> None:
        self._to_console(lambda console: console.phase_finished(phase, seconds, samples))

    @contextmanager
    def phase(self, phase: str, samples: int | None = None) -> Iterator[None]:
        """Both of the above around a block, for whoever does not measure the time already."""
        self.phase_started(phase, samples)
        start = perf_counter()
        yield
        self.phase_finished(phase, perf_counter() - start, samples)

    def finish(self) -> None:
        """The last step is done."""
        self._to_console(lambda console: console.finish())

    def close(self) -> None:
        """Close every logger and give the terminal back; a second call does nothing."""
        loggers, self._loggers = self._loggers, []
        for logger in reversed(loggers):  # the console first: what the others say then is not drawn over
            try:
                logger.close()
            except Exception as error:
                self.notice(f"closing the logger '{logger.name}' failed: {type(error).__name__}: {error}")
        self._remove_sink()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- failures -------------------------------------------------------------------------------------------------
    def _to_console(self, call: Callable[[Console], None]) -> None:
        console = self._console
        if console is not None and console in self._loggers:
            self._guarded(console, lambda: call(console))

    def _guarded(self, logger: Logger, call: Callable[[], None]) -> None:
        """Run one logger's method; a failure (network, full disk) is said and counted and does not stop the run."""
        try:
            call()
        except Exception as error:
            self._failed(logger, error)
        else:
            self._failures.pop(logger.name, None)

    def _failed(self, logger: Logger, error: Exception) -> None:
        failures = self._failures[logger.name] = self._failures.get(logger.name, 0) + 1
        record = isinstance(logger, RecordLogger)
        if failures >= self._max_failures and not record:
            self._loggers.remove(logger)
            if logger is self._console:
                self._console = None
            self.notice(
                f"the logger '{logger.name}' failed {failures} times in a row and gets nothing any more ({error})"
            )
        elif failures == 1:
            kept = "; the rows are kept in memory and written when it works again" if record else ""
            self.notice(f"the logger '{logger.name}' failed: {type(error).__name__}: {error}{kept}")
