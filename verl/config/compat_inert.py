"""verl's keys that have no counterpart here, each with its reason.

Most ask for what is always so, or for what does not exist here and changes no result: they are accepted with one
notice. A key that would change what is trained is accepted only with the values that ask for nothing, listed in
``harmless``; any other value is an error, because ignoring it would train something else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl.config.tree import LEAVES

_AR = "actor_rollout_ref"


@dataclass(frozen=True)
class Inert:
    """``why`` it has no effect; ``harmless`` lists the values it is accepted with (None: any)."""

    why: str
    harmless: tuple[Any, ...] | Callable[[Any], bool] | None = None

    def accepts(self, value: Any) -> bool:
        if self.harmless is None or value is None:
            return True
        if callable(self.harmless):
            return self.harmless(value)
        plain = str(value).lower()
        return any(value == ok or plain == str(ok).lower() for ok in self.harmless)


_OFF = (False, 0, "null", "", {}, [])
_PACKED = "sequences are always packed, there is no padding to remove"
_ONE_DEVICE = "this version trains on one device"
_LORA = "LoRA of this kind is not part of this version"
_CRITIC_LORA = "the critic trains all its weights"
_ALWAYS_SAVED = "a checkpoint always holds everything that resume needs, and the exported model"
_TEXT = "this version trains text models"
_AGENT = "conversations are set up under actor_rollout_ref.rollout.multi_turn"
_KERNELS = "kernels are chosen by the hardware"
_SHARDING = "every decoder layer is a unit of its own; see fsdp_config for what can be chosen"
_SHARDED = ("fsdp", "fsdp2")
_REWARD_MODEL = "the reward model runs where the controller does, and its batches are cut by rows"
_REWARD_MODEL_KEYS = (
    "rollout enable_resource_pool n_gpus_per_node nnodes use_dynamic_bsz forward_max_token_len_per_gpu "
    "ulysses_sequence_parallel_size trust_remote_code profiler model.fsdp_config model.use_remove_padding "
    "model.use_fused_kernels model.external_lib"
)
_ONE_RUNNER = "one reward runner does what each manager does"
_MANAGERS = ("naive", "dapo", "batch", "prime")
_NO_OFFLOAD = "the policy's live weights stay on their device; optim.offload moves masters, gradient sums and moments"
_CRITIC_DTYPE = "the critic computes in actor_rollout_ref.model.dtype"
_SERVER = "a tuning knob of a serving engine, with no counterpart in the engines here"

_NO_SPLIT = "Megatron-Core lays models out by tensor, pipeline and context parallelism here"
_MEGATRON_STATE = "checkpoints hold Hugging Face names, so any number of processes and any strategy reads them"
_MEGATRON_KEYS: dict[str, Inert] = {
    **dict.fromkeys(
        ("expert_model_parallel_size", "expert_tensor_parallel_size"),
        Inert("whole experts lie over the processes of tensor_model_parallel_size; no result changes by it"),
    ),
    "dynamic_context_parallel": Inert(_NO_SPLIT, _OFF),
    **dict.fromkeys(("use_mbridge", "vanilla_mbridge"), Inert("weights go to Megatron and back without a bridge")),
    **dict.fromkeys(
        ("use_dist_checkpointing", "dist_checkpointing_path", "dist_checkpointing_prefix", "load_weight"),
        Inert(_MEGATRON_STATE),
    ),
    **dict.fromkeys(
        ("param_offload", "grad_offload", "optimizer_offload"),
        Inert("optim.offload moves masters, gradient sums and moments, and nothing else moves", _OFF),
    ),
    "override_ddp_config": Inert("gradients are summed in float32, once a step", _OFF),
    "override_transformer_config": Inert(
        "the model is built from its own config (model.override_config) but for its recompute_* keys", _OFF
    ),
    "override_mcore_model_config": Inert("the model is built from its own config; see model.override_config", _OFF),
    "seed": Inert("the seed of the run is trainer.seed"),
    "use_remove_padding": Inert(_PACKED),
    "dtype": Inert("model.dtype is the type that computes", ("bfloat16", *_OFF)),
    "forward_only": Inert("it follows from the role"),
    "strategy": Inert("it is the role's strategy"),
    "full_determinism": Inert("it is trainer.full_determinism"),
    "use_torch_compile": Inert(_KERNELS),
    "use_megatron_fsdp": Inert(_NO_SPLIT, _OFF),
}

_ROLE_KEYS: dict[str, Inert] = {
    "use_torch_compile": Inert(_KERNELS),
    "use_remove_padding": Inert(_PACKED),
    "use_fused_kernels": Inert("log-probs always come from a fused linear layer and log-softmax"),
    "entropy_from_logits_with_chunking": Inert("entropy is always computed in chunks"),
    "entropy_checkpointing": Inert("entropy is always computed in chunks"),
    "rollout_n": Inert("it is actor_rollout_ref.rollout.n"),
    "nccl_timeout": Inert("actor_rollout_ref.nccl_timeout holds for all roles"),
    "profiler": Inert("use an external profiler; phase times are always recorded"),
    "profile": Inert("use an external profiler; phase times are always recorded"),
    "router_replay": Inert("it is for mixture-of-experts serving engines"),
    **{f"megatron.{name}": inert for name, inert in _MEGATRON_KEYS.items()},
    "checkpoint": Inert(_ALWAYS_SAVED),
    "load_weight": Inert("weights are always loaded"),
}
_FSDP_KEYS: dict[str, Inert] = {
    "offload_policy": Inert(_NO_OFFLOAD),
    **{name: Inert(_SHARDING) for name in ("wrap_policy", "use_orig_params", "param_offload_policy", "grad_offload")},
    "strategy": Inert("it is the role's strategy", _SHARDED),
    "model_dtype": Inert("master weights are always float32; model.dtype is the type that computes"),
    "mixed_precision": Inert("weights compute in model.dtype, and norms, softmax and losses in float32"),
    "seed": Inert("the seed of the run is trainer.seed"),
    "full_determinism": Inert("it is trainer.full_determinism"),
    "use_torch_compile": Inert(_KERNELS),
    "entropy_from_logits_with_chunking": Inert("entropy is always computed in chunks"),
    "entropy_checkpointing": Inert("entropy is always computed in chunks"),
}
_OPTIM_KEYS: dict[str, Inert] = {
    "optimizer_impl": Inert("the optimizer is chosen by optim.optimizer; 8-bit and paged ones are bitsandbytes'"),
    "total_training_steps": Inert("it is derived from trainer.total_epochs and trainer.total_training_steps"),
    "zero_indexed_step": Inert("the first update uses the first rate of the schedule"),
}
_MODEL_KEYS: dict[str, Inert] = {
    "target_parameters": Inert(_LORA),
    "lora": Inert(_LORA),
    "hf_config_path": Inert("the config lies beside the weights; change values with model.override_config", _OFF),
    "enable_activation_offload": Inert("activations are recomputed, see enable_gradient_checkpointing"),
    "use_remove_padding": Inert(_PACKED),
    "use_liger": Inert(_KERNELS),
    "use_fused_kernels": Inert("log-probs always come from a fused linear layer and log-softmax"),
    "fused_kernel_options": Inert("log-probs always come from a fused linear layer and log-softmax"),
    "use_shm": Inert("weights are read once, in one process"),
    "device_map": Inert("trainer.device says where the model lives"),
    "tiled_mlp": Inert(_KERNELS),
    "mtp": Inert("multi-token prediction heads are not trained here", lambda value: not value),
}


def _under(prefix: str, table: dict[str, Inert]) -> dict[str, Inert]:
    return {f"{prefix}.{name}": inert for name, inert in table.items()}


def _all(why: str, prefix: str, names: str) -> dict[str, Inert]:
    return {f"{prefix}.{name}": Inert(why) for name in names.split()}


INERT: dict[str, Inert] = {
    # Data
    **_all(
        "prompts and responses always keep their ids and messages",
        "data",
        "return_raw_chat return_raw_input_ids return_full_prompt",
    ),
    **_all("rows are read by the controller", "data", "dataloader_num_workers filter_overlong_prompts_workers use_shm"),
    **_all(_TEXT, "data", "image_key video_key audio_key image_patch_size return_multi_modal_inputs"),
    "data.sampler": Inert("rows come from the resumable sampler; use data.custom_cls", lambda value: not value),
    "data.datagen": Inert("give the rows with data.custom_cls", lambda value: not value),
    "data.need_tools_kwargs": Inert(_AGENT, _OFF),
    "data.trust_remote_code": Inert("the tokenizer loads as actor_rollout_ref.model.trust_remote_code says"),
    # Policy, reference, rollout
    f"{_AR}.hybrid_engine": Inert("trainer.schedule=one_step_off gives the rollout weights of its own", (True,)),
    f"{_AR}.fsdp_config": Inert(_NO_OFFLOAD),
    **_under(f"{_AR}.model", _MODEL_KEYS),
    f"{_AR}.model.fsdp_config": Inert("it is fsdp_config of actor and ref"),
    **_under(f"{_AR}.actor", _ROLE_KEYS),
    f"{_AR}.actor.freeze_vision_tower": Inert(_TEXT),
    f"{_AR}.actor.use_rollout_log_probs": Inert("set algorithm.rollout_correction.bypass_mode", _OFF),
    f"{_AR}.actor.calculate_sum_pi_squared": Inert("it serves estimators that are not part of this version", _OFF),
    **_under(f"{_AR}.actor.fsdp_config", _FSDP_KEYS),
    f"{_AR}.actor.fsdp_config.param_offload": Inert(_NO_OFFLOAD),
    **_under(f"{_AR}.actor.optim", _OPTIM_KEYS),
    **_under(f"{_AR}.ref", _ROLE_KEYS),
    f"{_AR}.ref.megatron.use_distributed_optimizer": Inert("the reference has no optimizer"),
    **_all(
        "the reference has no backward pass",
        f"{_AR}.ref.megatron.override_transformer_config",
        "recompute_granularity recompute_method recompute_num_layers recompute_modules",
    ),
    **_under(f"{_AR}.ref.fsdp_config", _FSDP_KEYS),
    f"{_AR}.ref.fsdp_config.optimizer_offload": Inert("the reference has no optimizer"),
    f"{_AR}.ref.fsdp_config.dtype": Inert("the reference computes in actor_rollout_ref.model.dtype"),
    f"{_AR}.rollout.calculate_log_probs": Inert("the log-prob of every sampled token is always recorded"),
    f"{_AR}.rollout.mode": Inert("there is one rollout interface: submit, poll, abort"),
    f"{_AR}.rollout.logprobs_mode": Inert("log-probs are those of the temperature distribution"),
    f"{_AR}.rollout.full_determinism": Inert("it is trainer.full_determinism"),
    f"{_AR}.rollout.load_format": Inert("the rollout uses the live weights, or starts empty and takes them over"),
    f"{_AR}.rollout.layered_summon": Inert("the rollout uses the live weights"),
    f"{_AR}.rollout.checkpoint_engine": Inert("the rollout uses the live weights"),
    f"{_AR}.rollout.update_weights_bucket_megabytes": Inert("the rollout uses the live weights"),
    **_all(
        _ONE_DEVICE,
        f"{_AR}.rollout",
        "data_parallel_size expert_parallel_size pipeline_model_parallel_size pipeline_parallel_size",
    ),
    **_all(
        _SERVER,
        f"{_AR}.rollout",
        "disable_log_stats "
        "cudagraph_capture_sizes swap_space prometheus scheduling_policy over_sample_rate "
        "skip_tokenizer_init enable_rollout_routing_replay "
        "micro_batch_size",
    ),
    f"{_AR}.rollout.use_fire_sampling": Inert("the first token is sampled like the others", _OFF),
    f"{_AR}.rollout.quantization": Inert("rollouts use the weights as they are", _OFF),
    f"{_AR}.rollout.agent": Inert(_AGENT),
    **_under(f"{_AR}.rollout", {name: _ROLE_KEYS[name] for name in ("profiler", "nccl_timeout")}),
    # Critic
    **_under("critic", _ROLE_KEYS),
    **_under("critic.model", _MODEL_KEYS),
    "critic.model.lora_rank": Inert(_CRITIC_LORA, (0,)),
    **_all(_CRITIC_LORA, "critic.model", "lora_alpha target_modules exclude_modules lora_adapter_path"),
    **_all(_CRITIC_DTYPE, "critic", "torch_dtype model.dtype model.torch_dtype model.override_config.torch_dtype"),
    "critic.model.tokenizer_path": Inert("the critic reads the policy's token ids"),
    **_under("critic.fsdp_config", _FSDP_KEYS),
    "critic.fsdp_config.dtype": Inert(_CRITIC_DTYPE),
    **_under("critic.optim", _OPTIM_KEYS),
    "critic.data_loader_seed": Inert("it is actor_rollout_ref.actor.data_loader_seed"),
    # Reward
    **_all("rewards always start as rows finish", "reward_model", "launch_reward_fn_async use_reward_loop"),
    "reward_model.strategy": Inert("the reward model runs where the controller does"),
    "reward_model.reward_manager": Inert(_ONE_RUNNER, _MANAGERS),
    "reward_model.reward_kwargs.max_resp_len": Inert("it is data.max_response_length"),
    "reward.reward_kwargs.max_resp_len": Inert("it is data.max_response_length"),
    "reward.overlong_buffer.log": Inert("the penalty is always a metric"),
    "reward.reward_manager": Inert(_ONE_RUNNER, lambda value: not value),
    "reward.reward_manager.name": Inert(_ONE_RUNNER, _MANAGERS),
    "reward.reward_manager.source": Inert("name the function with reward.custom_reward_function.path", ("register",)),
    "reward.reward_manager.module": Inert("name the function with reward.custom_reward_function.path", _OFF),
    "reward.reward_manager.module.path": Inert("name the function with reward.custom_reward_function.path", _OFF),
    "reward.reward_manager.module.name": Inert("name the function with reward.custom_reward_function.path"),
    "reward.sandbox_fusion": Inert(
        "programs run in the built-in sandbox; call a remote one from a reward function", _OFF
    ),
    "reward.sandbox_fusion.max_concurrent": Inert(
        "programs run in the built-in sandbox, whose limits are arguments of verl.rewards.code.compute_score"
    ),
    "reward.sandbox_fusion.memory_limit_mb": Inert(
        "programs run in the built-in sandbox, whose limits are arguments of verl.rewards.code.compute_score"
    ),
    "sandbox_fusion": Inert("programs run in the built-in sandbox; call a remote one from a reward function", _OFF),
    "sandbox_fusion.max_concurrent": Inert(
        "programs run in the built-in sandbox, whose limits are arguments of verl.rewards.code.compute_score"
    ),
    "sandbox_fusion.memory_limit_mb": Inert(
        "programs run in the built-in sandbox, whose limits are arguments of verl.rewards.code.compute_score"
    ),
    **_all(_REWARD_MODEL, "reward_model", _REWARD_MODEL_KEYS),
    "reward_model.model.input_tokenizer": Inert("texts always go through the reward model's own tokenizer"),
    # Algorithm
    "algorithm.use_pf_ppo": Inert("preference-feedback re-weighting is not part of this version", _OFF),
    "algorithm.pf_ppo": Inert("preference-feedback re-weighting is not part of this version"),
    "algorithm.gdpo_reward_keys": Inert("combine the rewards in your reward function", _OFF),
    "algorithm.gdpo_reward_weights": Inert("combine the rewards in your reward function", _OFF),
    # Trainer
    **_all("Ray tells when a process is there, or gone", "trainer", "ray_wait_register_center_timeout"),
    **_all("a run ends when it is done; schedulers end it with SIGTERM", "trainer", "esi_redundant_time"),
    **_all("there is one trainer", "trainer", "use_legacy_worker_impl use_v1 v1 v0"),
    "trainer.v1.trainer_mode": Inert("rollout and update take turns in this version", ("sync",)),
    "trainer.balance_batch": Inert("ranks are always balanced by tokens"),
    "trainer.default_hdfs_dir": Inert("checkpoints are written to trainer.default_local_dir"),
    "trainer.remove_previous_ckpt_in_save": Inert("set trainer.max_actor_ckpt_to_keep"),
    "trainer.del_local_ckpt_after_load": Inert("a checkpoint is deleted only by the retention rule"),
    "trainer.max_critic_ckpt_to_keep": Inert("the critic is kept with the actor"),
    "trainer.npu_profile": Inert("use an external profiler; phase times are always recorded"),
    # Whole groups
    "model_engine": Inert("it is actor_rollout_ref.actor.strategy", ("dp", "fsdp", "fsdp2", "torch")),
    "hydra": Inert("the run folder is trainer.default_local_dir"),
    "defaults": Inert("the defaults are built in, and this file lies above them"),
    "ray_kwargs.timeline_json_file": Inert("use an external profiler; phase times are always recorded"),
    **_all("it is set for the cluster where it is started", "ray_kwargs.ray_init", "dashboard_host dashboard_port"),
    "global_profiler": Inert("torch's profiler traces the steps of trainer.profile_steps, on one rank"),
    "transfer_queue": Inert("data go from the controller to the workers"),
    "skip": Inert("nothing can be skipped"),
    "distillation.enabled": Inert("it is algorithm.name=distillation", _OFF),
    "distillation.enable": Inert("it is algorithm.name=distillation", _OFF),
}
"""Key, or group with all its keys → why. The longest match counts."""


def find_inert(key: str) -> Inert | None:
    """The row that covers ``key`` or one of its groups; None for an option."""
    if key in LEAVES:
        return None
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        if (found := INERT.get(".".join(parts[:end]))) is not None:
            return found
    return None
