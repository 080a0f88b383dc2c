"""What the ranks of test_hybrid_sharded.py do; a module of its own, which their processes import."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import torch
from fsdp_programs import Case, make_worker, plan_of, recorded, share

from verl.comm import Comm
from verl.protocol import DataProto
from verl.rollout.base import SamplingParams

SAMPLING = SamplingParams(max_tokens=12, temperature=1.0)


def _gathered(worker: Any) -> dict[str, torch.Tensor]:
    """Every weight as FSDP itself gathers it for a forward pass."""
    lockstep = worker.engine.lockstep
    found: dict[str, torch.Tensor] = {}
    hooks = []

    def look(*_: Any) -> None:
        for name, p in worker.model.named_parameters():
            if type(p) is torch.nn.Parameter:
                found[name] = p.detach().clone()

    for module in worker.model.modules():
        hooks.append(module.register_forward_hook(look))
    lockstep.infer_nothing()
    for hook in hooks:
        hook.remove()
    return found


def update(worker: Any, comm: Comm) -> None:
    batch = recorded(torch.float32)
    worker.update(*share(batch, plan_of(batch, 1), comm))


def arena(comm: Comm, case: Case) -> dict[str, Any]:
    """Compare the arena with what FSDP gathers, before and after an update."""
    worker = make_worker(case, comm)
    equal, tied = [], None
    for _ in range(2):
        update(worker, comm)
        expected = _gathered(worker)
        with worker.hybrid.rollout_mode():
            mine = dict(worker.hybrid.twin.named_parameters())
            equal.append(
                set(mine) == set(expected)
                and all(mine[n].dtype == p.dtype and torch.equal(mine[n], p) for n, p in expected.items())
            )
            twin = worker.hybrid.twin
            tied = twin.get_input_embeddings().weight is twin.get_output_embeddings().weight
    return {"equal": equal, "tied": tied, "engine": worker.hybrid.engine_name, "parameters": len(expected)}


def _tensor_bytes() -> int:
    """Bytes of all tensors that Python knows, every storage once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def cycles(comm: Comm, case: Case) -> dict[str, Any]:
    """Ten times rollout and update: addresses, memory, and what was generated."""
    worker = make_worker(case, comm)
    addresses, sizes, texts, gathers = set(), [], [], 0
    fill = worker.hybrid.arena.fill

    def counted() -> None:
        nonlocal gathers
        gathers += 1
        fill()

    worker.hybrid.arena.fill = counted
    for cycle in range(10):
        texts.append(generate(worker, comm, f"{cycle}"))
        addresses.add(tuple(p.data_ptr() for p in worker.hybrid.twin.parameters()))
        again = generate(worker, comm, f"{cycle}")  # nothing has changed: no gathering, the same text
        assert again.keys() == texts[-1].keys() and all((again[k] == texts[-1][k]).all() for k in again)
        update(worker, comm)
        sizes.append(_tensor_bytes())
    return {"addresses": len(addresses), "sizes": sizes, "gathers": gathers, "texts": texts, "comm": comm.rank}


def generate(worker: Any, comm: Comm, tag: str) -> dict[str, np.ndarray]:
    """Responses of this rank's prompts, by row."""
    prompts = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16], [20, 21]]
    mine = [i for i in range(len(prompts)) if i % comm.world_size == comm.rank]
    rows = np.empty(len(mine), dtype=object)
    rows[:] = [np.array(prompts[i]) for i in mine]
    names = np.array([f"{tag}-{i}" for i in mine], dtype=object)
    batch = DataProto.from_dict(tensors={}, non_tensors={"prompt_ids": rows, "uid": names})
    found = {}
    for piece in worker.generate(batch, n=2, sampling=SAMPLING, prompt_width=5):
        for row, name in enumerate(piece.non_tensor_batch["sample_id"]):
            found[name] = piece.batch["responses"][row].numpy().copy()
    return found


def version_drops_prefix_pages(comm: Comm, case: Case) -> dict[str, int]:
    """How often the engine was told that its weights are new."""
    worker = make_worker(case, comm)
    told = 0
    inner = worker.hybrid._engine.weights_changed

    def counted() -> None:
        nonlocal told
        told += 1
        inner()

    worker.hybrid._engine.weights_changed = counted
    counts = []
    for _ in range(2):
        for _ in range(2):
            with worker.hybrid.rollout_mode():
                counts.append(told)
        update(worker, comm)
    return counts


def grpo_step(comm: Comm, case: Case, steps: int) -> dict[str, Any]:
    """Rollout, a made-up score, group advantages and update, several times, on the workers alone.

    Every rank makes the whole batch out of all ranks' rows, as a controller would, and takes its share of the plan.
    """
    worker = make_worker(case, comm)
    rewards, norms = [], []
    for step in range(steps):
        pieces: dict[str, np.ndarray] = {}
        batch = _rollout(worker, comm, step)
        mask = batch.batch["response_mask"].bool()
        hits = (batch.batch["responses"] % 2 == 0) & mask  # even ids are good
        score = hits.sum(1).float() / mask.sum(1).clamp_min(1)
        uid = batch.non_tensor_batch["uid"]
        advantage = torch.zeros_like(score)
        for name in set(uid):
            rows = torch.from_numpy(np.flatnonzero(uid == name))
            advantage[rows] = score[rows] - score[rows].mean()
        batch.batch["advantages"] = (advantage[:, None] * mask).float()
        batch.batch["ref_log_prob"] = batch.batch["rollout_log_probs"].clone()
        plan = plan_of(batch, 1, prompts=4)
        metrics = worker.update(*share(batch, plan, comm)).results()
        rewards.append(float(score.mean()))
        norms.append(metrics["actor/grad_norm"])
        pieces.clear()
    return {
        "rewards": rewards,
        "norms": norms,
        "difference": metrics["training/rollout_probs_diff_max"],
        "reshard": worker.reshard_seconds,
        "version": worker.engine.version,
    }


def _rollout(worker: Any, comm: Comm, step: int) -> DataProto:
    prompts = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16], [20, 21]]
    mine = [i for i in range(len(prompts)) if i % comm.world_size == comm.rank]
    rows = np.empty(len(mine), dtype=object)
    rows[:] = [np.array(prompts[i]) for i in mine]
    batch = DataProto.from_dict(
        tensors={}, non_tensors={"prompt_ids": rows, "uid": np.array([f"{step}-{i}" for i in mine], dtype=object)}
    )
    pieces = list(worker.generate(batch, n=4, sampling=SAMPLING, prompt_width=5))
    bags = [piece.meta_info.pop("metrics") for piece in pieces if "metrics" in piece.meta_info]
    reshard = [bag["timing_s/reshard"] for bag in bags if "timing_s/reshard" in set(bag)]
    worker.reshard_seconds = getattr(worker, "reshard_seconds", []) + reshard
    everybody = comm.all_gather_object([(p.batch.to_dict(), p.non_tensor_batch) for p in pieces])
    whole = DataProto.concat([DataProto.from_dict(tensors=t, non_tensors=n) for rank in everybody for t, n in rank])
    order = np.argsort(whole.non_tensor_batch["sample_id"].astype(str), kind="stable")
    return whole.select_idxs(order)


def pages(comm: Comm, case: Case) -> dict[str, Any]:
    """Five cycles on a GPU: what the device says is free in and after rollouts."""
    worker = make_worker(case, comm)
    arena = worker.hybrid.arena
    addresses, freed, free = set(), [], []
    for cycle in range(5):
        generate(worker, comm, f"{cycle}")
        with worker.hybrid.rollout_mode():
            addresses.add(tuple(p.data_ptr() for p in worker.hybrid.twin.parameters()))
            inside = torch.cuda.mem_get_info()[0]
        freed.append(torch.cuda.mem_get_info()[0] - inside >= arena.nbytes // 2)
        update(worker, comm)
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    return {"addresses": len(addresses), "freed": freed, "free": free[1:], "gives_back": arena.gives_back}
