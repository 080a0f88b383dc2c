"""What the ranks of test_hybrid_split.py do; a module of its own, which their processes import."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from fsdp_programs import Case, make_worker
from hybrid_programs import update
from torch.utils._python_dispatch import TorchDispatchMode

from verl.comm import Comm
from verl.errors import VerlError
from verl.protocol import DataProto
from verl.rollout.base import SamplingParams

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16], [20, 21], [30] * 7]
KINDS = {
    "greedy": SamplingParams(max_tokens=12, temperature=0),
    "seeded": SamplingParams(max_tokens=12, temperature=1.0),
    "long": SamplingParams(max_tokens=40, temperature=1.0, ignore_eos=True),
    "filtered": SamplingParams(max_tokens=12, temperature=0.8, top_k=20, top_p=0.9, stop_token_ids=(7, 8, 9)),
}


def rows_of(comm: Comm, tag: str) -> DataProto:
    """This rank's prompts: with 5 prompts some ranks have more than others."""
    mine = [i for i in range(len(PROMPTS)) if i % comm.world_size == comm.rank]
    rows = np.empty(len(mine), dtype=object)
    rows[:] = [np.array(PROMPTS[i]) for i in mine]
    names = np.array([f"{tag}-{i}" for i in mine], dtype=object)
    return DataProto.from_dict(tensors={}, non_tensors={"prompt_ids": rows, "uid": names})


def generate(worker: Any, comm: Comm, kind: str, tag: str = "0") -> dict[str, tuple[np.ndarray, np.ndarray, str]]:
    """(tokens, log-probs, finish reason) of this rank's responses, by name."""
    found = {}
    for piece in worker.generate(rows_of(comm, f"{kind}{tag}"), n=3, sampling=KINDS[kind], prompt_width=7):
        for row, name in enumerate(piece.non_tensor_batch["sample_id"]):
            count = int(piece.batch["response_mask"][row].sum())
            assert name not in found
            tokens, log_probs = (piece.batch[key][row, :count].numpy() for key in ("responses", "rollout_log_probs"))
            found[name] = tokens.copy(), log_probs.copy(), str(piece.non_tensor_batch["finish_reason"][row])
    return found


def rollouts(comm: Comm, case: Case) -> dict[str, Any]:
    """Every kind of sampling before and after an update, and what lies where."""
    worker = make_worker(case, comm)
    texts, addresses = {}, set()
    for cycle in range(2):
        for kind in ("greedy", "seeded", "filtered"):
            texts |= generate(worker, comm, kind, str(cycle))
        addresses.add(tuple(p.data_ptr() for p in worker.hybrid.twin.parameters()))
        update(worker, comm)
    tied = worker.hybrid.twin.get_input_embeddings().weight is worker.hybrid.twin.get_output_embeddings().weight
    return {
        "texts": texts,
        "tied": tied,
        "engine": worker.hybrid.engine_name,
        "addresses": len(addresses),
    }


class _Allocated(TorchDispatchMode):
    """Sizes of the tensors that operations make, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in known:
            self.sizes.append(out.nbytes)
        return out


def memory(comm: Comm, case: Case) -> dict[str, Any]:
    """What lies in the arena, and what a fill takes besides."""
    worker = make_worker(case, comm)
    arena = worker.hybrid.arena
    shapes = {name: p.numel() * p.element_size() for name, p in arena.parameters.items()}
    with _Allocated() as made:
        arena.fill()
    sharded = worker.engine.lockstep
    whole = {name: int(np.prod(shape)) * sharded.live_dtype.itemsize for name, shape in sharded.shapes.items()}
    units = [sum(whole[name] for name in unit) for unit in sharded.units]
    return {
        "arena": arena.nbytes,
        "slots": sum(shapes.values()),
        "sent": arena.most_sent,
        "made": sum(made.sizes),
        "largest": max(made.sizes),
        "whole": sum(whole.values()),
        "unit": max(units),
        "tensor": max(whole.values()),
    }


def parts(comm: Comm, case: Case) -> dict[str, Any]:
    """The slots after an update, and the whole weights as FSDP has them."""
    worker = make_worker(case, comm)
    update(worker, comm)
    with worker.hybrid.rollout_mode():
        slots = {name: p.detach().clone().numpy() for name, p in worker.hybrid.arena.parameters.items()}
    whole = {name: worker.engine.lockstep.whole(name).clone().numpy() for name in worker.engine.lockstep.shapes}
    return {"slots": slots, "whole": whole}


def preempted(comm: Comm, case: Case) -> dict[str, Any]:
    """Rows written while pages are short, and how often one was put off, as told by each rank."""
    worker = make_worker(case, comm)
    engine = worker.hybrid._engine
    inner = getattr(engine, "inner", engine)
    if inner is not engine:
        inner.settings = dataclasses.replace(inner.settings, max_pages=14)
    pieces, texts = [], {}
    for piece in worker.generate(rows_of(comm, "long"), n=3, sampling=KINDS["long"], prompt_width=7):
        pieces.append(piece)
        for row, name in enumerate(piece.non_tensor_batch["sample_id"]):
            count = int(piece.batch["response_mask"][row].sum())
            tokens, log_probs = (piece.batch[key][row, :count].numpy() for key in ("responses", "rollout_log_probs"))
            texts[name] = tokens.copy(), log_probs.copy(), str(piece.non_tensor_batch["finish_reason"][row])
    bags = [piece.meta_info["metrics"] for piece in pieces if "metrics" in piece.meta_info]
    told = sum(bag["rollout/preemptions"] for bag in bags if "rollout/preemptions" in set(bag))
    left = inner.preemptions
    return {"texts": texts, "told": told + left * (comm.rank == 0)}


def closed_early(comm: Comm, case: Case) -> dict[str, Any]:
    """Rank 0 has enough after its first piece; the others' rows are written to the end, and later ones too."""
    worker = make_worker(case, comm)
    if comm.rank == 0:
        stream = worker.generate(rows_of(comm, "seeded0"), n=3, sampling=KINDS["seeded"], prompt_width=7)
        first = next(stream)
        stream.close()
        found = {"pieces": len(first.non_tensor_batch["sample_id"])}
    else:
        found = {"texts": generate(worker, comm, "seeded")}
    return {**found, "again": generate(worker, comm, "greedy")}


def refused(comm: Comm, case: Case) -> str:
    try:
        make_worker(case, comm)
    except VerlError as error:
        return str(error)
    return ""


def exported(comm: Comm, case: Case, folder: str) -> None:
    """An update, a rollout, and the Hugging Face folder of what was trained."""
    worker = make_worker(case, comm)
    update(worker, comm)
    generate(worker, comm, "greedy")
    worker.save_pretrained(folder)
