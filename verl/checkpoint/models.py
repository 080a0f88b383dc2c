"""Which model a person means by a path: a run folder, a step, an actor folder, a Hugging Face folder, or a hub name."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from verl.checkpoint.layout import ACTOR, is_step_name, step_folders, step_name, step_of
from verl.checkpoint.manifest import Manifest, read_complete
from verl.errors import CheckpointError
from verl.notices import notice

STEPS = ("last", "best")


@dataclass(frozen=True)
class ModelSource:
    """A model that can be loaded, and where it comes from.

    Attributes:
        path: a Hugging Face folder, or a name on the hub.
        run: the folder of the run that made it; None for other models.
        step, score: of its checkpoint, where there is one.
    """

    path: str
    run: Path | None = None
    step: int | None = None
    score: float | None = None


def locate_model(path: str | Path, step: str | int | None = None) -> ModelSource:
    """Find the model that ``path`` means.

    Args:
        path: a run folder, ``global_step_N``, its ``actor``, the link ``actor/global_step_N``, any Hugging Face folder,
            or a hub name.
        step: of a run folder: "last" (the default), "best" (by validation score) or a number.

    Raises:
        CheckpointError: the folder holds no complete checkpoint, or not that step.
    """
    given = Path(os.path.expandvars(path)).expanduser()
    if not given.is_dir():
        if step is not None:
            raise CheckpointError(f"{path} is not a folder here, so it has no step {step}.")
        return ModelSource(str(path))  # a hub name, or a mistake that loading explains
    folder = given.resolve()  # the link actor/global_step_N leads to the checkpoint
    if folder.name == ACTOR and not (folder / "config.json").is_file() and step_folders(folder.parent):
        folder = folder.parent  # RUN/actor, which holds the links
    if is_step_name(folder.name) and (folder / ACTOR).is_dir():
        return _of_step(folder, step)
    if (folder / "config.json").is_file():
        made_by_run = folder.name == ACTOR and is_step_name(folder.parent.name)
        if made_by_run:
            return _of_step(folder.parent, step)
    elif step_folders(folder):
        return _of_run(folder, "last" if step is None else step)
    if step is not None:
        raise CheckpointError(f"{given} has no steps: it is not a run folder, so there is no step {step}.")
    return ModelSource(str(given))


def _of_step(folder: Path, step: str | int | None) -> ModelSource:
    if step is not None and str(step) != str(step_of(folder)):
        raise CheckpointError(f"{folder} is one step; give the run's folder {folder.parent} to choose step {step}.")
    return _source(folder, read_complete(folder))


def _source(folder: Path, manifest: Manifest) -> ModelSource:
    actor = folder / ACTOR
    if not (actor / "config.json").is_file():
        raise CheckpointError(f"{folder} holds no policy: it has no {ACTOR}/config.json.")
    return ModelSource(str(actor), folder.parent, manifest.step, manifest.score)


def _of_run(folder: Path, step: str | int) -> ModelSource:
    manifests: dict[int, Manifest] = {}
    problems = []
    for number, place in step_folders(folder).items():
        try:
            manifests[number] = read_complete(place)
        except CheckpointError as error:
            problems.append(str(error))
    if not manifests:
        raise CheckpointError(f"{folder} holds no complete checkpoint: {problems[0]}.")
    chosen = _choose(folder, manifests, str(step))
    newest = max(step_folders(folder))
    if step == "last" and newest > chosen and newest not in manifests:
        notice(f"{problems[-1]}; global_step_{chosen} is used instead.")
    return _source(folder / step_name(chosen), manifests[chosen])


def _choose(folder: Path, manifests: dict[int, Manifest], step: str) -> int:
    if step == "last":
        return max(manifests, key=lambda number: (manifests[number].save_number, number))
    if step == "best":
        scored = {number: manifest.score for number, manifest in manifests.items() if manifest.score is not None}
        if not scored:
            raise CheckpointError(
                f"No checkpoint in {folder} has a validation score, so none is the best; give a step."
            )
        return max(scored, key=lambda number: (scored[number], manifests[number].save_number))
    if step.isdecimal() and int(step) in manifests:
        return int(step)
    there = ", ".join(map(str, sorted(manifests)))
    raise CheckpointError(f"There is no complete step '{step}' in {folder}; there are {there}, and last and best.")
