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
from verl.config import Config, family
from verl.dataflow.ahead import input_rows
from verl.errors import CheckpointError, VerlError
from verl.notices import notice
from verl.trainer.settings import algorithm_name

if TYPE_CHECKING:
    from verl.trainer.base import Trainer

STATE_FOLDER = "train_state"
AHEAD = "ahead"  # prefix of the rows that were made ahead of their step
_ANEW = (
    "Start anew with trainer.resume_mode=disable, or give this run a folder of its own with trainer.default_local_dir."
)


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
        "made_by": _maker(trainer.config),
    }
    pending = (trainer.pipeline.state_dict() if trainer.pipeline is not None else None) or {}
    frames = pending.pop("frames", {})
    extra["ahead"] = pending or None
    write_state(folder / STATE_FOLDER, tensors, extra)
    protos = {f"{name}.{frame}": batch for name, state in loops.items() for frame, batch in state["frames"].items()}
    protos |= {f"{AHEAD}.{frame}": rows for frame, rows in frames.items()}
    write_protos(folder / STATE_FOLDER, protos)


def save_elsewhere(trainer: Trainer, directory: str | Path) -> Path:
    """Write a checkpoint of the steps done into a folder that is not the run's own; the checkpoint's folder."""
    return CheckpointStore(directory).save(trainer.global_steps, lambda folder: save(trainer, folder))


def _maker(config: Config) -> dict[str, str]:
    """What a checkpoint of this run is: the kind of training and what is minimised; ``name`` is for people."""
    kind = family(config)
    loss, name = "", algorithm_name(config).lower()
    if kind in ("preference", "online_preference"):
        loss = config.preference.loss_type
        name += f" with preference.loss_type={loss}"
    if config.sft.train_files:
        name += " with SFT steps between (sft.train_files)"
    model = str(config.actor_rollout_ref.model.path)
    estimator = f"algorithm.adv_estimator={config.algorithm.adv_estimator}" if kind == "ppo" else ""
    return {
        "kind": kind + ("+sft" if config.sft.train_files else ""),
        "loss": loss,
        "name": name,
        "estimator": estimator,
        "model": str(Path(model).resolve()) if Path(model).exists() else model,
    }


def check_maker(config: Config, folder: Path) -> None:
    """Before a model is loaded: that the checkpoint was made by a run of this kind, with this loss.

    The moments of the optimizer and the place in the data are those of that run, so another kind cannot go on with
    them. Estimators of one kind may follow each other, with a notice. Checkpoints from before this was kept say
    nothing.

    Raises:
        CheckpointError: it was made by another kind of run, or with another preference loss.
    """
    made, mine = read_state(folder / STATE_FOLDER)[1].get("made_by"), _maker(config)
    if not isinstance(made, dict):
        return
    if any(made.get(item) != mine[item] for item in ("kind", "loss")):
        raise CheckpointError(
            f"{folder} was made by {made.get('name')}, and this run is {mine['name']}: it cannot go on with that run's "
            "optimizer and place in the data. Give it a folder of its own (trainer.default_local_dir), to begin from "
            f"those weights with actor_rollout_ref.model.path={folder / 'actor'}; or start anew here with "
            "trainer.resume_mode=disable."
        )
    if made.get("estimator") != mine["estimator"]:
        notice(
            f"The checkpoint was made with {made.get('estimator')}; the run goes on with {mine['estimator']}, its "
            "weights and its optimizer."
        )
    if made.get("model") != mine["model"]:
        notice(
            f"The checkpoint's run began from {made.get('model')}; actor_rollout_ref.model.path={mine['model']} gives "
            "way to the checkpoint's weights (trainer.resume_mode=disable begins from it)."
        )


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
                    f"{folder} has no {name}, but this run trains one; was it made by another algorithm? {_ANEW}"
                )
            try:
                group.load_state_dict(mine)
            except VerlError as error:
                raise CheckpointError(f"{folder} cannot be resumed from: {error} {_ANEW}") from error
    trainer.loader.load_state_dict(extra["loader"])
    for name, kept in trainer.recipe.memory(trainer.roles).items():
        if name not in extra:
            raise CheckpointError(
                f"{folder} has no {name}, which this run needs; was it made by another algorithm? {_ANEW}"
            )
        kept.load_state_dict(extra[name])
    rng.restore({k.removeprefix("rng/"): v for k, v in tensors.items() if k.startswith("rng/")}, extra["rng"])
    trainer.flows.versions.update(extra["versions"])
    _restore_loops(trainer, folder, extra["loops"])
    _restore_ahead(trainer, folder, extra.get("ahead"))
    trainer.evaluation.score = extra["best_score"]
    trainer.global_steps, trainer.metrics = extra["global_step"], extra["metrics"]
    differences = environment_differences(extra["runtime"], runtime_facts())
    if differences:
        notice(f"Resuming is not bit for bit here, because these differ from the checkpoint: {'; '.join(differences)}.")
    notice(f"Resuming from {folder} after step {step_of(folder)}.")


def _restore_ahead(trainer: Trainer, folder: Path, pending: dict[str, Any] | None) -> None:
    """The rows of the next step, if they were made already; without that schedule their prompts are used again."""
    if pending is None:
        return
    protos = read_protos(folder / STATE_FOLDER)
    frames = {name.removeprefix(f"{AHEAD}."): rows for name, rows in protos.items() if name.startswith(f"{AHEAD}.")}
    if trainer.pipeline is not None:
        trainer.pipeline.load_state_dict({**pending, "frames": frames})
        return
    trainer.prompts_back = input_rows(trainer.flows.flow("train", trainer.global_steps + 1), frames)
    notice(
        f"{folder} has the rollout of step {pending['step']}, made ahead (trainer.schedule=one_step_off); here its "
        "prompts are answered anew, by the present weights."
    )


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
