"""Training a reward model as a table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from verl.algorithms.preference import reward_model_loss
from verl.config import Config
from verl.dataflow import Dataflow, Node
from verl.metrics import Metrics
from verl.protocol import DataProto
from verl.single_controller import WorkerGroup
from verl.trainer.preference.nodes import plan_pairs
from verl.trainer.roles import dumping
from verl.workers.pairs import PAIR, interleaved

STATE = ("actor.weights",)
SCORES = ["score_chosen", "score_rejected"]
MARGINAL = [*PAIR, "margin"]


@dataclass
class RewardModelRoles:
    """``actor`` is the model that is trained."""

    actor: WorkerGroup
    dump_folder: Path
    rollout: None = None  # nothing is generated

    def describe(self) -> dict[str, Any]:
        """The model."""
        return self.actor.describe()

    def update(self, batch: DataProto) -> Metrics:
        with dumping(batch, self.dump_folder):
            return self.actor.update_reward_model(batch, batch.meta_info["plan"])

    def scores(self, batch: DataProto) -> DataProto:
        """``score_chosen`` and ``score_rejected`` (B,)."""
        found = self.actor.compute_scores(interleaved(batch)).batch["scores"][:, 0]
        return DataProto.from_dict(tensors={SCORES[0]: found[0::2].clone(), SCORES[1]: found[1::2].clone()})

    def begin_step(self) -> None:
        """Nothing is scored by a reward function."""

    def end_step(self) -> None:
        """Nothing was."""

    def close(self) -> None:
        self.actor.shutdown()


def bradley_terry(roles: RewardModelRoles, config: Config) -> Dataflow:
    """The training step."""
    return Dataflow(
        Node("plan", partial(plan_pairs, config=config), PAIR, ["step/plan"], frame="pair"),
        Node("update_actor", roles.update, [*MARGINAL, "step/plan"], frame="pair", writes=["actor.weights"],
             pool="actor"),
        inputs={"pair": MARGINAL},
        state=STATE,
    )  # fmt: skip


def reward_model_validation(roles: RewardModelRoles, config: Config) -> Dataflow:
    """Loss and accuracy on the validation pairs."""
    judge = partial(evaluate, center=config.reward_model.center_rewards_coefficient)
    return Dataflow(
        Node("scores", roles.scores, PAIR, SCORES, frame="pair", reads=["actor.weights"], pool="actor"),
        Node("evaluate", judge, [*SCORES, "margin"], frame="pair"),
        inputs={"pair": MARGINAL},
        state=STATE,
        name="validate",
    )


def evaluate(batch: DataProto, *, center: float) -> Metrics:
    """``val/loss`` and ``val/rewards/*``."""
    b = batch.batch
    loss, metrics = reward_model_loss(b[SCORES[0]], b[SCORES[1]], b["margin"], center)
    found = metrics.prefixed("val/")
    found.add("val/loss", float(loss), weight=len(batch))
    return found
