"""What the ranks of test_checkpoint_sharded.py do; a module of its own, which their processes import."""

from __future__ import annotations

from typing import Any

import torch
from fsdp_programs import Case, make_worker, numbers, plan_of, recorded, share

from verl.checkpoint.pieces import PieceWriter, SavedPieces
from verl.comm import Comm
from verl.models.settings import LoraSettings, ModelSettings
from verl.train_engine.fsdp_export import StreamedExport
from verl.train_engine.optimizers import OptimizerSettings
from verl.workers.reward_model import RewardModelLearner, RewardModelSettings


def go_on(comm: Comm, case: Case, source: str | None, target: str | None, updates: int = 2) -> dict[str, Any]:
    """Load a state (if any), take some updates, save (if asked)."""
    worker = make_worker(case, comm)
    if source is not None:
        worker.load_state_dict(SavedPieces(source))
    batch = recorded(torch.float32)
    norms = []
    for _ in range(updates):
        norms.append(worker.update(*share(batch, plan_of(batch, 1), comm)).results()[f"{case.role}/grad_norm"])
    if target is not None:
        worker.write_state(PieceWriter(target, shard_bytes=20_000))
        comm.barrier()
    state = worker.engine.state_dict()
    return {
        "norms": norms,
        "state": numbers(state) if comm.rank == 0 else None,
        "lr": worker.engine.lr,
        "scheduled": worker.engine.scheduled_steps,
    }


def export(comm: Comm, case: Case, folder: str, shard_bytes: int) -> dict[str, Any]:
    """Write the Hugging Face folder after an update."""
    worker = make_worker(case, comm)
    batch = recorded(torch.float32)
    worker.update(*share(batch, plan_of(batch, 1), comm))
    if worker.engine.lockstep is None:
        worker.save_pretrained(folder)
        return {"most": None}
    streamed = StreamedExport(worker.engine.lockstep, shard_bytes=shard_bytes)
    streamed.save(worker.model, getattr(worker, "tokenizer", None), folder)
    return {"most": streamed.most_bytes}


def export_score(comm: Comm, case: Case, state: dict[str, Any] | None, folder: str) -> dict[str, torch.Tensor]:
    """Write the folder of a reward model with adapters, of a state, or (None) of weights that are drawn at random."""
    settings = RewardModelSettings(
        ModelSettings(case.folder, device="cpu", lora=LoraSettings(rank=4, alpha=8), gradient_checkpointing=False),
        OptimizerSettings(lr=1e-2, kind="sgd"),
        parallel=case.parallel,
    )
    worker = RewardModelLearner.create(comm, settings)
    if state is None:
        for number, p in enumerate(p for p in worker.model.parameters() if p.requires_grad):
            p.data.normal_(generator=torch.Generator().manual_seed(number))
        state = worker.state_dict()
    worker.load_state_dict(state)
    worker.save_pretrained(folder)
    return state
