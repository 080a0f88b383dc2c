"""Options that must agree with each other.

:func:`contradictions` are errors; :func:`advice` is what is allowed and probably not meant.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from verl.config import names
from verl.config.derived import family, generates, max_sequence_length, needs_critic, processes
from verl.config.family_rules import family_advice, family_contradictions
from verl.config.megatron_rules import megatron_contradictions
from verl.config.scale_rules import scale_advice, scale_contradictions, schedule_contradictions
from verl.config.shard_rules import shard_contradictions
from verl.config.tree import Config

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"


def contradictions(config: Config, *, has_validation: bool) -> Iterator[str]:
    """A sentence for each contradiction in a resolved configuration; ``has_validation``: there are validation rows."""
    yield from _batches(config)
    yield from _losses(config)
    yield from _sampling(config)
    yield from _correction(config)
    yield from _optimizers(config)
    yield from _adapters(config)
    yield from _pairs(config)
    yield from _multi_turn(config)
    yield from _server(config)
    yield from family_contradictions(config)
    yield from scale_contradictions(config)
    yield from schedule_contradictions(config)
    yield from shard_contradictions(config)
    yield from megatron_contradictions(config)
    yield from _run(config, has_validation)


def _batches(config: Config) -> Iterator[str]:
    batch = config.data.train_batch_size
    for key, mini, used in (
        (_ACTOR, config.actor_rollout_ref.actor.ppo_mini_batch_size, True),
        ("critic", config.critic.ppo_mini_batch_size, needs_critic(config)),
    ):
        if used and mini is not None and mini > batch:
            yield (
                f"{key}.ppo_mini_batch_size={mini} is more than data.train_batch_size={batch}: "
                "both count prompts, and a mini-batch is a part of the batch"
            )
    filters = config.algorithm.filter_groups
    if filters.enable and config.actor_rollout_ref.rollout.n < 2:
        yield f"algorithm.filter_groups.enable needs {_ROLLOUT}.n above 1: a group of one answer never differs"
    if filters.enable and filters.metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        yield (
            "algorithm.filter_groups.metric=seq_final_reward has the KL in it, and that is computed for the groups "
            f"that were chosen: take metric=seq_reward, or the KL in the loss ({_ACTOR}.use_kl_loss=true)"
        )
    if config.data.train_max_samples == 0:
        yield "data.train_max_samples=0 leaves no training data: use -1 for all rows"


def _losses(config: Config) -> Iterator[str]:
    loss = config.actor_rollout_ref.actor.policy_loss
    if loss.clip_cov_lb >= loss.clip_cov_ub:
        yield f"{_ACTOR}.policy_loss: clip_cov_lb={loss.clip_cov_lb:g} must be below clip_cov_ub={loss.clip_cov_ub:g}"
    if family(config) == "ppo" and config.algorithm.adv_estimator == "gae" and config.critic.enable is False:
        yield "algorithm.adv_estimator=gae needs the value model that critic.enable=false turns off"
    buffer, length = config.reward.overlong_buffer, config.data.max_response_length
    if buffer.enable and not 0 < (buffer.len or 0) <= length:
        yield (f"reward.overlong_buffer.len={buffer.len} must be above 0 and at most data.max_response_length={length}")


def _sampling(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.temperature == 0:
        yield f"{_ROLLOUT}.temperature must be greater than 0 in training: log-probs are divided by it"
    if rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature == 0:
        yield f"{_ROLLOUT}.val_kwargs.do_sample=true needs val_kwargs.temperature greater than 0"
    if rollout.min_tokens > config.data.max_response_length:
        yield (
            f"{_ROLLOUT}.min_tokens={rollout.min_tokens} is more than an answer may have: raise "
            f"data.max_response_length={config.data.max_response_length}"
        )
    if "" in rollout.stop:
        yield f"{_ROLLOUT}.stop holds an empty text, which would end every answer at its first token: take it out"


def _correction(config: Config) -> Iterator[str]:
    key, correction = "algorithm.rollout_correction", config.algorithm.rollout_correction
    filters = config.algorithm.filter_groups
    if filters.enable and filters.carry and not (correction.bypass_mode or correction.rollout_is):
        yield (
            f"algorithm.filter_groups.carry=true trains on rows that the weights of the step before sampled: set "
            f"{key}.bypass_mode=true or {key}.rollout_is, or carry=false"
        )
    if correction.bypass_mode and (correction.rollout_is or correction.rollout_rs):
        yield (
            f"{key}.bypass_mode=true takes the engine's log-probs as the old ones, so nothing is left to correct: "
            f"leave {key}.rollout_is and {key}.rollout_rs out"
        )
    if correction.loss_type == "reinforce" and not correction.bypass_mode:
        yield f"{key}.loss_type=reinforce needs {key}.bypass_mode=true"
    if correction.rollout_rs is None:
        if correction.rollout_rs_threshold is not None:
            yield f"{key}.rollout_rs_threshold is given without {key}.rollout_rs"
        return
    rules = [rule.strip() for rule in correction.rollout_rs.split(",")]
    for rule in rules:
        if rule not in names.ROLLOUT_RS:
            yield f"{key}.rollout_rs={rule!r} does not exist; there are {', '.join(names.ROLLOUT_RS)}"
    bounds = [] if correction.rollout_rs_threshold is None else correction.rollout_rs_threshold.split(",")
    if len(bounds) not in (1, len(rules)):
        given = correction.rollout_rs_threshold
        yield f"{key}.rollout_rs_threshold={given}: give one bound, or one for each of {len(rules)} rules"
    for bound in bounds:
        if not _is_bound(bound):
            yield f"{key}.rollout_rs_threshold={bound!r}: expected a positive number, or two as low_high"


def _is_bound(text: str) -> bool:
    try:
        numbers = [float(part) for part in text.strip().split("_")]
    except ValueError:
        return False
    return len(numbers) <= 2 and all(number > 0 for number in numbers) and numbers == sorted(numbers)


def _optimizers(config: Config) -> Iterator[str]:
    for key, optim in (
        (f"{_ACTOR}.optim", config.actor_rollout_ref.actor.optim),
        ("critic.optim", config.critic.optim),
    ):
        if optim.lr_warmup_steps > 0 and optim.lr_warmup_steps_ratio > 0:
            steps, ratio = optim.lr_warmup_steps, optim.lr_warmup_steps_ratio
            yield f"{key}: give lr_warmup_steps={steps} or lr_warmup_steps_ratio={ratio:g}, not both"


def _adapters(config: Config) -> Iterator[str]:
    model = config.actor_rollout_ref.model
    if model.quantization is None:
        return
    key = f"actor_rollout_ref.model.quantization={model.quantization}"
    if not model.lora_rank and model.lora_adapter_path is None:
        yield f"{key} freezes the weights: set actor_rollout_ref.model.lora_rank (for example 16) to train adapters"
    if processes(config) > 1:
        yield f"{key} trains in one process: set trainer.n_gpus_per_node=1 and trainer.nnodes=1"
    engine = config.actor_rollout_ref.rollout.name
    if engine not in ("auto", "native", "hf"):
        yield f"{key}: {_ROLLOUT}.name={engine} has weights of its own; use auto, native or hf"
    if model.compile_layers:
        yield f"{key} does not go with actor_rollout_ref.model.compile_layers=true: turn one of them off"


def _pairs(config: Config) -> Iterator[str]:
    """Keys that need each other."""
    for key, custom in (("data", config.data.custom_cls), ("critic.model", config.critic.model.custom_cls)):
        if (custom.path is None) != (custom.name is None):
            yield f"{key}.custom_cls needs both path (a Python file) and name (the class in it)"
    if config.critic.model.custom_cls.path is not None and processes(config) > 1:
        yield "critic.model.custom_cls trains in one process: set trainer.n_gpus_per_node=1, or leave it out"
    reward = config.reward
    if reward.reward_fn is not None and reward.custom_reward_function.path is not None:
        yield "reward.reward_fn and reward.custom_reward_function.path are both given: keep one"


def _server(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "vllm_server" and not rollout.server_url:
        yield f"{_ROLLOUT}.name=vllm_server needs {_ROLLOUT}.server_url, the address of the server"
    if rollout.server_url and rollout.name != "vllm_server":
        yield f"{_ROLLOUT}.server_url is read where {_ROLLOUT}.name=vllm_server, and it is {rollout.name}"


def _multi_turn(config: Config) -> Iterator[str]:
    turns, key = config.actor_rollout_ref.rollout.multi_turn, f"{_ROLLOUT}.multi_turn"
    given = [
        name for name in ("tool_config_path", "environment", "environment_path") if getattr(turns, name) is not None
    ]
    if turns.enable and not given:
        yield f"{key}.enable=true needs {key}.tool_config_path (a Python file of tools) or {key}.environment_path"
    if len(given) > 1:
        yield f"{key}: {' and '.join(given)} are given: keep one"
    path = turns.environment_path
    if path is not None and not os.path.isfile(path.rpartition(":")[0]):
        yield f"{key}.environment_path={path} must name a function of a file that exists, as FILE.py:NAME"
    if turns.enable and config.algorithm.adv_estimator == "remax":
        yield "algorithm.adv_estimator=remax compares with a greedy answer of one turn: choose another, or one turn"


def _run(config: Config, has_validation: bool) -> Iterator[str]:
    trainer = config.trainer
    for name in ("save_freq", "test_freq", "sample_freq"):
        if getattr(trainer, name) == 0:
            yield f"trainer.{name} must be -1 (never) or at least 1, got 0"
    if trainer.resume_mode == "resume_path":
        path = trainer.resume_from_path
        if path is None:
            yield "trainer.resume_mode=resume_path needs trainer.resume_from_path, a global_step_N folder"
        elif "global_step_" not in path:
            yield f"trainer.resume_from_path={path} must name a global_step_N folder"
        elif not os.path.isdir(path):
            yield f"trainer.resume_from_path={path}: no such folder"
    if trainer.val_only and not has_validation:
        yield "trainer.val_only=true needs data.val_files"
    if trainer.keep_best and (trainer.test_freq < 1 or not has_validation):
        yield "trainer.keep_best=true needs data.val_files and trainer.test_freq of at least 1"
    if trainer.sample_freq > 0 and not trainer.sample_prompts:
        yield "trainer.sample_freq needs trainer.sample_prompts, a list of prompts or a text file"
    if config.actor_rollout_ref.rollout.name == "auto" and config.actor_rollout_ref.rollout.strict:
        yield f"{_ROLLOUT}.strict=true needs {_ROLLOUT}.name: auto has nothing to insist on"


def advice(config: Config, *, has_validation: bool) -> Iterator[str]:
    """A sentence for each thing that works and is probably not meant. Takes the configuration before ``resolve``."""
    algorithm, rollout, actor = config.algorithm, config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    yield from family_advice(config)
    yield from scale_advice(config)
    if family(config) == "ppo" and algorithm.adv_estimator in names.GROUP_ESTIMATORS and rollout.n == 1:
        yield (
            f"algorithm.adv_estimator={algorithm.adv_estimator} compares the answers to one prompt, "
            f"and {_ROLLOUT}.n=1 gives it nothing to compare: use 4 to 16"
        )
    if generates(config) and rollout.n > 1 and not rollout.do_sample:
        yield f"{_ROLLOUT}.do_sample=false makes all {rollout.n} answers to a prompt the same"
    mini, batch = actor.ppo_mini_batch_size, config.data.train_batch_size
    if mini is not None and batch % mini:
        yield f"data.train_batch_size={batch} in mini-batches of {mini}: the last one has {batch % mini} prompts"
    if config.given("data.gen_batch_size") and not algorithm.filter_groups.enable:
        yield "data.gen_batch_size is used only with algorithm.filter_groups.enable=true"
    if algorithm.kl_ctrl.type == "adaptive" and not algorithm.use_kl_in_reward:
        yield "algorithm.kl_ctrl.type=adaptive steers the KL in the reward, which is off (algorithm.use_kl_in_reward)"
    if config.trainer.critic_warmup > 0 and not needs_critic(config):
        yield "trainer.critic_warmup has no effect without a value model"
    if config.critic.enable and algorithm.adv_estimator != "gae":
        yield f"critic.enable=true trains a value model that adv_estimator={algorithm.adv_estimator} does not use"
    if actor.use_kl_loss and algorithm.use_kl_in_reward:
        yield "the KL against the reference is in the reward and in the loss: usually one is meant"
    yield from _run_advice(config, has_validation)
    yield from _micro_batch_advice(config)


def _run_advice(config: Config, has_validation: bool) -> Iterator[str]:
    trainer = config.trainer
    if trainer.test_freq > 0 and not has_validation:
        yield "trainer.test_freq has no effect without data.val_files"
    if trainer.resume_from_path is not None and trainer.resume_mode != "resume_path":
        yield "trainer.resume_from_path is read only with trainer.resume_mode=resume_path"


def _micro_batch_advice(config: Config) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    if actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu is not None:
        yield f"{_ACTOR}.use_dynamic_bsz=true cuts by tokens, so ppo_micro_batch_size_per_gpu is not used"
    longest = max_sequence_length(config)
    if actor.use_dynamic_bsz and actor.ppo_max_token_len_per_gpu < longest:
        yield (
            f"{_ACTOR}.ppo_max_token_len_per_gpu={actor.ppo_max_token_len_per_gpu} is less than prompt and response "
            f"together ({longest}): a longer sequence is a micro-batch by itself"
        )
