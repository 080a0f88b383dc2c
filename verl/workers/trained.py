"""What all trained roles share: their engine's state goes out and comes in through rank 0."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from verl.errors import TrainingError
from verl.metrics import Metrics
from verl.models.backbone import has_dropout
from verl.models.offload import HostWeights
from verl.models.packing import computed_tokens, rows_of
from verl.notices import notice
from verl.protocol import DataProto
from verl.single_controller import Dispatch, Worker, register
from verl.train_engine.base import LossOf, StepReport
from verl.train_engine.fsdp_export import StreamedExport
from verl.train_engine.memory import RandomState
from verl.train_engine.saved import StatePiece
from verl.train_engine.torch_engine import TorchEngine
from verl.workers.fitting import TokenBudget, redo_until_it_fits
from verl.workers.forward import RowCosts, shares_prompts
from verl.workers.settings import Cut
from verl.workers.utilisation import Utilisation


class TrainedWorker(Worker):
    """A worker with a training engine. ``role`` prefixes its metrics.

    Attributes:
        host_weights: where the weights lie while others work; None: they stay on their device.
    """

    role: str
    engine: TorchEngine
    host_weights: HostWeights | None = None

    def weights_here(self) -> AbstractContextManager[None]:
        """Within, the weights are on their device."""
        return nullcontext() if self.host_weights is None else self.host_weights.here()

    @functools.cached_property
    def utilisation(self) -> Utilisation:
        return Utilisation(self.engine.module)

    def budget(self, name: str, phase: str) -> TokenBudget:
        """The token budget of a phase: ``update`` or ``forward``; what it learns is saved with the engine's state."""
        device = next(self.engine.module.parameters()).device
        shares = shares_prompts(self.engine.module)
        return TokenBudget(phase, name, self.engine.learned_tokens, device, shares_prompts=shares)

    def fit_step(
        self,
        batch: DataProto,
        rows: np.ndarray,
        cut: Cut,
        loss_of: LossOf[DataProto],
        columns: dict[str, torch.Tensor] | None = None,
        *,
        together: int = 1,
    ) -> StepReport:
        """One optimizer step over ``rows``, taken again with smaller micro-batches if memory runs out.

        Args:
            columns: more tensors of the whole batch, by key, that the loss reads.
            together: rows that are never separated, see :meth:`verl.workers.forward.RowCosts.cut`.
        """

        tokens = rows_of(batch)

        def attempt(parts: list[np.ndarray]) -> StepReport:
            micros, started = [], time.perf_counter()
            for part in parts:
                micro = batch.select_idxs(part)
                for key, values in (columns or {}).items():
                    micro.batch[key] = values[torch.from_numpy(part)]
                micros.append(micro)
            report = self.engine.train_step(micros, loss_of)
            for part in parts:
                self.utilisation.add(*computed_tokens([tokens[i] for i in part]))
            seconds = time.perf_counter() - started
            share = self.utilisation.of(seconds)
            if share is not None:
                report.metrics.add(f"perf/mfu/{self.role}", share, weight=seconds)
            return report

        budget = self.budget("update", f"the update of the {self.role}")
        costs = RowCosts.of(batch, shares_prompts=budget.shares_prompts)
        return redo_until_it_fits(
            budget,
            cut,
            attempt,
            lambda smaller: costs.cut(smaller, rows, together=together),
            costs.tokens,
            self.comm,
            together=together,
        )

    def record(self, metrics: Metrics, report: StepReport, optimizer_steps: int) -> None:
        """Take one optimizer step of an update into ``metrics``.

        Losses are summed over the micro-batches of a step and averaged over the steps of the update.
        """
        metrics.merge(report.metrics.with_scaled_sums(1 / optimizer_steps))
        metrics.add(f"{self.role}/grad_norm", report.grad_norm)
        metrics.add(f"{self.role}/lr", report.lr, reduce="last")
        metrics.add(f"{self.role}/skipped_steps", float(report.skipped), reduce="sum")

    @register(Dispatch.RANK_ZERO)
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Live weights, masters, moments and counters by name, where rank 0 has all of them.

        Raises:
            TrainingError: they are spread over the ranks: use :meth:`write_state`.
        """
        if self.engine.lockstep is not None:
            raise TrainingError("The state is spread over the ranks; write_state stores it, load_state_dict reads it.")
        with self.weights_here():
            state = self.engine.state_dict()
            if self.host_weights is None:
                return state
            # what is emptied again cannot be handed on
            return {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}

    def export(self, tokenizer: PreTrainedTokenizerBase | None, folder: str, save: Callable[[], None]) -> None:
        """Write the Hugging Face folder: by ``save`` on rank 0 where it has all weights, else by all ranks together."""
        if self.engine.lockstep is not None:
            StreamedExport(self.engine.lockstep).save(self.engine.module, tokenizer, folder)
        elif self.rank == 0:
            with self.weights_here():
                save()

    @register(Dispatch.ONE_TO_ALL)
    def write_state(self, write: Callable[[int, int, dict[str, StatePiece]], None]) -> None:
        """Let ``write(rank, number of ranks, pieces)`` store this rank's part of :meth:`state_dict`."""
        random = RandomState.capture()
        drawn = {"cpu": random.cpu, **{f"gpu{i}": state for i, state in enumerate(random.gpus)}}
        mine = {f"{self._random}/{name}": StatePiece.whole(state) for name, state in drawn.items()}
        with self.weights_here():
            write(self.rank, self.world_size, {**self.engine.state_pieces(), **mine})

    @register(Dispatch.ONE_TO_ALL)
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Write a state of :meth:`state_dict` into the existing weights."""
        with self.weights_here():
            self.engine.load_state_dict(state)
        self._restore_random(state)

    @property
    def _random(self) -> str:
        """Under which this rank's generators are saved: they are of use to the same rank among as many."""
        return f"random/{self.rank}-of-{self.world_size}"

    def _restore_random(self, state: Mapping[str, torch.Tensor]) -> None:
        """Let dropout go on where it was."""
        if f"{self._random}/cpu" in state:
            gpus = [name for i in range(torch.cuda.device_count()) if (name := f"{self._random}/gpu{i}") in state]
            cpu = state[f"{self._random}/cpu"].clone()
            RandomState(cpu, [state[name].clone() for name in gpus]).restore()
        elif self.rank == 0 and has_dropout(self.engine.module):
            notice(
                f"The checkpoint has no random states for {self.world_size} process{'es' * (self.world_size > 1)}: "
                "dropout draws other masks than without the stop."
            )
