"""From the configuration tree to the plain settings of each worker: the only place where the two meet."""

from __future__ import annotations

from dataclasses import replace

from verl.config import (
    Config,
    MicroBatching,
    generates,
    max_sequence_length,
    micro_batching,
    needs_critic,
    needs_old_log_probs,
    needs_reference,
)
from verl.config.tree import Actor, Critic, MegatronConfig, MegatronSplit, Model, Optim, Ref
from verl.hardware import Choice, check_explicit, decide, environment_dtype
from verl.hardware.remedies import CRITIC_AWAY, CRITIC_OFFLOAD, OFFLOAD, REFERENCE_AWAY
from verl.models.settings import PACKED_ATTENTIONS, LoraSettings, ModelSettings
from verl.notices import notice
from verl.rewards.loading import read_function
from verl.rollout.base import SamplingParams
from verl.rollout.multi_turn.settings import MultiTurnSettings
from verl.rollout.remote.settings import RemoteSettings
from verl.train_engine.parallel import ParallelSettings, Recompute
from verl.train_engine.torch_engine import OptimizerSettings
from verl.trainer.planning import automatic, checkpointing_needed
from verl.trainer.rollout_split import rollout_split, splits_here
from verl.workers.settings import ActorSettings, CriticSettings, Cut, ReferenceSettings, RolloutSettings

REMOTE = ("vllm", "vllm_server", "sglang")
REMOTE_ONLY = (
    *("max_model_len", "tensor_model_parallel_size", "enforce_eager", "enable_chunked_prefill"),
    *("enable_prefix_caching", "free_cache_engine", "engine_kwargs", "server_url", "server_weights_dir"),
    "probe_tolerance",
)
"""Keys under ``actor_rollout_ref.rollout`` that the other engines do not read."""


def hardware_for(config: Config, choice: Choice | None = None) -> Choice:
    """What this machine (or the one of ``choice``) will use, with the user's explicit choices checked against it."""
    if choice is None:
        choice = decide(None if config.trainer.device == "auto" else config.trainer.device)
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    rollout_dtype = rollout.dtype if rollout.dtype != "auto" else environment_dtype() or "auto"
    choice = check_explicit(
        choice,
        dtype=model.dtype,
        attention=model.attn_implementation,
        rollout_engine=rollout.name,
        rollout_dtype=rollout_dtype,
        strict_engine=rollout.strict,
    )
    if choice.rollout_dtype != choice.dtype and choice.rollout_engine not in REMOTE:
        notice(
            f"The rollout works on the training weights, so it computes in {choice.dtype}; "
            f"the rollout dtype {choice.rollout_dtype} is not used."
        )
    return choice


def cut_of(batching: MicroBatching) -> Cut:
    """Micro-batches by rows where a number of rows was given, else by a token budget."""
    if batching.by == "rows":
        return Cut(max_rows=batching.rows, key=batching.key)
    return Cut(max_tokens=batching.tokens, key=batching.key)


def planned_cut(batching: MicroBatching, config: Config, choice: Choice, *, sharers: int = 1) -> Cut:
    """:func:`cut_of`, with the smaller token budget of the memory plan where memory decides.

    ``sharers``: devices that share the tokens of a micro-batch, so that it may have as many times the tokens.
    """
    cut = _planned_cut(batching, config, choice)
    return cut if cut.max_tokens is None else replace(cut, max_tokens=cut.max_tokens * sharers)


def _planned_cut(batching: MicroBatching, config: Config, choice: Choice) -> Cut:
    cut = cut_of(batching)
    tokens = automatic(config, choice).tokens if batching.by == "memory" else None
    if tokens is None or tokens >= batching.tokens:
        return cut
    notice(f"By the memory plan micro-batches have at most {tokens} tokens ({batching.key} sets another number).")
    return replace(cut, max_tokens=tokens)


def optimizer_of(
    optim: Optim, config: Config, choice: Choice, *, total_steps: int, grad_clip: float
) -> OptimizerSettings:
    """Optimizer settings; warm-up steps from their ratio where no number was given."""
    critic = optim is config.critic.optim
    offload = _offloaded(optim.offload, CRITIC_OFFLOAD if critic else OFFLOAD, config, choice)
    warmup = optim.lr_warmup_steps
    if warmup < 0:
        warmup = round(optim.lr_warmup_steps_ratio * total_steps)
    return OptimizerSettings(
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        betas=tuple(optim.betas),
        eps=optim.eps,
        kind=optim.optimizer.lower(),
        override=dict(optim.override_optimizer_config),
        schedule=optim.lr_scheduler_type,
        warmup_steps=warmup,
        total_steps=total_steps,
        min_lr_ratio=optim.min_lr_ratio,
        num_cycles=optim.num_cycles,
        grad_clip=grad_clip,
        offload=offload,
        max_nonfinite_steps=config.actor_rollout_ref.actor.max_nonfinite_steps,
    )


def model_of(model, choice: Choice, config: Config, *, offload: bool = False) -> ModelSettings:
    """Settings of one role's model. An attention that cannot run packed (eager) gets padded batches.

    ``offload``: its weights leave the device outside its phases.
    """
    packed = choice.attention in PACKED_ATTENTIONS
    return ModelSettings(
        path=model.path,
        dtype=choice.dtype,
        device=choice.device.kind,
        attention="auto" if packed else choice.attention,
        kernel=choice.attention if packed else "sdpa",
        trust_remote_code=model.trust_remote_code,
        override_config=dict(model.override_config),
        gradient_checkpointing=_checkpointing(model, choice, config),
        checkpoint_every=config.actor_rollout_ref.model.gradient_checkpointing_every,
        param_offload=offload,
    )


def _offloaded(asked: bool | None, key: str, config: Config, choice: Choice) -> bool:
    """Whether something is moved to host memory: as asked for, else on a GPU where the plan needs it."""
    if choice.device.kind != "cuda":
        if asked:
            notice(f"{key} has no effect here: the weights lie in host memory already.")
        return False
    if asked is not None:
        return asked
    plan = automatic(config, choice)
    needed = {
        OFFLOAD: plan.offload,
        CRITIC_OFFLOAD: plan.critic_offload,
        REFERENCE_AWAY: plan.reference_away,
        CRITIC_AWAY: plan.critic_away,
    }[key]
    if needed:
        notice(f"By the memory plan the run does not fit otherwise, so {key} is on ({key}=false turns it off).")
    return needed


def _checkpointing(model, choice: Choice, config: Config) -> bool:
    """As asked for; else on a GPU where the update does not fit without."""
    if model.enable_gradient_checkpointing is not None:
        return model.enable_gradient_checkpointing
    needed = checkpointing_needed(config, choice)
    if needed:
        notice(
            "By the memory plan the update does not fit with all activations kept, so they are recomputed "
            "(actor_rollout_ref.model.enable_gradient_checkpointing=false keeps them)."
        )
    return needed


def policy_of(model: Model, choice: Choice, config: Config) -> ModelSettings:
    """Settings of the trained policy: those of its model, and the adapters."""
    lora = None
    if trains_adapters(model):
        lora = LoraSettings(
            rank=model.lora_rank,
            alpha=model.lora_alpha,
            target_modules=model.target_modules,
            exclude_modules=model.exclude_modules,
            adapter_path=model.lora_adapter_path,
            seed=config.trainer.seed,
        )
    return replace(
        model_of(model, choice, config),
        lora=lora,
        quantization=model.quantization if lora is not None else None,
        compile_layers=model.compile_layers and choice.triton,
    )


def trains_adapters(model: Model) -> bool:
    """LoRA is on: the base weights are frozen, and serve as the reference."""
    return model.lora_rank > 0 or model.lora_adapter_path is not None


def actor_settings(config: Config, choice: Choice, total_steps: int) -> ActorSettings:
    """``config`` must be resolved."""
    parts = config.actor_rollout_ref
    actor, rollout = parts.actor, parts.rollout
    sharers = _sharers(actor)
    return ActorSettings(
        model=policy_of(parts.model, choice, config),
        optimizer=optimizer_of(actor.optim, config, choice, total_steps=total_steps, grad_clip=actor.grad_clip),
        rollout=RolloutSettings(
            engine=choice.rollout_engine,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            response_width=config.data.max_response_length,
            seed=rollout.seed,
            tensor_size=rollout_split(config, choice),
            multi_turn=multi_turn_settings(config),
            remote=remote_settings(config, choice),
        ),
        loss=_loss_of(config),
        temperature=learning_temperature(config),
        tokenizer_path=parts.model.tokenizer_path,
        chat_template=parts.model.custom_chat_template,
        update_cut=planned_cut(micro_batching(config, "actor"), config, choice, sharers=sharers),
        log_prob_cut=planned_cut(micro_batching(config, "old_log_prob"), config, choice, sharers=sharers),
        use_rollout_log_probs=config.algorithm.rollout_correction.bypass_mode,
        parallel=parallel_of(actor, "actor_rollout_ref.actor"),
        generates=config.trainer.schedule == "sync",
    )


def remote_settings(config: Config, choice: Choice) -> RemoteSettings | None:
    """None where another engine generates; a notice if it is told something that only these hear."""
    rollout, key = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    if choice.rollout_engine not in REMOTE:
        heard = {"tensor_model_parallel_size"} if splits_here(config, choice) else set()
        given = [n for n in REMOTE_ONLY if any(k.startswith(f"{key}.{n}") for k in config.explicit)]
        unheard = [name for name in given if name not in heard]
        if unheard:
            names = ", ".join(f"{key}.{name}" for name in unheard)
            notice(f"{names}: only vLLM and SGLang read this, and they are not used here.")
        return None
    kwargs = rollout.engine_kwargs
    return RemoteSettings(
        dtype=choice.rollout_dtype,
        max_model_len=rollout.max_model_len or max_sequence_length(config),
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        enforce_eager=rollout.enforce_eager,
        enable_chunked_prefill=rollout.enable_chunked_prefill,
        enable_prefix_caching=rollout.enable_prefix_caching,
        sleep=rollout.free_cache_engine,
        trust_remote_code=config.actor_rollout_ref.model.trust_remote_code,
        seed=int(rollout.seed or 0) % 2**31,
        engine_kwargs=dict(kwargs.sglang if choice.rollout_engine == "sglang" else kwargs.vllm),
        probe_tolerance=rollout.probe_tolerance,
        server_url=rollout.server_url,
        server_weights_dir=rollout.server_weights_dir,
    )


def multi_turn_settings(config: Config) -> MultiTurnSettings | None:
    """None where an answer is one turn."""
    turns, data = config.actor_rollout_ref.rollout.multi_turn, config.data
    if not turns.enable:
        return None
    environment = turns.environment
    if turns.environment_path is not None:
        path, _, name = turns.environment_path.rpartition(":")
        environment = read_function(path, name)
    return MultiTurnSettings(
        tools=turns.tool_config_path,
        environment=environment,
        format=turns.format,
        max_assistant_turns=turns.max_assistant_turns,
        max_user_turns=turns.max_user_turns,
        max_parallel_calls=turns.max_parallel_calls,
        max_response_chars=turns.max_tool_response_length,
        cut=turns.tool_response_truncate_side,
        timeout_s=turns.timeout_s,
        template_mode=data.apply_chat_template,
        template_kwargs=dict(data.apply_chat_template_kwargs),
        chat_template=config.actor_rollout_ref.model.custom_chat_template,
    )


def _loss_of(config: Config) -> Actor:
    """The ``actor`` group; in bypass mode with ``loss_type=reinforce`` its loss is the plain policy gradient."""
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    if correction.bypass_mode and correction.loss_type == "reinforce":
        return replace(actor, policy_loss=replace(actor.policy_loss, loss_mode="gpg"))
    return actor


def parallel_of(role: Actor | Critic | Ref, key: str, *, offload: bool = False) -> ParallelSettings:
    """How the role's weights are spread over its ranks; ``offload``: its shards lie in host memory."""
    sharding = role.fsdp_config
    return ParallelSettings(
        strategy=role.strategy or "auto",
        key=f"{key}.strategy",
        fsdp_size=sharding.fsdp_size,
        offload=offload,
        reshard_after_forward=sharding.reshard_after_forward,
        forward_prefetch=sharding.forward_prefetch,
        sequence_size=role.ulysses_sequence_parallel_size or 1,
        tensor_size=role.megatron.tensor_model_parallel_size or 1,
        pipeline_size=role.megatron.pipeline_model_parallel_size or 1,
        virtual_size=role.megatron.virtual_pipeline_model_parallel_size or 1,
        context_size=role.megatron.context_parallel_size or 1,
        sequence_parallel=role.megatron.sequence_parallel,
        distributed_optimizer=isinstance(role.megatron, MegatronConfig) and role.megatron.use_distributed_optimizer,
        recompute=_recompute_of(role.megatron),
    )


def _recompute_of(megatron: MegatronSplit) -> Recompute:
    """Nothing for a role that is not trained."""
    if not isinstance(megatron, MegatronConfig):
        return Recompute()
    override = megatron.override_transformer_config
    return Recompute(
        granularity=override.recompute_granularity,
        method=override.recompute_method or "uniform",
        num_layers=override.recompute_num_layers or 1,
        modules=tuple(override.recompute_modules),
    )


def _sharers(role: Actor | Critic | Ref) -> int:
    """Ranks that share the tokens of a micro-batch."""
    return (role.ulysses_sequence_parallel_size or 1) * (role.megatron.context_parallel_size or 1)


def learning_temperature(config: Config) -> float:
    """What logits are divided by where log-probs are learned: the temperature of the samples; 1 for given answers."""
    return (config.actor_rollout_ref.rollout.temperature or 1.0) if generates(config) else 1.0


def reference_settings(config: Config, choice: Choice) -> ReferenceSettings | None:
    """None if no KL is asked for, or if the frozen base under the adapters serves: then there is no second model."""
    own = config.preference.ref_model_path
    if not needs_reference(config) or (own is None and trains_adapters(config.actor_rollout_ref.model)):
        return None
    parts = config.actor_rollout_ref
    sharers = _sharers(parts.ref)
    cut = planned_cut(micro_batching(config, "ref"), config, choice, sharers=sharers)
    # a reference that follows the policy is written to, so it stays
    offload = not config.preference.sync_ref_model and _offloaded(
        parts.ref.param_offload, REFERENCE_AWAY, config, choice
    )
    model = model_of(parts.model, choice, config, offload=offload)
    model = model if own is None else replace(model, path=own)
    parallel = parallel_of(parts.ref, "actor_rollout_ref.ref", offload=offload)
    return ReferenceSettings(model, learning_temperature(config), cut, parallel)


def critic_settings(config: Config, choice: Choice, total_steps: int) -> CriticSettings | None:
    """None if the estimator needs no values."""
    if not needs_critic(config):
        return None
    critic = config.critic
    choice = check_explicit(choice, attention=critic.model.attn_implementation)
    offload = _offloaded(critic.param_offload, CRITIC_AWAY, config, choice)
    sharers = _sharers(critic)
    custom = critic.model.custom_cls
    own_class = (custom.path, custom.name) if custom.path is not None and custom.name is not None else None
    return CriticSettings(
        model=replace(model_of(critic.model, choice, config, offload=offload), custom_class=own_class),
        optimizer=optimizer_of(critic.optim, config, choice, total_steps=total_steps, grad_clip=critic.grad_clip),
        cliprange_value=critic.cliprange_value,
        loss_agg_mode=critic.loss_agg_mode,
        loss_scale_factor=config.actor_rollout_ref.actor.loss_scale_factor,
        update_cut=planned_cut(micro_batching(config, "critic"), config, choice, sharers=sharers),
        forward_cut=planned_cut(micro_batching(config, "critic_forward"), config, choice, sharers=sharers),
        parallel=parallel_of(critic, "critic", offload=offload),
    )


def train_sampling(config: Config) -> SamplingParams:
    """How training responses are drawn."""
    rollout = config.actor_rollout_ref.rollout
    return SamplingParams(
        max_tokens=config.data.max_response_length,
        temperature=rollout.temperature if rollout.do_sample else 0.0,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        stop=tuple(rollout.stop),
        stop_token_ids=tuple(rollout.stop_token_ids),
        ignore_eos=rollout.ignore_eos,
        repetition_penalty=rollout.repetition_penalty,
        min_tokens=rollout.min_tokens,
    )


def validation_sampling(config: Config) -> SamplingParams:
    """How validation responses are drawn: greedy unless ``val_kwargs.do_sample``."""
    rollout, val = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.val_kwargs
    return SamplingParams(
        max_tokens=config.data.max_response_length,
        temperature=val.temperature if val.do_sample else 0.0,
        top_k=val.top_k,
        top_p=val.top_p,
        stop=tuple(rollout.stop),
        stop_token_ids=tuple(rollout.stop_token_ids),
        ignore_eos=rollout.ignore_eos,
    )


def old_log_probs_needed(config: Config) -> bool:
    """Also where the off-policy metrics or importance weights are asked for: they compare before the update."""
    correction = config.algorithm.rollout_correction
    return needs_old_log_probs(config) or correction.rollout_is is not None


def algorithm_name(config: Config) -> str:
    """``PPO``, ``GRPO``, ...: the preset's name, else that of what sets the algorithm apart."""
    estimator = config.algorithm.adv_estimator
    return (config.algorithm.name or ("ppo" if estimator == "gae" else estimator)).upper()
