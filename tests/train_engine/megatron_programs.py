"""What the ranks of test_train_engine_megatron.py do; a module of its own, which their processes import."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fsdp_programs import Case, make_worker, numbers, plan_of, recorded, share

from verl.comm import Comm, SoloComm, TorchDistComm
from verl.errors import ConfigError, ModelError, TrainingError
from verl.models import tensor_parallel
from verl.models.backbone import lm_head
from verl.models.linear_logprob import linear_log_prob
from verl.models.tensor_parallel import OutputPart, vocab_parallel_log_prob
from verl.train_engine.parallel import ParallelSettings
from verl.train_engine.spread import rows_per_rank

TWO = ParallelSettings("megatron", tensor_size=2)


def update(worker: Any, comm: Comm, steps: int = 1) -> dict[str, float]:
    batch = recorded(torch.float32)
    return worker.update(*share(batch, plan_of(batch, steps), comm)).results()


def log_prob_of_parts(comm: TorchDistComm, rows: int, temperature: float, entropy: bool) -> dict[str, np.ndarray]:
    """Log-probs, entropy and gradients in float64, of a vocabulary that lies over the ranks; and those of the whole.

    Chunks of two tokens, and nothing may be gathered.
    """
    torch.manual_seed(3)
    weight = torch.randn(rows, 8, dtype=torch.float64)
    hidden = torch.randn(7, 8, dtype=torch.float64)
    target = torch.tensor([0, rows - 1, 5, 5, 30, 48, 49]) % rows
    grad, grad_entropy = torch.randn(2, 7, dtype=torch.float64)
    most = rows_per_rank(rows, comm.world_size)
    start = comm.rank * most
    part = weight[start : start + most].clone().requires_grad_()
    tensor_parallel.CHUNK_ELEMENTS = 2 * most
    mine, whole = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    reference = hidden.clone().requires_grad_()
    gather, dist.all_gather_into_tensor = dist.all_gather_into_tensor, None
    try:
        found = vocab_parallel_log_prob(
            mine,
            target,
            OutputPart(part, start, most, comm.group),
            temperature=temperature,
            with_entropy=True,
            entropy_gradient=entropy,
        )
        (found[0] @ grad + (found[1] @ grad_entropy if entropy else 0)).backward()
    finally:
        dist.all_gather_into_tensor = gather
        tensor_parallel.CHUNK_ELEMENTS = 32 * 1024 * 1024
    expected = linear_log_prob(
        reference, whole, target, temperature=temperature, with_entropy=True, entropy_gradient=entropy
    )
    (expected[0] @ grad + (expected[1] @ grad_entropy if entropy else 0)).backward()
    pairs = {
        "log_prob": (found[0], expected[0]),
        "entropy": (found[1], expected[1]),
        "hidden": (mine.grad, reference.grad),
        "weight": (part.grad, whole.grad[start : start + most]),
    }
    assert found[1].requires_grad == entropy
    return {name: (a.detach().numpy(), b.detach().numpy()) for name, (a, b) in pairs.items()}


def inside(comm: TorchDistComm, case: Case) -> dict[str, Any]:
    """What a rank holds after five updates, and what the rollout gets."""
    worker = make_worker(dataclasses.replace(case, kind="adamw"), comm)
    engine = worker.engine
    addresses = {n: (m.data_ptr(), engine.weights.live[n].data_ptr()) for n, m in engine.weights.masters.items()}
    whole = sum(p.numel() for p in worker.model.parameters())
    update(worker, comm, 5)
    lockstep = engine.lockstep
    everywhere = {
        n: m.detach().numpy()
        for n, m in engine.weights.masters.items()
        if n in {p.parameter for p in lockstep.parallel.layout.places.values() if p.cut is None}
    }
    rollout = {}
    if case.role == "actor":
        with worker.hybrid.rollout_mode():
            rollout = {n: p.detach().clone() for n, p in worker.hybrid.twin.named_parameters()}
    state = engine.state_dict()
    try:
        if case.role == "actor":
            lm_head(worker.model)
        refused = ""
    except ModelError as error:
        refused = str(error)
    return {
        "share": sum(m.numel() for m in engine.weights.masters.values()) / whole,
        "left": sum(p.untyped_storage().nbytes() for p in worker.model.parameters()),
        "read": all(bool(p.isnan().all()) for p in worker.model.parameters()),
        "moved": [
            n
            for n, m in engine.weights.masters.items()
            if (m.data_ptr(), engine.weights.live[n].data_ptr()) != addresses[n]
        ],
        "moments": {str(s["exp_avg"].dtype) for s in engine.optimizer.state.values()},
        "everywhere": everywhere,
        "rollout": set(rollout) == {k[5:] for k in state if k.startswith("live/")}
        and all(torch.equal(rollout[n], state[f"live/{n}"]) for n in rollout),
        "names": [n for n, _ in worker.model.named_parameters()],
        "refused": refused,
    }


def exported(comm: Comm, case: Case, folder: str) -> None:
    """The Hugging Face folder after two updates."""
    worker = make_worker(case, comm)
    update(worker, comm, 2)
    Path(folder).mkdir(exist_ok=True)
    if case.role == "critic":
        worker.export(None, folder, lambda: worker.model.save_pretrained(folder))
    else:
        worker.save_pretrained(folder)


def resumed(comm: Comm, case: Case, state: dict[str, np.ndarray] | None, steps: int) -> dict[str, np.ndarray] | None:
    """The state (from rank 0) after some updates, from a state that another number of ranks may have written."""
    worker = make_worker(dataclasses.replace(case, kind="adamw", lr=1e-3), comm)
    if state is not None:
        wide = {k: torch.from_numpy(v) for k, v in state.items()}
        narrow = {k: v.float() if v.is_floating_point() and k != "loss_scale" else v for k, v in wide.items()}
        worker.load_state_dict(narrow)
    for _ in range(steps):
        update(worker, comm)
    found = worker.engine.state_dict()
    return numbers(found) if comm.rank == 0 else None


def pieces(comm: TorchDistComm, case: Case) -> dict[str, tuple[int, int]]:
    """(first row, rows) of every piece that this rank writes."""
    worker = make_worker(case, comm)
    update(worker, comm)
    return {name: (p.start, len(p.tensor) if p.tensor.ndim else 1) for name, p in worker.engine.state_pieces().items()}


def refused(comm: Comm, case: Case) -> str:
    """The error at building."""
    try:
        make_worker(case, comm)
    except ConfigError as error:
        return str(error)
    return ""


def out_of_memory(comm: TorchDistComm, case: Case) -> str:
    """The error when one rank's loss runs out of memory after its forward pass."""
    worker = make_worker(case, comm)
    inner = worker._loss

    def loss(micro, mini):
        inner(micro, mini)
        raise torch.OutOfMemoryError("out of memory (made up)")

    worker._loss = loss
    try:
        update(worker, comm)
    except TrainingError as error:
        return str(error)
    return ""


def alone(program: Any, *args: Any) -> Any:
    return program(SoloComm(), *args)


def reference(comm: TorchDistComm, case: Case) -> tuple[list[str], np.ndarray]:
    """Log-probs of this rank's rows under a frozen reference."""
    from verl.models.settings import ModelSettings
    from verl.workers.reference import Reference
    from verl.workers.settings import ReferenceSettings

    settings = ReferenceSettings(
        ModelSettings(case.folder, dtype=case.dtype, device="cpu"), 1.0, case.cut, case.parallel
    )
    worker = Reference.create(comm, settings)
    batch = recorded(torch.float32)
    rows = np.arange(comm.rank, len(batch), comm.world_size)
    found = worker.compute_ref_log_prob(batch.select_idxs(rows))
    return rows.tolist(), found.batch["ref_log_prob"].numpy()


def scores(comm: Comm, case: Case) -> np.ndarray:
    """(2, rows) a reward model's scores of all rows, before and after one update that raises them."""
    from tiny_models import make_tokenizer

    from verl.metrics import Metrics
    from verl.models.score import at_the_end, load_score_model
    from verl.models.settings import ModelSettings
    from verl.train_engine.optimizers import OptimizerSettings
    from verl.train_engine.registry import make_train_engine

    model = load_score_model(ModelSettings(case.folder, dtype=case.dtype, device="cpu"), make_tokenizer())
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    engine = make_train_engine(OptimizerSettings(lr=1e-2, kind="sgd", weight_decay=0.0), model, comm, case.parallel)
    batch = at_the_end(recorded(torch.float32), 0)
    mine = [batch.select_idxs(np.arange(comm.rank, len(batch), comm.world_size))]

    def look() -> np.ndarray:
        """The same rows on all ranks."""
        lockstep = engine.lockstep
        if lockstep is None:
            with torch.no_grad():
                return model(batch).sum(1).numpy()
        [found] = lockstep.settle([lockstep.infer(lambda: {"scores": model(batch).sum(1)})])
        return found["scores"].numpy()

    before = look()
    engine.train_step(mine, lambda micro: (-model(micro).sum() / len(batch), Metrics()))
    return np.stack([before, look()])
