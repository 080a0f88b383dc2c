"""What the ranks of test_train_engine_pending.py do; a module of its own, which their processes import."""

from __future__ import annotations

from typing import Any

import torch
from fsdp_programs import Case, make_worker, numbers, plan_of, recorded, share

from verl import notices
from verl.comm import Comm
from verl.errors import ModelError
from verl.models import pending
from verl.models.settings import ModelSettings
from verl.workers.reference import Reference
from verl.workers.settings import ReferenceSettings


def _watched() -> list[pending.PendingWeights]:
    """Every place that weights are read from, from now on."""
    made: list[pending.PendingWeights] = []
    inner = pending.PendingWeights.__init__

    def noted(self, *args) -> None:
        inner(self, *args)
        made.append(self)

    pending.PendingWeights.__init__ = noted
    return made


def loaded(comm: Comm, case: Case) -> dict[str, Any]:
    """The state right after loading and after an update, and what was read."""
    made = _watched()
    worker = make_worker(case, comm)
    start = numbers(worker.engine.state_dict())
    batch = recorded(torch.float32)
    worker.update(*share(batch, plan_of(batch, 2), comm))
    state = numbers(worker.engine.state_dict())
    names = {id(p) for p in worker.model.parameters()}
    return {
        "start": start,
        "state": state,
        "read": [one.read_bytes for one in made],
        "left": len(pending._PENDING),
        "attention": worker.model.config._attn_implementation,
        "eos": worker.model.generation_config.eos_token_id,
        "parameters": len(names),
        "devices": {p.device.type for p in worker.model.parameters()} | {b.device.type for b in worker.model.buffers()},
        "notices": [text for text in notices.seen() if "Every process loads" in text],
    }


def reference(comm: Comm, case: Case, dtype: str) -> dict[str, Any]:
    """The weights of a frozen model that is spread, in the type that computes."""
    made = _watched()
    worker = Reference.create(comm, ReferenceSettings(ModelSettings(case.folder, dtype=dtype), parallel=case.parallel))
    whole = {name: worker.lockstep.whole(name).float().numpy() for name in worker.lockstep.shapes}
    return {"weights": whole, "read": [one.read_bytes for one in made], "live": str(worker.lockstep.live_dtype)}


def refused(comm: Comm, case: Case) -> str:
    try:
        make_worker(case, comm)
    except ModelError as error:
        return str(error)
    return ""
