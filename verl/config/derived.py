"""What follows from a configuration: values that follow others, and questions that the trainer asks.

Pure functions; none changes its argument. All accept a configuration before or after :func:`resolve`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from verl.config.fields import copy_tree
from verl.config.names import LABEL_LOSSES, REFERENCE_FREE
from verl.config.presets import FAMILIES
from verl.config.tree import Actor, Config, Critic, Ref
from verl.errors import ConfigError
from verl.notices import notice

Family = Literal["ppo", "sft", "preference", "reward_model", "online_preference", "distillation"]
Pass = Literal["actor", "ref", "old_log_prob", "critic", "critic_forward"]


@dataclass(frozen=True)
class MicroBatching:
    """How a forward or backward pass is cut.

    Attributes:
        by: ``rows`` (a fixed number of sequences), ``tokens`` (a fixed budget), or ``memory`` (start from the budget,
            go down when memory runs out, keep what was learned).
        rows: sequences a micro-batch, for ``rows``.
        tokens: prompt and response tokens a micro-batch, for ``tokens`` and ``memory``. A longer sequence is alone.
        key: the configuration key that changes it, for messages.
    """

    by: Literal["rows", "tokens", "memory"]
    rows: int | None
    tokens: int
    key: str


def resolve(config: Config) -> Config:
    """A copy in which every option that follows another one has its value. Idempotent."""
    config = copy_tree(config)
    data, trainer = config.data, config.trainer
    actor, rollout, ref = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.actor_rollout_ref.ref
    data.seed = trainer.seed if data.seed is None else data.seed
    data.gen_batch_size = data.gen_batch_size or data.train_batch_size
    _fill_actor(actor, config)
    rollout.seed = trainer.seed if rollout.seed is None else rollout.seed
    for role in (ref, rollout):
        if role.log_prob_use_dynamic_bsz is None:
            role.log_prob_use_dynamic_bsz = actor.use_dynamic_bsz
        role.log_prob_max_token_len_per_gpu = role.log_prob_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu
    if config.reward.overlong_buffer.len is None:
        config.reward.overlong_buffer.len = max(1, data.max_response_length // 5)  # DAPO: 4096 of 20480
    _fill_correction(config)
    ref.strategy = ref.strategy or actor.strategy
    config.critic.strategy = config.critic.strategy or actor.strategy
    for role in (ref, config.critic):
        role.ulysses_sequence_parallel_size = (
            role.ulysses_sequence_parallel_size or actor.ulysses_sequence_parallel_size
        )
    for role in (actor, ref, config.critic):
        _fill_megatron(role, actor)
    config.critic.enable = needs_critic(config)
    _fill_critic(config.critic, actor, config)
    if trainer.default_local_dir is None:
        trainer.default_local_dir = os.path.join("checkpoints", trainer.project_name, trainer.experiment_name)
    config.actor_rollout_ref.model.tokenizer_path = tokenizer_path(config)
    return config


def _fill_correction(config: Config) -> None:
    """Samples of older weights get truncated importance weights a token, unless something else is asked for."""
    correction = config.algorithm.rollout_correction
    asked = config.given("algorithm.rollout_correction.rollout_is")
    if config.trainer.schedule == "one_step_off" and not (asked or correction.rollout_is or correction.bypass_mode):
        correction.rollout_is = "token"


def _fill_megatron(role: Actor | Ref | Critic, actor: Actor) -> None:
    """How Megatron lays a role's model out; where it says nothing, as it lays out the actor's."""
    own = role.megatron
    followed = actor.megatron if role.strategy == "megatron" else None
    if own.pipeline_model_parallel_size is not None:  # runs of layers belong to the pipeline
        own.virtual_pipeline_model_parallel_size = own.virtual_pipeline_model_parallel_size or 1
    for name in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
    ):
        size = getattr(own, name) or (followed and getattr(followed, name)) or 1
        setattr(own, name, size)


def _fill_actor(actor: Actor, config: Config) -> None:
    actor.ppo_mini_batch_size = actor.ppo_mini_batch_size or config.data.train_batch_size
    actor.clip_ratio_low, actor.clip_ratio_high = clip_range(actor)
    if actor.data_loader_seed is None:
        actor.data_loader_seed = config.trainer.seed
    if actor.loss_scale_factor is None:
        actor.loss_scale_factor = float(config.data.max_response_length)


def _fill_critic(critic: Critic, actor: Actor, config: Config) -> None:
    for name in ("ppo_mini_batch_size", "use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_epochs", "shuffle"):
        if getattr(critic, name) is None:
            setattr(critic, name, getattr(actor, name))
    critic.loss_agg_mode = critic.loss_agg_mode or actor.loss_agg_mode
    if critic.forward_micro_batch_size_per_gpu is None:
        critic.forward_micro_batch_size_per_gpu = critic.ppo_micro_batch_size_per_gpu
    policy, model = config.actor_rollout_ref.model, critic.model
    if model.path is None:
        model.path = policy.path
        model.override_config = {**policy.override_config, **model.override_config}
    for name in ("trust_remote_code", "enable_gradient_checkpointing", "external_lib", "attn_implementation"):
        if getattr(model, name) is None:
            setattr(model, name, getattr(policy, name))


def clip_range(actor: Actor) -> tuple[float, float]:
    """Lower and upper clip range: each its own value, else ``clip_ratio``."""
    low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    return low, high


def tokenizer_path(config: Config) -> str | None:
    """Where the tokenizer lies: ``data.tokenizer``, else ``model.tokenizer_path``, else the model's folder."""
    model = config.actor_rollout_ref.model
    return config.data.tokenizer or model.tokenizer_path or model.path


def family(config: Config) -> Family:
    """Which kind of training step ``algorithm.name`` has."""
    return FAMILIES.get(config.algorithm.name or "", "ppo")  # type: ignore[return-value]


def generates(config: Config) -> bool:
    """Whether training steps sample answers; the others read them from the data."""
    return family(config) in ("ppo", "online_preference", "distillation")


def needs_critic(config: Config) -> bool:
    """Whether a value model is trained: as ``critic.enable`` says, else only for gae."""
    if family(config) != "ppo":
        return False
    if config.critic.enable is not None:
        return config.critic.enable
    return config.algorithm.adv_estimator == "gae"


def needs_reference(config: Config) -> bool:
    """Whether a frozen reference is needed: a KL in the reward or in the loss, or a preference loss with one."""
    if family(config) in ("preference", "online_preference"):
        return config.preference.loss_type not in REFERENCE_FREE
    if family(config) != "ppo":
        return False
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss


def optimizer_steps_per_rollout(config: Config) -> int:
    """Updates of the policy for each full training batch."""
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size or config.data.train_batch_size
    return config.actor_rollout_ref.actor.ppo_epochs * -(-config.data.train_batch_size // mini)


def needs_old_log_probs(config: Config) -> bool:
    """Whether old log-probs need a pass of their own.

    They do not if the update's own detached log-probs serve: one optimizer step a rollout, no dropout, and nothing
    before the update that reads them (a KL in the reward, a rejection rule). In bypass mode the rollout's serve.
    """
    correction = config.algorithm.rollout_correction
    if correction.bypass_mode:
        return False
    read_before = config.algorithm.use_kl_in_reward or correction.rollout_rs is not None
    read_before = read_before or config.trainer.schedule != "sync"  # the samples are those of older weights
    return read_before or _keeps_dropout(config) or optimizer_steps_per_rollout(config) > 1


def _keeps_dropout(config: Config) -> bool:
    """Whether the policy drops activations in training: it does where ``override_config`` says so, and only there."""
    return any("drop" in name and value for name, value in config.actor_rollout_ref.model.override_config.items())


def own_pools(config: Config) -> dict[str, tuple[int, int]]:
    """Role → (devices a node, nodes) of the roles that have devices of their own."""
    ref, critic, rollout = config.actor_rollout_ref.ref, config.critic, config.actor_rollout_ref.rollout
    roles = {
        "reference": (ref, needs_reference(config) and ref.enable_resource_pool),
        "critic": (critic, needs_critic(config) and critic.enable_resource_pool),
        "rollout": (rollout, config.trainer.schedule == "one_step_off" and rollout.nnodes > 0),
    }
    return {
        name: (role.n_gpus_per_node or config.trainer.n_gpus_per_node, role.nnodes)
        for name, (role, apart) in roles.items()
        if apart
    }


def processes(config: Config) -> int:
    """Ranks of all roles together. With one, everything is in this process and there is no Ray."""
    own = sum(each * nodes for each, nodes in own_pools(config).values())
    return config.trainer.n_gpus_per_node * config.trainer.nnodes + own


def samples_per_step(config: Config) -> int:
    """Responses in a full training batch."""
    each = config.actor_rollout_ref.rollout.n if generates(config) else 1
    if family(config) in ("preference", "reward_model"):
        each = 1 if config.preference.loss_type in LABEL_LOSSES and family(config) == "preference" else 2
    return config.data.train_batch_size * each


def max_sequence_length(config: Config) -> int:
    """Longest prompt and response together, in tokens."""
    if not generates(config):
        return config.data.max_length
    return config.data.max_prompt_length + config.data.max_response_length


def fit_batch_to_rows(config: Config, rows: int) -> Config:
    """The configuration for a data set of ``rows`` rows (after filtering).

    A data set smaller than a batch becomes the batch if the batch size was not given, or if ``data.last_batch=short``.

    Raises:
        ConfigError: no rows, or fewer than ``data.train_batch_size`` asks for.
    """
    wanted = config.data.train_batch_size
    if rows >= wanted or (rows > 0 and config.data.last_batch == "short"):
        return config
    if rows == 0:
        raise ConfigError("the training data has no rows left: check data.train_files and data.filter_overlong_prompts")
    if config.given("data.train_batch_size"):
        raise ConfigError(
            f"data.train_batch_size={wanted} is more than the {rows} rows of the training data: "
            f"set data.train_batch_size={rows} or less, or data.last_batch=short"
        )
    notice(f"the training data has {rows} rows, so data.train_batch_size is {rows} (not {wanted})")
    config = copy_tree(config)
    config.data.train_batch_size = rows
    for role in (config.actor_rollout_ref.actor, config.critic):
        if role.ppo_mini_batch_size is not None:
            role.ppo_mini_batch_size = min(role.ppo_mini_batch_size, rows)
    config.data.gen_batch_size = min(config.data.gen_batch_size or rows, rows)
    return config


def micro_batching(config: Config, step: Pass) -> MicroBatching:
    """How one kind of pass is cut: by tokens if dynamic, by rows if a number was given, else by memory."""
    config = resolve(config)
    parts = config.actor_rollout_ref
    role, prefix, rows_name, dynamic_name, tokens_name = {
        "actor": (parts.actor, "actor_rollout_ref.actor", *_PPO),
        "ref": (parts.ref, "actor_rollout_ref.ref", *_LOG_PROB),
        "old_log_prob": (parts.rollout, "actor_rollout_ref.rollout", *_LOG_PROB),
        "critic": (config.critic, "critic", *_PPO),
        "critic_forward": (config.critic, "critic", "forward_micro_batch_size_per_gpu", *_PPO[1:]),
    }[step]
    rows, tokens = getattr(role, rows_name), getattr(role, tokens_name)
    if getattr(role, dynamic_name):
        return MicroBatching("tokens", None, tokens, f"{prefix}.{tokens_name}")
    if rows is not None:
        return MicroBatching("rows", rows, tokens, f"{prefix}.{rows_name}")
    return MicroBatching("memory", None, tokens, f"{prefix}.{rows_name}")


_PPO = ("ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", "ppo_max_token_len_per_gpu")
_LOG_PROB = ("log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu")
