"""How the keys of training with Megatron-Core are read and refused."""

from __future__ import annotations

from functools import partial

import pytest
from config_problems import problems

from verl import notices
from verl.config import load_config, resolve
from verl.errors import ConfigError
from verl.train_engine.parallel import Recompute
from verl.trainer.settings import parallel_of

AR = "actor_rollout_ref"
A = f"{AR}.actor"
M = f"{A}.megatron"
GRPO = ("algorithm.adv_estimator=grpo", f"{AR}.rollout.n=2", "data.train_batch_size=8")
of_grpo = partial(problems, *GRPO)
ON = (f"{A}.strategy=megatron", f"{A}.megatron.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=4")


def test_other_roles_follow_the_actor():
    parts = resolve(load_config(list(ON))).actor_rollout_ref
    assert (parts.ref.strategy, parts.ref.megatron.tensor_model_parallel_size) == ("megatron", 2)
    config = resolve(load_config([*ON, "critic.strategy=fsdp", f"{AR}.ref.megatron.tensor_model_parallel_size=4"]))
    assert config.critic.megatron.tensor_model_parallel_size == 1
    assert config.actor_rollout_ref.ref.megatron.tensor_model_parallel_size == 4
    assert resolve(load_config([])).actor_rollout_ref.actor.megatron.tensor_model_parallel_size == 1


def test_what_can_be_is_silent():
    assert of_grpo(*ON) == []
    assert of_grpo(*ON, f"{A}.use_kl_loss=true", f"{AR}.ref.strategy=fsdp") == []
    assert of_grpo(f"{A}.strategy=megatron", "trainer.n_gpus_per_node=3") == []
    assert of_grpo(*ON, "critic.optim.optimizer=Adafactor", "critic.param_offload=true") == [], "there is no critic"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((*ON[:2], "trainer.n_gpus_per_node=3"), [f"{ON[1]} does not divide its 3 processes"]),
        ((ON[0],), ["strategy=megatron needs more than one process", "trainer.n_gpus_per_node"]),
        (ON[1:], ["tensor_model_parallel_size=2 needs", f"{A}.strategy=megatron"]),
        ((*ON, f"{AR}.model.lora_rank=8"), ["lora_rank=8", "strategy=torch"]),
        ((*ON, f"{AR}.model.compile_layers=true"), ["compile_layers=true"]),
        ((*ON, f"{A}.optim.optimizer=Adafactor"), ["Adafactor", "AdamW or SGD"]),
        ((*ON, f"{A}.ulysses_sequence_parallel_size=2", f"{A}.use_kl_loss=false"), ["context_parallel_size"]),
        ((*ON, f"{M}.pipeline_model_parallel_size=3"), ["size=2 times pipeline_model_parallel_size=3", "4 processes"]),
        ((*ON, f"{M}.context_parallel_size=4"), ["times context_parallel_size=4 does not divide", "4 processes"]),
        (
            (*ON, f"{M}.virtual_pipeline_model_parallel_size=2"),
            ["virtual_pipeline", "pipeline_model_parallel_size above"],
        ),
        ((f"{M}.pipeline_model_parallel_size=2",), ["pipeline_model_parallel_size=2 needs", f"{A}.strategy=megatron"]),
        (
            (*ON, f"{M}.override_transformer_config.recompute_method=block"),
            ["recompute_method=block", "granularity=full"],
        ),
        (
            (*ON, f"{M}.override_transformer_config.recompute_modules=[moe_act]"),
            ["recompute_modules", "core_attn, mlp, layernorm"],
        ),
        ((*ON, f"{A}.use_kl_loss=true", f"{AR}.ref.param_offload=true"), [f"{AR}.ref.param_offload=true"]),
        ((*ON, "preference.use_weighting=true"), ["preference.use_weighting=true", "whole output layer"]),
    ],
)
def test_what_cannot_be_is_one_sentence(given, words):
    found = [text for text in of_grpo(*given) if any(word in text for word in words)]
    assert len(found) == 1 and all(word in found[0] for word in words), of_grpo(*given)


def test_every_role_that_cannot_be_has_its_sentence():
    given = ("trainer.n_gpus_per_node=3", "algorithm.adv_estimator=gae", f"{A}.use_kl_loss=true")
    found = of_grpo(*ON[:2], *given)
    assert [text.split(".megatron")[0] for text in found] == [A, f"{AR}.ref", "critic"]


@pytest.mark.parametrize(
    ("key", "harmless", "refused"),
    [
        ("dynamic_context_parallel", "false", "true"),
        ("param_offload", "false", "true"),
        ("override_transformer_config.num_layers_in_first_pipeline_stage", "null", "3"),
    ],
)
def test_splits_that_are_not_here_are_accepted_only_off(key, harmless, refused):
    load_config([f"{A}.megatron.{key}={harmless}"])
    with pytest.raises(ConfigError, match=key.rsplit(".", maxsplit=1)[-1]):
        load_config([f"{A}.megatron.{key}={refused}"])


def test_what_changes_no_result_is_accepted_with_a_notice():
    ref = f"{AR}.ref.megatron"
    load_config([f"{ref}.use_distributed_optimizer=true", f"{ref}.override_transformer_config.recompute_method=block"])
    assert sum("the reference has no" in text for text in notices.seen()) == 2
    load_config([f"{M}.expert_model_parallel_size=2", f"{M}.expert_tensor_parallel_size=1"])
    assert sum("whole experts lie over" in text for text in notices.seen()) == 2
    with pytest.raises(ConfigError, match="sequence_paralel"):
        load_config([f"{A}.megatron.sequence_paralel=true"])


def test_a_role_with_a_pipeline_of_its_own_takes_no_runs_from_the_actor():
    given = (f"{M}.pipeline_model_parallel_size=2", f"{M}.virtual_pipeline_model_parallel_size=2")
    config = resolve(load_config([*ON, *given, "critic.megatron.pipeline_model_parallel_size=4"]))
    assert config.actor_rollout_ref.ref.megatron.virtual_pipeline_model_parallel_size == 2
    assert config.critic.megatron.virtual_pipeline_model_parallel_size == 1


def test_what_the_model_is_computed_with_reaches_the_engine():
    recompute = f"{M}.override_transformer_config.recompute"
    given = (f"{M}.context_parallel_size=2", f"{M}.pipeline_model_parallel_size=2", f"{M}.sequence_parallel=false")
    given += (f"{recompute}_granularity=full", f"{recompute}_num_layers=3", f"{recompute}_method=block")
    parallel = parallel_of(resolve(load_config([*ON, *given])).actor_rollout_ref.actor, A)
    assert (parallel.tensor_size, parallel.pipeline_size, parallel.context_size) == (2, 2, 2)
    assert not parallel.sequence_parallel and parallel.distributed_optimizer
    assert parallel.recompute == Recompute("full", "block", 3)
