"""The frozen reference policy on one rank."""

from __future__ import annotations

from contextlib import nullcontext

from transformers import PreTrainedModel

from verl.models.offload import HostWeights
from verl.models.policy import load_policy, log_probs
from verl.protocol import DataProto
from verl.single_controller import Dispatch, Worker, register
from verl.train_engine.registry import reads_rows, shard_frozen
from verl.workers.fitting import TokenBudget
from verl.workers.forward import over_micro_batches, shares_prompts
from verl.workers.settings import ReferenceSettings


class Reference(Worker):
    """Log-probs under the weights that training started from."""

    def __init__(self, settings: ReferenceSettings, *, model: PreTrainedModel | None = None):
        self.settings = settings
        spread = reads_rows(settings.parallel, self.comm)
        self.model = load_policy(settings.model, frozen=True, spread=spread) if model is None else model
        self.lockstep = shard_frozen(self.model, self.comm, settings.parallel)
        device = next(self.model.parameters()).device if self.lockstep is None else self.lockstep.device
        self.budget = TokenBudget(
            "the reference's log-probs", "forward", {"forward": 0}, device, shares_prompts=shares_prompts(self.model)
        )
        offload = settings.model.param_offload and self.lockstep is None
        self.host_weights = HostWeights(self.model, frozen=True) if offload else None

    @register(Dispatch.DP_COMPUTE_PROTO, mode="train")
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """``ref_log_prob`` (B, R) of the trained tokens."""
        with self.host_weights.here() if self.host_weights else nullcontext():
            grids = over_micro_batches(
                batch,
                self.settings.cut,
                lambda micro: {"ref_log_prob": log_probs(self.model, micro, temperature=self.settings.temperature)[0]},
                self.budget,
                self.lockstep,
            )
        return DataProto.from_dict(tensors=grids, non_tensors={"sample_id": batch.non_tensor_batch["sample_id"]})
