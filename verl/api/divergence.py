"""How far the policy is from the reference once a step is done: one more node of the training step."""

from __future__ import annotations

from verl.algorithms.kl import kl_penalty
from verl.algorithms.masked import as_mask, masked_mean
from verl.dataflow import Dataflow, Node
from verl.metrics import Metrics
from verl.protocol import DataProto
from verl.trainer.ppo.keys import SEQUENCE
from verl.trainer.roles import Roles

KL_DIVERGENCE = "kl_divergence"


def with_divergence(flow: Dataflow, roles: Roles) -> Dataflow:
    """``flow`` with the metric ``kl_divergence``, where it has log-probs of a reference.

    It is the mean over the step's trained tokens of the k3 estimate of KL(policy after the update, reference). The
    tokens were sampled before the update, so it is exact only as far as one step moves the policy little.
    """
    if not any("ref_log_prob" in node.gives for node in flow.nodes):
        return flow

    def measure(batch: DataProto) -> Metrics:
        after = roles.old_log_prob(batch).batch["old_log_probs"]
        mask = batch.batch["response_mask"]
        metrics = Metrics()
        per_token = kl_penalty(after, batch.batch["ref_log_prob"], "low_var_kl", mask)
        metrics.add(KL_DIVERGENCE, float(masked_mean(per_token, mask)), weight=float(as_mask(mask).sum()))
        return metrics

    return flow.with_node(
        Node("divergence", measure, [*SEQUENCE, "ref_log_prob"], reads=["actor.weights"], pool="actor")
    )
