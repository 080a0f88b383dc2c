"""Where roles live, and what is refused before anything is loaded."""

import pytest
import torch

from verl.config import load_config, processes, resolve, validate
from verl.errors import ConfigError
from verl.hardware import Choice, Device, choose
from verl.trainer.placement import check_devices, placement_of

PPO_KL = ["algorithm.name=ppo", "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.model.path=none"]


def config(*overrides: str):
    return resolve(load_config([*PPO_KL, *overrides]))


def cuda() -> Choice:
    return choose(Device("cuda", "H200", (9, 0), 141 << 30), torch.__version__, {"triton"})


def test_roles_share_one_pool_unless_told_otherwise():
    placement = placement_of(config("trainer.n_gpus_per_node=4", "trainer.nnodes=2"))
    assert placement.describe() == "actor: 8 ranks (actor+reference+critic)"
    assert {placement.pool_of(role) for role in ("actor", "reference", "critic", "teacher")} == {"actor"}
    assert placement.pools["actor"].nodes == (4, 4)


def test_max_colocate_count_splits_roles_over_processes():
    placement = placement_of(config("trainer.n_gpus_per_node=2", "trainer.max_colocate_count=2"))
    assert placement.describe() == "actor: 2 ranks (actor+reference | critic)"
    assert [placement.process_of(role) for role in ("actor", "reference", "critic", "teacher")] == [0, 0, 1, 0]
    alone = placement_of(config("trainer.n_gpus_per_node=2", "max_colocate_count=1"))
    assert alone.pools["actor"].processes == (("actor",), ("reference",), ("critic",))


def test_pools_of_their_own():
    found = config(
        "trainer.n_gpus_per_node=4", "critic.enable_resource_pool=true", "critic.n_gpus_per_node=2", "critic.nnodes=2",
        "actor_rollout_ref.ref.enable_resource_pool=true",
    )  # fmt: skip
    placement = placement_of(found)
    expected = "actor: 4 ranks (actor) · reference: 4 ranks (reference) · critic: 4 ranks (critic)"
    assert placement.describe() == expected
    assert placement.pools["critic"].nodes == (2, 2) and processes(found) == 12
    grpo = resolve(load_config(["algorithm.name=grpo", "critic.enable_resource_pool=true"]))
    assert processes(grpo) == 1, "a pool for a role that is not there is none"


def test_more_gpus_than_this_machine_has_are_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    four = config("trainer.n_gpus_per_node=3", "critic.enable_resource_pool=true", "critic.n_gpus_per_node=1")
    with pytest.raises(ConfigError) as caught:
        check_devices(four, cuda(), None)
    assert str(caught.value).startswith(
        "4 GPUs are asked for (trainer.n_gpus_per_node=3 x trainer.nnodes=1 + critic.n_gpus_per_node=1 x "
        "critic.nnodes=1) and this machine has 2: "
    )
    check_devices(four, cuda(), "10.0.0.1:6379")  # a cluster is asked when it is joined
    check_devices(config("trainer.n_gpus_per_node=2"), cuda(), None)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["trainer.device=mps", "trainer.n_gpus_per_node=2"], "trainer.device=mps is one device"),
        (
            ["actor_rollout_ref.ref.enable_resource_pool=true", "actor_rollout_ref.model.lora_rank=8"],
            "with adapters the frozen base of the policy is the reference",
        ),
    ],
)
def test_placements_that_cannot_be_are_refused(overrides, problem):
    with pytest.raises(ConfigError) as caught:
        validate(load_config([*PPO_KL, *overrides]), need_data=False, need_model=False)
    assert any(problem in text for text in caught.value.problems)


def test_what_has_no_effect_is_told(capsys):
    overrides = ["critic.nnodes=2", "data.train_batch_size=2", "trainer.n_gpus_per_node=4"]
    validate(load_config([*PPO_KL, *overrides]), need_data=False, need_model=False)
    told = capsys.readouterr().out
    assert "critic.nnodes is read only with critic.enable_resource_pool=true" in told
    assert "data.train_batch_size=2 prompts for 4 processes" in told
    one = ["algorithm.name=grpo", "trainer.max_restarts=1", "critic.enable_resource_pool=true"]
    validate(load_config(one), need_data=False, need_model=False)
    told = capsys.readouterr().out
    assert "trainer.max_restarts has no effect in one process" in told
    assert "critic.enable_resource_pool=true has no effect" in told


def test_a_rollout_beside_the_update_has_devices_of_its_own(monkeypatch):
    schedule = "trainer.schedule=one_step_off"
    apart = config(schedule, "actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=2")
    expected = "actor: 1 rank (actor+reference+critic) · rollout: 2 ranks (rollout)"
    assert placement_of(apart).describe() == expected and processes(apart) == 3
    assert processes(config("actor_rollout_ref.rollout.nnodes=1")) == 1, "read with that schedule only"
    with pytest.raises(ConfigError, match=r"devices of its own \(actor_rollout_ref\.rollout\.nnodes=1"):
        check_devices(config(schedule), cuda(), None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"3 GPUs are asked for .*rollout\.n_gpus_per_node=2"):
        check_devices(apart, cuda(), None)
