"""A run with several processes is the run with one: the same samples, the same weights, the same checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainer_helpers import SETTINGS
from trainer_rewards import digits_share, slow_share

from verl import notices
from verl.api.ray_trainer import RayPPOTrainer
from verl.config import load_config
from verl.data import arithmetic_task
from verl.dataflow import Node
from verl.errors import DataflowError, ModelError
from verl.metrics import Metrics
from verl.trainer import groups
from verl.trainer.base import Trainer

pytestmark = pytest.mark.usefixtures("ray_cluster")
PLAIN = {
    **SETTINGS,
    "data.train_batch_size": 5,
    "actor_rollout_ref.rollout.n": 2,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 3,
    "actor_rollout_ref.actor.strategy": "torch",
    "trainer.device": "cpu",
    "trainer.save_final": True,
    "reward.reward_fn": digits_share,
}


class Watch:
    """What a run sampled in each step, and its weights and metrics after the last one."""

    def __init__(self) -> None:
        self.samples: list[tuple[list[str], torch.Tensor]] = []
        self.weights: dict[str, dict[str, torch.Tensor]] = {}
        self.metrics: dict[str, float] = {}
        self.spans: list[tuple[str, float, float]] = []

    def change_flow(self, flow: Any, roles: Any) -> Any:
        def look(batch: Any) -> Metrics:
            self.samples.append((batch.non_tensor_batch["sample_id"].tolist(), batch.batch["responses"].clone()))
            return Metrics()

        return flow.with_node(Node("look", look, needs=["responses"]), after="score")

    def callback(self, trainer: Any, metrics: dict[str, float]) -> None:
        self.metrics = dict(metrics)

    def read_weights(self, folder: Path) -> None:
        """The trained models of the last checkpoint."""
        for role in ("actor", "critic"):
            file = folder / role / "model.safetensors"
            if file.exists():
                self.weights[role] = load_file(file)


class Recording(Trainer):
    """Keeps when each node of the last step ran."""

    spans: list[tuple[str, float, float]]

    def run_flow(self, *arguments: Any, **options: Any) -> Any:
        result = super().run_flow(*arguments, **options)
        self.spans = result.spans
        return result


def run(model: Path, folder: Path, ranks: int, algorithm: str = "grpo", steps: int = 2, **changes: Any) -> Watch:
    """A run to a step; ``changes`` are configuration values, with ``__`` for dots."""
    watch = Watch()
    values = {
        **PLAIN,
        "algorithm.name": algorithm,
        "actor_rollout_ref.model.path": str(model),
        "trainer.default_local_dir": str(folder),
        "trainer.n_gpus_per_node": ranks,
        "trainer.total_training_steps": steps,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    trainer = Recording(
        load_config(values=values),
        train_rows=arithmetic_task("train", 5),
        change_flow=watch.change_flow,
        callbacks=(watch.callback,),
    )
    trainer.fit()
    watch.spans = trainer.spans
    watch.read_weights(folder / f"global_step_{steps}")
    return watch


def same(one: Watch, several: Watch) -> None:
    """Samples are identical; each weight differs by no more than 5e-6 of its tensor's norm."""
    for (ids, responses), (more_ids, more_responses) in zip(one.samples, several.samples, strict=True):
        assert ids == more_ids and torch.equal(responses, more_responses)
    assert one.weights.keys() == several.weights.keys() and "actor" in one.weights
    for role, state in one.weights.items():
        for name, value in state.items():
            difference = (value - several.weights[role][name]).norm()
            assert difference <= 5e-6 * value.norm().clamp(min=1e-3), f"{role} {name}: {difference:g}"
    for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "response_length/mean"):
        assert several.metrics[name] == pytest.approx(one.metrics[name], rel=1e-4, abs=1e-6), name


@pytest.fixture(scope="module")
def grpo(tiny_model_dir, tmp_path_factory) -> Watch:
    """Three steps in one process, without a stop."""
    return run(tiny_model_dir, tmp_path_factory.mktemp("one"), 1, steps=3)


def test_ranks_do_not_show_and_a_run_goes_on_with_another_number_of_them(tiny_model_dir, tmp_path, grpo):
    assert len(grpo.samples) == 3 and len(grpo.samples[0][0]) == 10
    found = Watch()
    for steps, ranks in ((1, 1), (2, 3), (3, 1)):  # 3 divides neither 5 prompts nor 10 rows
        found = run(tiny_model_dir, tmp_path, ranks, steps=steps)
        assert len(found.samples) == 1, "it goes on, it does not start anew"
        for (ids, responses), (more_ids, more) in zip(found.samples, grpo.samples[steps - 1 : steps], strict=True):
            assert ids == more_ids and torch.equal(responses, more)
    found.samples = grpo.samples
    same(grpo, found)


def test_roles_on_pools_of_their_own_run_side_by_side_and_change_nothing(tiny_model_dir, tmp_path):
    changes = {"algorithm": "ppo", "actor_rollout_ref__actor__use_kl_loss": True, "reward__reward_fn": slow_share}
    one = run(tiny_model_dir, tmp_path / "one", 1, **changes)
    changes |= {"critic__enable_resource_pool": True, "actor_rollout_ref__ref__enable_resource_pool": True}
    apart = run(tiny_model_dir, tmp_path / "apart", 1, **changes)
    same(one, apart)
    spans = {name: (begin, end) for name, begin, end in apart.spans if name in ("ref_logp", "values")}
    spans["score"] = max((begin, end) for name, begin, end in apart.spans if name == "score")
    assert max(begin for begin, _ in spans.values()) < min(end for _, end in spans.values()), spans


def test_ray_ppo_trainer_takes_the_number_of_processes(tiny_model_dir, tmp_path, capsys):
    config = {
        "trainer": {"n_gpus_per_node": 1, "nnodes": 2, "total_training_steps": 1, "default_local_dir": str(tmp_path)},
        "actor_rollout": {"model_name": str(tiny_model_dir)},
        "data": {"train_batch_size": 3, "max_prompt_length": 32, "max_response_length": 4},
        "algorithm": {"name": "grpo"},
        "reward_fn": digits_share,
    }
    trainer = RayPPOTrainer(config, train_rows=arithmetic_task("train", 5))
    trainer.fit()
    assert trainer.roles.actor.world_size == 2 and trainer.global_steps == 1
    trainer.close()
    assert "perf/throughput" in trainer.metrics
    if trainer.plan.choice.device.kind == "cpu":
        assert "so 2 CPU processes train" in capsys.readouterr().out


def test_a_run_that_cannot_be_built_leaves_no_process(tiny_model_dir, tmp_path):
    def refuse(flow, roles):
        raise DataflowError("not with me")

    values = {
        **PLAIN,
        "algorithm.name": "grpo",
        "actor_rollout_ref.model.path": str(tiny_model_dir),
        "trainer.default_local_dir": str(tmp_path),
        "trainer.n_gpus_per_node": 2,
    }
    with pytest.raises(DataflowError, match="not with me"):
        Trainer(load_config(values=values), train_rows=arithmetic_task("train", 5), change_flow=refuse)
    assert not groups._RUNS
    values["actor_rollout_ref.model.override_config"] = {"hidden_act": "no such thing"}
    with pytest.raises(ModelError):
        Trainer(load_config(values=values), train_rows=arithmetic_task("train", 5))
    assert not groups._RUNS


def test_a_rollout_on_a_pool_of_its_own_gets_the_weights_of_sharded_ranks(tiny_model_dir, tmp_path):
    changes = {"steps": 3, "trainer__schedule": "one_step_off"}
    here = run(tiny_model_dir, tmp_path / "here", 1, **changes)
    changes |= {"actor_rollout_ref__actor__strategy": "fsdp", "actor_rollout_ref__rollout__nnodes": 1}
    apart = run(tiny_model_dir, tmp_path / "apart", 2, actor_rollout_ref__rollout__n_gpus_per_node=1, **changes)
    assert apart.metrics["training/rollout_staleness"] == 1 and len(apart.samples) == 3
    same(here, apart)


def test_dropout_goes_on_where_it_was_on_every_rank(tiny_model_dir, tmp_path):
    """With dropout, weights after a stop equal those without one, to the bit."""
    changes = {
        "actor_rollout_ref__model__override_config": {"attention_dropout": 0.3},
        "trainer__save_freq": 1,
        "trainer__max_actor_ckpt_to_keep": None,
    }
    straight = run(tiny_model_dir, tmp_path / "straight", 2, **changes)
    run(tiny_model_dir, tmp_path / "broken", 2, steps=1, **changes)
    broken = run(tiny_model_dir, tmp_path / "broken", 2, **changes)
    assert len(broken.samples) == 1
    for name, value in straight.weights["actor"].items():
        assert torch.equal(value, broken.weights["actor"][name]), name
    assert not any("dropout draws other masks" in line for line in notices.seen())
    run(tiny_model_dir, tmp_path / "broken", 1, steps=3, **changes)
    assert any("no random states for 1 process:" in line for line in notices.seen())
