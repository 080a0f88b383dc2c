"""Going on from the last checkpoint when a process died, as often as the configuration allows."""

from __future__ import annotations

import copy
from collections.abc import Callable

from verl.config import Config
from verl.errors import WorkerDiedError
from verl.notices import notice
from verl.trainer.base import Trainer


def fit_with_restarts(config: Config, make: Callable[[Config], Trainer] = Trainer) -> Trainer:
    """Train to the end; ``trainer.max_restarts`` times a run whose process died goes on where it last saved.

    Args:
        config: as loaded.
        make: a trainer of a configuration, for runs that need more than that.

    Raises:
        WorkerDiedError: a process died once more than that.
    """
    restarts, saved = 0, False
    while True:
        trainer = None
        attempt = copy.deepcopy(config)
        if saved:
            attempt.trainer.resume_mode = "auto"
        try:
            trainer = make(attempt)
            trainer.fit()
            return trainer
        except WorkerDiedError as error:
            saved = saved or (trainer is not None and trainer.saved_steps > 0)
            if restarts == config.trainer.max_restarts:
                raise
            restarts += 1
            after = f"after step {trainer.saved_steps}" if trainer is not None and saved else "at its beginning"
            notice(
                f"{error}\nRestart {restarts} of {config.trainer.max_restarts} (trainer.max_restarts): the run goes on "
                f"{after}.",
                key=f"restart {restarts}",
            )
