"""From the configuration tree to the plain settings of each worker: the only place where the two meet."""

from __future__ import annotations

from dataclasses import replace

from verl.config import (
    Config,
    MicroBatching,
    micro_batching,
    needs_critic,
    needs_old_log_probs,
    needs_reference,
)
from verl.config.tree import Actor, Model, Optim
from verl.hardware import Choice, check_explicit, decide, environment_dtype
from verl.models.settings import PACKED_ATTENTIONS, LoraSettings, ModelSettings
from verl.notices import notice
from verl.rollout.base import SamplingParams
from verl.train_engine.torch_engine import OptimizerSettings
from verl.trainer.planning import checkpointing_needed
from verl.workers.settings import ActorSettings, CriticSettings, Cut, ReferenceSettings, RolloutSettings


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
    if choice.rollout_dtype != choice.dtype:
        notice(
            f"The rollout works on the training weights, so it computes in {choice.dtype}; "
            f"the rollout dtype {choice.rollout_dtype} is not used."
        )
    if config.trainer.n_gpus_per_node * config.trainer.nnodes > 1:
        notice("This version trains in one process; trainer.n_gpus_per_node and trainer.nnodes above 1 are not used.")
    return choice


def cut_of(batching: MicroBatching) -> Cut:
    """Micro-batches by rows where a number of rows was given, else by a token budget."""
    if batching.by == "rows":
        return Cut(max_rows=batching.rows, key=batching.key)
    return Cut(max_tokens=batching.tokens, key=batching.key)


def optimizer_of(
    optim: Optim, config: Config, choice: Choice, *, total_steps: int, grad_clip: float
) -> OptimizerSettings:
    """Optimizer settings; warm-up steps from their ratio where no number was given."""
    if optim.offload and choice.device.kind != "cuda":
        notice("optim.offload has no effect here: the weights lie in host memory already.")
    warmup = optim.lr_warmup_steps
    if warmup < 0:
        warmup = round(optim.lr_warmup_steps_ratio * total_steps)
    return OptimizerSettings(
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        betas=tuple(optim.betas),
        eps=optim.eps,
        kind=optim.optimizer.lower(),
        schedule=optim.lr_scheduler_type,
        warmup_steps=warmup,
        total_steps=total_steps,
        min_lr_ratio=optim.min_lr_ratio,
        num_cycles=optim.num_cycles,
        grad_clip=grad_clip,
        offload=optim.offload and choice.device.kind == "cuda",
        max_nonfinite_steps=config.actor_rollout_ref.actor.max_nonfinite_steps,
    )


def model_of(model, choice: Choice, config: Config) -> ModelSettings:
    """Settings of one role's model. An attention that cannot run packed (eager) gets padded batches."""
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
    )


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
    return replace(model_of(model, choice, config), lora=lora, compile_layers=model.compile_layers and choice.triton)


def trains_adapters(model: Model) -> bool:
    """LoRA is on: the base weights are frozen, and serve as the reference."""
    return model.lora_rank > 0 or model.lora_adapter_path is not None


def actor_settings(config: Config, choice: Choice, total_steps: int) -> ActorSettings:
    """``config`` must be resolved."""
    parts = config.actor_rollout_ref
    actor, rollout = parts.actor, parts.rollout
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
        ),
        loss=_loss_of(config),
        temperature=rollout.temperature or 1.0,
        tokenizer_path=parts.model.tokenizer_path,
        chat_template=parts.model.custom_chat_template,
        update_cut=cut_of(micro_batching(config, "actor")),
        log_prob_cut=cut_of(micro_batching(config, "old_log_prob")),
        use_rollout_log_probs=config.algorithm.rollout_correction.bypass_mode,
    )


def _loss_of(config: Config) -> Actor:
    """The ``actor`` group; in bypass mode with ``loss_type=reinforce`` its loss is the plain policy gradient."""
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    if correction.bypass_mode and correction.loss_type == "reinforce":
        return replace(actor, policy_loss=replace(actor.policy_loss, loss_mode="gpg"))
    return actor


def reference_settings(config: Config, choice: Choice) -> ReferenceSettings | None:
    """None if no KL is asked for, or if the frozen base under the adapters serves: then there is no second model."""
    if not needs_reference(config) or trains_adapters(config.actor_rollout_ref.model):
        return None
    parts = config.actor_rollout_ref
    cut = cut_of(micro_batching(config, "ref"))
    return ReferenceSettings(model_of(parts.model, choice, config), parts.rollout.temperature or 1.0, cut)


def critic_settings(config: Config, choice: Choice, total_steps: int) -> CriticSettings | None:
    """None if the estimator needs no values."""
    if not needs_critic(config):
        return None
    critic = config.critic
    return CriticSettings(
        model=model_of(critic.model, choice, config),
        optimizer=optimizer_of(critic.optim, config, choice, total_steps=total_steps, grad_clip=critic.grad_clip),
        cliprange_value=critic.cliprange_value,
        loss_agg_mode=critic.loss_agg_mode,
        loss_scale_factor=config.actor_rollout_ref.actor.loss_scale_factor,
        update_cut=cut_of(micro_batching(config, "critic")),
        forward_cut=cut_of(micro_batching(config, "critic_forward")),
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
