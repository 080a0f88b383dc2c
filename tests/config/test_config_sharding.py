"""How the keys of sharded training are read, renamed and refused."""

from __future__ import annotations

import pytest
from config_problems import problems

from verl import notices
from verl.config import load_config, resolve

A = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("given", "strategy"), [("fsdp", "fsdp"), ("fsdp2", "fsdp"), ("dp", "torch"), ("torch", "torch"), ("auto", "auto")]
)
def test_strategies_have_one_name(given, strategy):
    config = resolve(load_config([f"{A}.strategy={given}"]))
    assert config.actor_rollout_ref.actor.strategy == strategy
    assert config.critic.strategy == config.actor_rollout_ref.ref.strategy == strategy, "the others follow the actor"


def test_old_places_of_the_keys():
    config = load_config(
        ["critic.model.fsdp_config.fsdp_size=2", "critic.fsdp.forward_prefetch=true", f"{A}.fsdp_config.fsdp_size=4"]
    )
    assert config.critic.fsdp_config.fsdp_size == 2 and config.critic.fsdp_config.forward_prefetch
    assert config.actor_rollout_ref.actor.fsdp_config.fsdp_size == 4
    load_config([f"{A}.fsdp_config.wrap_policy.min_num_params=0"])
    assert any("wrap_policy" in text for text in notices.seen())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([f"{A}.strategy=fdsp"], ["fdsp", "did you mean"]),
        (
            [f"{A}.fsdp_config.fsdp_size=2", "trainer.n_gpus_per_node=3"],
            [f"{A}.fsdp_config.fsdp_size=2", "3 processes"],
        ),
        ([f"{A}.strategy=fsdp", f"{A}.optim.optimizer=Adafactor"], ["Adafactor", f"{A}.strategy=torch"]),
    ],
)
def test_what_cannot_be_is_one_sentence(given, words):
    found = problems(*given)
    assert len(found) == 1 and all(word in found[0] for word in words), found


def test_what_can_be_is_silent():
    assert problems(f"{A}.fsdp_config.fsdp_size=2", "trainer.n_gpus_per_node=4") == []
    assert problems(f"{A}.fsdp_config.fsdp_size=2", f"{A}.strategy=torch", "trainer.n_gpus_per_node=3") == []
    no_critic = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2"]
    assert problems("critic.fsdp_config.fsdp_size=2", "trainer.n_gpus_per_node=3", *no_critic) == []


def test_sequence_parallelism_needs_processes_and_shards():
    size = f"{A}.ulysses_sequence_parallel_size=2"
    assert problems(size, "trainer.n_gpus_per_node=4") == []
    for given, words in (
        ((size,), "does not divide its 1 process"),
        ((size, "trainer.n_gpus_per_node=3"), "does not divide its 3 process"),
        ((size, "trainer.n_gpus_per_node=2", f"{A}.strategy=torch"), "needs sharded weights"),
    ):
        found = problems(*given)
        assert found and all(f"ulysses_sequence_parallel_size=2 {words}" in text for text in found), found
    config = resolve(load_config([size, "critic.ulysses_sequence_parallel_size=1"]))
    assert config.actor_rollout_ref.ref.ulysses_sequence_parallel_size == 2
    assert config.critic.ulysses_sequence_parallel_size == 1
    old = load_config([f"{A}.fsdp_config.ulysses_sequence_parallel_size=2"])
    assert old.actor_rollout_ref.actor.ulysses_sequence_parallel_size == 2
