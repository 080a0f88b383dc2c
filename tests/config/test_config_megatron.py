"""How the keys of training with Megatron-Core are read and refused."""

from __future__ import annotations

import pytest

from verl import notices
from verl.config import load_config, resolve, validate
from verl.errors import ConfigError

AR = "actor_rollout_ref"
A = f"{AR}.actor"
GRPO = ("algorithm.adv_estimator=grpo", f"{AR}.rollout.n=2", "data.train_batch_size=8")
ON = (f"{A}.strategy=megatron", f"{A}.megatron.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=4")


def problems(*given: str) -> list[str]:
    try:
        validate(load_config([*GRPO, *given]), need_data=False, need_model=False)
    except ConfigError as error:
        return list(error.problems)
    return []


def test_other_roles_follow_the_actor():
    parts = resolve(load_config(list(ON))).actor_rollout_ref
    assert (parts.ref.strategy, parts.ref.megatron.tensor_model_parallel_size) == ("megatron", 2)
    config = resolve(load_config([*ON, "critic.strategy=fsdp", f"{AR}.ref.megatron.tensor_model_parallel_size=4"]))
    assert config.critic.megatron.tensor_model_parallel_size == 1
    assert config.actor_rollout_ref.ref.megatron.tensor_model_parallel_size == 4
    assert resolve(load_config([])).actor_rollout_ref.actor.megatron.tensor_model_parallel_size == 1


def test_what_can_be_is_silent():
    assert problems(*ON) == []
    assert problems(*ON, f"{A}.use_kl_loss=true", f"{AR}.ref.strategy=fsdp") == []
    assert problems(f"{A}.strategy=megatron", "trainer.n_gpus_per_node=3") == []
    assert problems(*ON, "critic.optim.optimizer=Adafactor", "critic.param_offload=true") == [], "there is no critic"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((*ON[:2], "trainer.n_gpus_per_node=3"), [f"{ON[1]} does not divide its 3 processes"]),
        ((ON[0],), ["strategy=megatron needs more than one process", "trainer.n_gpus_per_node"]),
        (ON[1:], ["tensor_model_parallel_size=2 needs", f"{A}.strategy=megatron"]),
        ((*ON, f"{AR}.model.lora_rank=8"), ["lora_rank=8", "strategy=torch"]),
        ((*ON, f"{AR}.model.compile_layers=true"), ["compile_layers=true"]),
        ((*ON, f"{A}.optim.optimizer=Adafactor"), ["Adafactor", "AdamW or SGD"]),
        ((*ON, f"{A}.ulysses_sequence_parallel_size=2", f"{A}.use_kl_loss=false"), ["cuts matrices", "fsdp"]),
        ((*ON, f"{A}.use_kl_loss=true", f"{AR}.ref.param_offload=true"), [f"{AR}.ref.param_offload=true"]),
        ((*ON, "preference.use_weighting=true"), ["preference.use_weighting=true", "whole output layer"]),
    ],
)
def test_what_cannot_be_is_one_sentence(given, words):
    found = [text for text in problems(*given) if any(word in text for word in words)]
    assert len(found) == 1 and all(word in found[0] for word in words), problems(*given)


def test_every_role_that_cannot_be_has_its_sentence():
    given = ("trainer.n_gpus_per_node=3", "algorithm.adv_estimator=gae", f"{A}.use_kl_loss=true")
    found = problems(*ON[:2], *given)
    assert [text.split(".megatron")[0] for text in found] == [A, f"{AR}.ref", "critic"]


@pytest.mark.parametrize(
    ("key", "harmless", "refused"),
    [
        ("pipeline_model_parallel_size", "1", "2"),
        ("virtual_pipeline_model_parallel_size", "null", "2"),
        ("context_parallel_size", "1", "2"),
        ("expert_model_parallel_size", "1", "2"),
        ("expert_tensor_parallel_size", "null", "2"),
        ("param_offload", "false", "true"),
        ("override_transformer_config.num_layers_in_first_pipeline_stage", "null", "3"),
    ],
)
def test_splits_that_are_not_here_are_accepted_only_off(key, harmless, refused):
    load_config([f"{A}.megatron.{key}={harmless}"])
    with pytest.raises(ConfigError, match=key.rsplit(".", maxsplit=1)[-1]):
        load_config([f"{A}.megatron.{key}={refused}"])


def test_what_changes_no_result_is_accepted_with_a_notice():
    load_config([f"{A}.megatron.sequence_parallel=true", "critic.megatron.use_distributed_optimizer=true"])
    assert sum("megatron" in text for text in notices.seen()) == 2
    with pytest.raises(ConfigError, match="sequence_paralel"):
        load_config([f"{A}.megatron.sequence_paralel=true"])
