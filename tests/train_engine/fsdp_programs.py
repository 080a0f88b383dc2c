"""What the ranks of test_train_engine_fsdp.py do; a module of its own, which their processes import."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tiny_models import make_model, sample_batch

from verl.comm import Comm, SoloComm, ThreadComm, TorchDistComm
from verl.errors import ConfigError, ModelError
from verl.models.packing import packed_lengths
from verl.models.settings import LoraSettings, ModelSettings
from verl.protocol import DataProto
from verl.train_engine import registry
from verl.train_engine.optimizers import OptimizerSettings
from verl.train_engine.parallel import ParallelSettings
from verl.train_engine.plan import MiniBatchPlan, plan_for
from verl.train_engine.registry import make_train_engine, shards_weights
from verl.workers.actor import Actor
from verl.workers.critic import Critic
from verl.workers.settings import ActorSettings, CriticSettings, Cut, RolloutSettings

WHOLE, SMALL = Cut(), Cut(max_tokens=24)
FSDP = ParallelSettings(strategy="fsdp")
ALONE = ParallelSettings(strategy="torch")


@dataclass
class PolicyLoss:
    loss_mode: str = "vanilla"


@dataclass
class Loss:
    loss_agg_mode: str = "token-mean"
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    entropy_coeff: float = 0.01
    calculate_entropy: bool = False
    use_kl_loss: bool = True
    kl_loss_coef: float = 0.1
    kl_loss_type: str = "low_var_kl"
    loss_scale_factor: float | None = None
    policy_loss: PolicyLoss = field(default_factory=PolicyLoss)


@dataclass(frozen=True)
class Case:
    """One run: which model, in which type, trained how."""

    folder: str
    role: str = "actor"
    dtype: str = "float32"
    lora: bool = False
    checkpointing: bool = False
    kind: str = "sgd"
    lr: float = 1e-2
    clip: float = 0.5
    cut: Cut = SMALL
    parallel: ParallelSettings = FSDP
    device: str = "cpu"
    compiled: bool = False
    offload: bool = False
    tensor_size: int = 1


def recorded(dtype: torch.dtype, rows: int = 10) -> DataProto:
    """Rows of very unequal lengths over three prompts, one of them empty, with observation tokens in some."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(5, 90, n).tolist() for n in (3, 9, 5)]
    made = []
    for i in range(rows):
        length = [17, 2, 1, 5, 3, 0, 6, 4, 12, 2][i % 10]
        mask = [1] * length
        if length > 5:
            mask[2] = 0
        made.append((prompts[i % 3], rng.integers(5, 90, length).tolist(), mask))
    batch = sample_batch(made)
    shape = batch.batch["responses"].shape
    keep = batch.batch["response_mask"].bool()
    noise = {k: torch.from_numpy(rng.normal(size=shape)).to(dtype) for k in ("a", "old", "ref", "values", "returns")}
    old = -3 + 0.3 * noise["old"]
    columns = {
        "advantages": noise["a"],
        "old_log_probs": old,
        "rollout_log_probs": old,
        "ref_log_prob": old + 0.1 * noise["ref"],
        "values": noise["values"],
        "returns": noise["returns"],
    }
    for name, grid in columns.items():
        batch.batch[name] = grid.masked_fill(~keep, 0.0)
    return batch


def shard_even_one_rank(case: Case, comm: Comm) -> None:
    """With one rank there is nothing to shard and nobody would; the tests do."""
    wanted = case.parallel.strategy == "fsdp" and isinstance(comm, TorchDistComm)
    one = comm.world_size == 1
    registry.shards_weights = (lambda parallel, comm: wanted) if one else shards_weights


def make_worker(case: Case, comm: Comm) -> Any:
    shard_even_one_rank(case, comm)
    model = ModelSettings(
        case.folder,
        dtype=case.dtype,
        device=case.device,
        compile_layers=case.compiled,
        kernel="varlen" if case.device == "cuda" and case.dtype == "bfloat16" else "sdpa",
        lora=LoraSettings(rank=4, alpha=8) if case.lora else None,
        gradient_checkpointing=case.checkpointing,
    )
    optimizer = OptimizerSettings(
        lr=case.lr, kind=case.kind, weight_decay=0.0, grad_clip=case.clip, offload=case.offload
    )
    if case.role == "critic":
        critic = CriticSettings(model, optimizer, update_cut=case.cut, forward_cut=case.cut, parallel=case.parallel)
        worker = Critic.create(comm, critic)
        return worker
    settings = ActorSettings(
        model,
        optimizer,
        RolloutSettings(engine="native", tensor_size=case.tensor_size),
        Loss(),
        update_cut=case.cut,
        log_prob_cut=case.cut,
        parallel=case.parallel,
    )
    return Actor.create(comm, settings)


def share(batch: DataProto, plan: MiniBatchPlan, comm: Comm) -> tuple[DataProto, MiniBatchPlan]:
    rows, mine = plan.split(comm.world_size)[comm.rank]
    return batch.select_idxs(rows), mine


def plan_of(batch: DataProto, steps: int, prompts: int = 3) -> MiniBatchPlan:
    return plan_for(batch, packed_lengths(batch), mini_batch_prompts=prompts, epochs=steps)


def numbers(state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """A state that goes through a pipe by value."""
    return {
        k: v.detach().cpu().to(torch.float64 if v.dtype.is_floating_point else v.dtype).numpy()
        for k, v in state.items()
    }


def gradients(worker: Any, batch: DataProto, plan: MiniBatchPlan) -> dict[str, torch.Tensor]:
    """The gradient of the plan's first step, as a difference of weights: one SGD step of size 1 without clipping."""
    worker.engine.settings = dataclasses.replace(worker.engine.settings, lr=1.0, grad_clip=0.0)
    before = worker.engine.state_dict()
    before = {k: v.clone() for k, v in before.items()}
    worker.update(batch, dataclasses.replace(plan, mini_batches=plan.mini_batches[:1]))
    after = worker.engine.state_dict()
    return {k: before[k] - after[k] for k in after if k.startswith(("live/", "master/"))}


def trained(comm: Comm, case: Case, steps: int = 5) -> dict[str, Any]:
    """Weights and metrics after ``steps`` updates."""
    worker = make_worker(case, comm)
    batch = recorded(torch.float64 if case.dtype == "float64" else torch.float32)
    mine, plan = share(batch, plan_of(batch, steps), comm)
    metrics = worker.update(mine, plan)
    state = worker.engine.state_dict()
    return {
        "state": numbers(state) if comm.rank == 0 else None,
        "norm": metrics.results()[f"{case.role}/grad_norm"],
        "version": worker.engine.version,
        "tokens": int(packed_lengths(mine).sum()),
        "kind": type(worker.engine).__name__,
    }


def gradient(comm: Comm, case: Case) -> Any:
    """The gradient of one step over all rows."""
    worker = make_worker(dataclasses.replace(case, kind="sgd"), comm)
    batch = recorded(torch.float64 if case.dtype == "float64" else torch.float32)
    mine, plan = share(batch, plan_of(batch, 1), comm)
    found = gradients(worker, mine, plan)
    return numbers(found) if comm.rank == 0 else None


def forwards(comm: Comm, case: Case) -> Any:
    """Log-probs of all rows: rank r takes every world-size-th one, so that lengths and counts differ."""
    worker = make_worker(case, comm)
    batch = recorded(torch.float32)
    rows = np.arange(comm.rank, len(batch), comm.world_size)
    if comm.rank == comm.world_size - 1 and comm.world_size > 1:
        rows = rows[:0]  # one rank has nothing to do
    mine = batch.select_idxs(rows)
    compute = worker.compute_values if case.role == "critic" else worker.compute_log_prob
    found = compute(mine)
    key = "values" if case.role == "critic" else "old_log_probs"
    return rows, found.batch[key].numpy() if len(rows) else None


def alone(program: Any, *args: Any) -> Any:
    """The same program on one device."""
    return program(SoloComm(), *args)


def kinds(comm: Comm, case: Case) -> dict[str, Any]:
    """Types of what the engine holds, and whether storages moved in two updates."""
    worker = make_worker(dataclasses.replace(case, kind="adamw"), comm)
    engine = worker.engine
    places = {name: p.to_local().data_ptr() for name, p in engine.lockstep.shards.items()}
    seen: dict[str, set[str]] = {"gradients": set()}
    clip = engine._clip

    def look(gradients):
        seen["gradients"] |= {str(g.dtype) for g in gradients}
        return clip(gradients)

    engine._clip = look
    batch = recorded(torch.float32)
    worker.update(*share(batch, plan_of(batch, 2), comm))
    gathered = set()
    engine.lockstep.infer(lambda: gathered.update(str(p.dtype) for n, p in named_of_root(engine)))
    state = engine.optimizer.state
    held = sum(m.numel() for m in engine.weights.masters.values())
    return {
        "shards": {str(p.dtype) for p in engine.lockstep.shards.values()},
        "moments": {str(s["exp_avg"].dtype) for s in state.values()},
        "gathered": gathered,
        "share": held / sum(p.numel() for p in engine.lockstep.shards.values()),
        "moved": [n for n, p in engine.lockstep.shards.items() if p.to_local().data_ptr() != places[n]],
        **seen,
    }


def tokens_seen(comm: Comm, case: Case) -> dict[str, list[int]]:
    """How many tokens this rank's layers compute, pass by pass."""
    worker = make_worker(case, comm)
    seen: dict[str, list[int]] = {"computed": []}
    layer = worker.model.model.layers[0]
    layer.register_forward_pre_hook(lambda module, inputs: seen["computed"].append(inputs[0].shape[1]))
    batch = recorded(torch.float32)
    worker.update(*share(batch, plan_of(batch, 1), comm))
    return seen


def named_of_root(engine: Any) -> list[tuple[str, torch.Tensor]]:
    outside = set(engine.lockstep.units[-1])
    return [(n, p) for n, p in engine.module.named_parameters() if n in outside]


def nonfinite(comm: Comm, case: Case) -> dict[str, Any]:
    """One rank's loss is not finite in one step; the step after it is good."""
    worker = make_worker(case, comm)
    engine = worker.engine
    before = {k: v.clone() for k, v in engine.state_dict().items()}
    batch = recorded(torch.float32)
    mine, plan = share(batch, plan_of(batch, 1), comm)
    bad = mine.batch["advantages"].clone()
    if comm.rank == 1:
        bad[:] = float("inf")
    good = mine.batch["advantages"]
    mine.batch["advantages"] = bad
    metrics = worker.update(mine, plan)
    after = engine.state_dict()
    found = {
        "skipped": metrics.results()["actor/skipped_steps"] == 1,
        "version": engine.version,
        "unchanged": all(torch.equal(before[k], after[k]) for k in before if k.startswith("live/")),
    }
    mine.batch["advantages"] = good
    worker.update(mine, plan)
    return {**found, "next": engine.version}


def scaled(comm: Comm, case: Case) -> dict[str, Any]:
    """A step that starts with a loss scale that overflows."""
    worker = make_worker(case, comm)
    worker.engine.scaler.scale = 2.0**40
    batch = recorded(torch.float32)
    metrics = worker.update(*share(batch, plan_of(batch, 1), comm))
    return {
        "scale": worker.engine.scaler.scale,
        "skipped": metrics.results()["actor/skipped_steps"] > 0,
    }


class _OutOfMemoryInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError("out of memory (made up)")


def short_of_memory(comm: Comm, case: Case, where: str) -> dict[str, Any]:
    """The last rank cannot take more than 20 tokens in one micro-batch; it fails at one of several places."""
    worker = make_worker(case, comm)
    inner = worker._loss

    def fail() -> None:
        raise torch.OutOfMemoryError("out of memory (made up)")

    def loss(micro, mini):
        tight = comm.rank == comm.world_size - 1 and int(packed_lengths(micro).sum()) > 20
        if tight and where == "before":
            fail()
        hook = None
        if tight and where == "another layer":
            hook = list(worker.model.model.layers)[1].mlp.register_forward_hook(lambda *_: fail())
        try:
            value, metrics = inner(micro, mini)
        finally:
            if hook is not None:
                hook.remove()
        if tight and where == "after":
            fail()
        if tight and where == "backward":
            value = _OutOfMemoryInBackward.apply(value)
        return value, metrics

    worker._loss = loss
    batch = recorded(torch.float32)
    mine, plan = share(batch, plan_of(batch, 1), comm)
    found = gradients(worker, mine, plan)
    return {
        "learned": worker.engine.learned_tokens["update"],
        "gradient": numbers(found) if comm.rank == 0 else None,
    }


def short_of_memory_in_log_probs(comm: Comm, case: Case) -> Any:
    """Rank 0 cannot take more than 20 tokens in one forward pass."""
    worker = make_worker(case, comm)
    inner = worker._log_probs

    def log_probs(micro, *rest):
        found = inner(micro, *rest)
        if comm.rank == 0 and int(packed_lengths(micro).sum()) > 20:
            raise torch.OutOfMemoryError("out of memory (made up)")
        return found

    worker._log_probs = log_probs
    batch = recorded(torch.float32)
    rows = np.arange(comm.rank, len(batch), comm.world_size)
    found = worker.compute_log_prob(batch.select_idxs(rows))
    return rows, found.batch["old_log_probs"].numpy(), worker.engine.learned_tokens["forward"]


def refused(comm: Comm, case: Case) -> str:
    """The sentence with which the engine refuses."""
    try:
        make_worker(case, comm)
    except (ConfigError, ModelError) as error:
        return str(error)
    return ""


def engines(comm: Comm, case: Case) -> dict[str, str]:
    """What make_train_engine makes of each strategy."""
    settings = OptimizerSettings(lr=1.0, kind="sgd")

    def made(strategy: str, settings: OptimizerSettings, comm: Comm) -> str:
        model = make_model("llama")
        try:
            engine = make_train_engine(settings, model, comm, ParallelSettings(strategy))
        except ConfigError as error:
            return "needs ranks that are processes" if "needs ranks that are processes" in str(error) else str(error)
        return type(engine).__name__

    return {
        "auto": made("auto", settings, comm),
        "fsdp": made("fsdp", settings, comm),
        "torch": made("torch", settings, comm),
        "auto, adafactor": made("auto", dataclasses.replace(settings, kind="adafactor"), comm),
        "auto, one rank": made("auto", settings, SoloComm()),
        "fsdp, threads": made("fsdp", settings, ThreadComm.create(2)[0]),
    }
