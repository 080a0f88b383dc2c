"""What a checkpoint of a run holds, and putting it back: resuming equals never having stopped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl.checkpoint import (
    CheckpointStore,
    environment_differences,
    read_protos,
    read_state,
    rng,
    runtime_facts,
    step_of,
    write_protos,
    write_state,
)
from verl.checkpoint.pieces import PieceWriter, SavedPieces
from verl.errors import CheckpointError, VerlError
from verl.notices import notice

if TYPE_CHECKING:
    from verl.trainer.base import Trainer

STATE_FOLDER = "train_state"


def save(trainer: Trainer, folder: Path) -> None:
    """Write everything into ``folder``: HF folders for people, ``train_state`` for resuming."""
    tensors = {}
    for name, group in trainer.recipe.trained(trainer.roles).items():
        if group is not None:
            (folder / name).mkdir()
            group.save_pretrained(str(folder / name))
            group.write_state(PieceWriter(folder / STATE_FOLDER / name))
    random_tensors, random_state = rng.capture()
    tensors |= {f"rng/{key}": value for key, value in random_tensors.items()}
    loops = _loop_states(trainer)
    extra: dict[str, Any] = {
        "global_step": trainer.global_steps,
        "loader": trainer.loader.state_dict(),
        **{name: kept.state_dict() for name, kept in trainer.recipe.memory(trainer.roles).items()},
        "rng": random_state,
        "versions": dict(trainer.flows.versions),
        "loops": {name: state["versions"] for name, state in loops.items()},
        "best_score": trainer.evaluation.score,
        "metrics": trainer.metrics,
        "runtime": runtime_facts(),
    }
    write_state(folder / STATE_FOLDER, tensors, extra)
    protos = {f"{name}.{frame}": batch for name, state in loops.items() for frame, batch in state["frames"].items()}
    write_protos(folder / STATE_FOLDER, protos)


def save_elsewhere(trainer: Trainer, directory: str | Path) -> Path:
    """Write a checkpoint of the steps done into a folder that is not the run's own; the checkpoint's folder."""
    return CheckpointStore(directory).save(trainer.global_steps, lambda folder: save(trainer, folder))


def restore(trainer: Trainer, folder: Path) -> None:
    """Put a checkpoint back into the freshly built run.

    Raises:
        CheckpointError: it was made by another kind of run (other roles, another model), or is damaged.
    """
    try:
        _restore(trainer, folder)
    except VerlError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder} cannot be resumed from: something in its {STATE_FOLDER} is missing or not as it should be "
            f"({type(error).__name__}: {error}); resume from an older checkpoint, or start anew with "
            "trainer.resume_mode=disable"
        ) from error


def _restore(trainer: Trainer, folder: Path) -> None:
    tensors, extra = read_state(folder / STATE_FOLDER)
    for name, group in trainer.recipe.trained(trainer.roles).items():
        if group is not None:
            mine = _state_of(name, folder, tensors)
            if not mine:
                raise CheckpointError(
                    f"{folder} has no {name}, but this run trains one; was it made by another algorithm?"
                )
            try:
                group.load_state_dict(mine)
            except VerlError as error:
                raise CheckpointError(
                    f"{folder} cannot be resumed from: {error} Start anew with trainer.resume_mode=disable, or give "
                    "this run a folder of its own with trainer.default_local_dir."
                ) from error
    trainer.loader.load_state_dict(extra["loader"])
    for name, kept in trainer.recipe.memory(trainer.roles).items():
        if name not in extra:
            raise CheckpointError(
                f"{folder} has no {name}, which this run needs; was it made by another algorithm? Start anew with "
                "trainer.resume_mode=disable, or give this run a folder of its own with trainer.default_local_dir."
            )
        kept.load_state_dict(extra[name])
    rng.restore({k.removeprefix("rng/"): v for k, v in tensors.items() if k.startswith("rng/")}, extra["rng"])
    trainer.flows.versions.update(extra["versions"])
    _restore_loops(trainer, folder, extra["loops"])
    trainer.evaluation.score = extra["best_score"]
    trainer.global_steps, trainer.metrics = extra["global_step"], extra["metrics"]
    differences = environment_differences(extra["runtime"], runtime_facts())
    if differences:
        notice(f"Resuming is not bit for bit here, because these differ from the checkpoint: {'; '.join(differences)}.")
    notice(f"Resuming from {folder} after step {step_of(folder)}.")


def _state_of(name: str, folder: Path, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """The state of one role; in checkpoints from before roles wrote their own it lies among the run's tensors."""
    if (folder / STATE_FOLDER / name).is_dir():
        return SavedPieces(folder / STATE_FOLDER / name)
    return {key.removeprefix(f"{name}/"): value for key, value in tensors.items() if key.startswith(f"{name}/")}


def _loop_states(trainer: Trainer) -> dict[str, dict[str, Any]]:
    return {name: loop.state_dict() for flow in trainer.flows.flows["train"] for name, loop in flow.loops.items()}


def _restore_loops(trainer: Trainer, folder: Path, versions: dict[str, Any]) -> None:
    protos = read_protos(folder / STATE_FOLDER)
    for flow in trainer.flows.flows["train"]:
        for name, loop in flow.loops.items():
            frames = {
                key.removeprefix(f"{name}."): batch for key, batch in protos.items() if key.startswith(f"{name}.")
            }
            loop.load_state_dict({"frames": frames, "versions": versions.get(name, {})})
