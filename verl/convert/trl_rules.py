"""What each key of TRL's config classes becomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.convert.trl_work import OPTIM, POLICY, Conversion, No, Rule, Unneeded

_LOSS_TYPES: dict[str, dict[str, Any]] = {
    "dapo": {"loss_agg_mode": "token-mean"},
    "bnpo": {"loss_agg_mode": "token-mean"},
    "grpo": {"loss_agg_mode": "seq-mean-token-mean"},
    "dr_grpo": {"loss_agg_mode": "seq-mean-token-sum-norm"},
    "cispo": {"policy_loss.loss_mode": "cispo", "loss_agg_mode": "token-mean"},
    "sapo": {"policy_loss.loss_mode": "sapo", "loss_agg_mode": "seq-mean-token-mean"},
}
_PAIR_LOSSES = {
    **{name: name for name in ("sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard")},
    **{name: name for name in ("aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sigmoid_norm")},
    "aot_pair": "aot_unpaired",
}


def loss_type_rule(work: Conversion, value: Any) -> None:
    if work.kind in ("grpo", "rloo"):
        if value not in _LOSS_TYPES:
            work.result.dropped.append(f"loss_type={value}: there is no such policy loss here")
            return
        for key, setting in _LOSS_TYPES[value].items():
            work.put(f"{POLICY}.actor.{key}", setting, f"loss_type={value}")
        if value == "bnpo":
            work.result.changed.append("loss_type=bnpo divides by the tokens of a process; here by those of the step")
    elif work.kind == "sft":
        if value != "nll":
            work.result.dropped.append(f"loss_type={value}: SFT here minimises the negative log-likelihood")
    elif work.kind == "dpo":
        losses = value if isinstance(value, list) else [value]
        if len(losses) > 1:
            work.result.dropped.append(f"loss_type={value}: one loss at a time; the first is taken")
        if losses[0] not in _PAIR_LOSSES:
            work.result.dropped.append(f"loss_type={losses[0]}: there is no such loss over pairs here")
        else:
            work.put("preference.loss_type", _PAIR_LOSSES[losses[0]])
    else:
        work.put("preference.loss_type", "apo_zero_unpaired" if value == "apo_zero_unpaired" else value)


def beta_rule(work: Conversion, value: Any) -> None:
    if work.kind not in ("grpo", "rloo"):
        work.put("preference.beta", value)
    elif not value:
        work.put(f"{POLICY}.actor.use_kl_loss", False, "beta is 0: no reference model")
    elif work.kind == "rloo":
        work.put("algorithm.use_kl_in_reward", True, "RLOO subtracts the KL from the reward")
        work.put("algorithm.kl_ctrl.kl_coef", value)
    else:
        work.put(f"{POLICY}.actor.use_kl_loss", True, "beta")
        work.put(f"{POLICY}.actor.kl_loss_coef", value)
        work.put(f"{POLICY}.actor.kl_loss_type", "low_var_kl")


def _epsilon(work: Conversion, value: Any) -> None:
    work.put(f"{POLICY}.actor.clip_ratio", value)
    if work.given.get("epsilon_high") is not None:
        work.put(f"{POLICY}.actor.clip_ratio_low", value)


def _epsilon_high(work: Conversion, value: Any) -> None:
    if value is not None:
        work.put(f"{POLICY}.actor.clip_ratio_high", value)
        work.put(f"{POLICY}.actor.clip_ratio_low", work.value("epsilon"))


def _delta(work: Conversion, value: Any) -> None:
    work.put(f"{POLICY}.actor.clip_ratio_c", 1e9 if value is None else value, "TRL's delta")


def _level(work: Conversion, value: Any) -> None:
    if value == "sequence":
        work.put(f"{POLICY}.actor.policy_loss.loss_mode", "gspo", "importance_sampling_level=sequence")
    elif value != "token":
        work.result.dropped.append(f"importance_sampling_level={value}: only token and sequence exist here")


def _scale(work: Conversion, value: Any) -> None:
    known = {"group": True, True: True, "none": False, False: False}
    if value in known:
        work.put("algorithm.norm_adv_by_std_in_grpo", known[value], f"scale_rewards={value}")
    else:
        work.result.dropped.append(f"scale_rewards={value}: advantages are divided by the group's deviation or by none")


def _max_steps(work: Conversion, value: Any) -> None:
    if isinstance(value, int) and value > 0:
        work.put("trainer.total_training_steps", value)


def _epochs(work: Conversion, value: Any) -> None:
    whole = max(1, round(float(value)))
    if whole != value:
        work.result.changed.append(f"num_train_epochs={value} is {whole} here: epochs are whole")
    work.put("trainer.total_epochs", whole)


def _precision(dtype: str) -> Callable[[Conversion, Any], None]:
    def rule(work: Conversion, value: Any) -> None:
        if value:
            work.put(f"{POLICY}.model.dtype", dtype)

    return rule


def _dtype(work: Conversion, value: Any) -> None:
    if value not in (None, "auto"):
        work.put(f"{POLICY}.model.dtype", str(value).removeprefix("torch."))


def _warmup(work: Conversion, value: Any) -> None:
    ratio = isinstance(value, float) and 0 < value < 1  # newer versions take a ratio under this name too
    work.put(f"{OPTIM}.lr_warmup_steps_ratio" if ratio else f"{OPTIM}.lr_warmup_steps", value if ratio else int(value))


def _schedule(work: Conversion, value: Any) -> None:
    known = {"constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine", "linear": "linear"}
    known |= {"cosine_with_min_lr": "cosine"}
    name = str(getattr(value, "value", value))
    if name in known:
        work.put(f"{OPTIM}.lr_scheduler_type", known[name])
    else:
        work.result.dropped.append(f"lr_scheduler_type={name}: there are {', '.join(sorted(set(known.values())))}")


def _schedule_settings(work: Conversion, value: Any) -> None:
    """The entries of ``lr_scheduler_kwargs``: a lowest rate, relative or not, and the cosine's periods."""
    for name, setting in (value or {}).items():
        if name == "min_lr_rate":
            work.put(f"{OPTIM}.min_lr_ratio", setting)
        elif name == "min_lr" and work.value("learning_rate"):
            work.put(f"{OPTIM}.min_lr_ratio", setting / work.value("learning_rate"), f"min_lr={setting}")
        elif name == "num_cycles":
            work.put(f"{OPTIM}.num_cycles", setting)
        else:
            work.result.dropped.append(f"lr_scheduler_kwargs.{name}={setting}: a schedule here has no such setting")


def _optimizer(work: Conversion, value: Any) -> None:
    known = {"adamw_torch": "AdamW", "adamw_torch_fused": "AdamW", "sgd": "SGD", "adafactor": "Adafactor"}
    known |= {"adamw_bnb_8bit": "AdamW8bit", "adamw_8bit": "AdamW8bit", "paged_adamw_8bit": "PagedAdamW8bit"}
    if value in known:
        work.put(f"{OPTIM}.optimizer", known[value])
    else:
        work.result.dropped.append(f"optim={value}: there are {', '.join(dict.fromkeys(known.values()))}")


def _betas(work: Conversion, _: Any) -> None:
    work.put(f"{OPTIM}.betas", [work.given.get("adam_beta1", 0.9), work.given.get("adam_beta2", 0.999)])


def _every(key: str, strategy: str, off: str) -> Callable[[Conversion, Any], None]:
    """``save_steps`` and the like: a number of steps, unless their strategy is another."""

    def rule(work: Conversion, value: Any) -> None:
        how = str(work.given.get(strategy, off))
        if how == "steps" and isinstance(value, int):
            work.put(key, value)
        elif how == "epoch":
            work.result.changed.append(f"{strategy}=epoch: set {key} to the steps of an epoch")

    return rule


def _strategy(key: str) -> Callable[[Conversion, Any], None]:
    def rule(work: Conversion, value: Any) -> None:
        if value == "no":
            work.put(key, -1)
        elif value == "epoch":
            work.result.changed.append(f"every epoch: set {key} to the steps of an epoch")

    return rule


def _loggers(work: Conversion, value: Any) -> None:
    names = value if isinstance(value, list) else [value]
    known = [name for name in names if name in ("tensorboard", "wandb", "mlflow", "swanlab", "trackio", "clearml")]
    for name in names:
        if name not in (*known, "none", "all", None):
            work.result.dropped.append(f"report_to={name}: no such logger here")
    work.put("trainer.logger", ["console", *known])


def _engine(work: Conversion, value: Any) -> None:
    if value:
        server = work.given.get("vllm_mode") == "server"
        work.put(f"{POLICY}.rollout.name", "vllm_server" if server else "vllm")


def _server(work: Conversion, value: Any) -> None:
    if work.given.get("vllm_mode") == "server":
        host, port = work.given.get("vllm_server_host", "localhost"), work.given.get("vllm_server_port", 8000)
        work.put(f"{POLICY}.rollout.server_url", work.given.get("vllm_server_base_url") or f"http://{host}:{port}")


def _lora(key: str) -> Callable[[Conversion, Any], None]:
    def rule(work: Conversion, value: Any) -> None:
        if work.given.get("use_peft", True) and value is not None:
            work.put(f"{POLICY}.model.{key}", value)

    return rule


def _use_peft(work: Conversion, value: Any) -> None:
    if value:
        work.put(f"{POLICY}.model.lora_rank", work.given.get("lora_r", 16))
        work.put(f"{POLICY}.model.lora_alpha", work.given.get("lora_alpha", 32))


def _quantized(kind: str) -> Callable[[Conversion, Any], None]:
    def rule(work: Conversion, value: Any) -> None:
        if value:
            work.put(f"{POLICY}.model.quantization", kind)

    return rule


def _dataset(work: Conversion, value: Any) -> None:
    config = work.given.get("dataset_config")
    work.put("data.train_files", f"{value}:{config}" if config else value)


def _rewards(work: Conversion, value: Any) -> None:
    work.result.changed.append(
        f"reward_funcs={value}: TRL calls fn(prompts, completions, **columns); ours is fn(batch) or compute_score, "
        "given as reward.custom_reward_function.path (docs/rewards.md)"
    )


_SIZES = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "generation_batch_size",
    "steps_per_generation",
)  # fmt: skip
_GENERATED = "data.max_response_length"
_NO_PACKING = No("rows are always packed without padding, and never cut into one another", (None, False, True))
RULES: dict[str, Rule] = {
    # the model and its adapters
    "model_name_or_path": f"{POLICY}.model.path",
    "trust_remote_code": f"{POLICY}.model.trust_remote_code",
    "attn_implementation": f"{POLICY}.model.attn_implementation",
    "dtype": _dtype,
    "torch_dtype": _dtype,
    "model_init_kwargs": No("give its entries under actor_rollout_ref.model", (None, {})),
    "use_peft": _use_peft,
    "lora_r": _lora("lora_rank"),
    "lora_alpha": _lora("lora_alpha"),
    "lora_target_modules": _lora("target_modules"),
    "lora_dropout": No("adapters have no dropout here", (None, 0, 0.0)),
    "load_in_4bit": _quantized("nf4"),
    "load_in_8bit": _quantized("int8"),
    "disable_dropout": No("dropout is off here unless model.override_config sets it", (None, True, False)),
    "gradient_checkpointing": f"{POLICY}.model.enable_gradient_checkpointing",
    "bf16": _precision("bfloat16"),
    "fp16": _precision("float16"),
    "chat_template_path": No("give the template's text as actor_rollout_ref.model.custom_chat_template"),
    # data
    "dataset_name": _dataset,
    "dataset_config": Unneeded(),
    "dataset_train_split": No("a split is chosen by the file or hub name", (None, "train")),
    "max_prompt_length": "data.max_prompt_length",
    "max_completion_length": _GENERATED,
    "max_new_tokens": _GENERATED,
    "max_length": "data.max_length",
    "truncation_mode": "data.truncation",
    "shuffle_dataset": "data.shuffle",
    "dataset_text_field": "data.text_key",
    "chat_template_kwargs": "data.apply_chat_template_kwargs",
    "dataset_num_proc": Unneeded(),
    "packing": _NO_PACKING,
    "padding_free": Unneeded(),
    "packing_strategy": Unneeded(),
    "eval_packing": Unneeded(),
    "assistant_only_loss": Unneeded(),
    "completion_only_loss": No("of a prompt with its answer only the answer is learned here", (None, True)),
    # optimizer
    "learning_rate": f"{OPTIM}.lr",
    "lr_scheduler_type": _schedule,
    "warmup_ratio": f"{OPTIM}.lr_warmup_steps_ratio",
    "warmup_steps": _warmup,
    "lr_scheduler_kwargs": _schedule_settings,
    "weight_decay": f"{OPTIM}.weight_decay",
    "adam_beta1": _betas,
    "adam_beta2": _betas,
    "adam_epsilon": f"{OPTIM}.eps",
    "max_grad_norm": f"{POLICY}.actor.grad_clip",
    "optim": _optimizer,
    # length of the run, and its record
    "num_train_epochs": _epochs,
    "max_steps": _max_steps,
    "seed": "trainer.seed",
    "output_dir": "trainer.default_local_dir",
    "run_name": "trainer.experiment_name",
    "report_to": _loggers,
    "save_steps": _every("trainer.save_freq", "save_strategy", "steps"),
    "save_strategy": _strategy("trainer.save_freq"),
    "save_total_limit": "trainer.max_actor_ckpt_to_keep",
    "eval_steps": _every("trainer.test_freq", "eval_strategy", "no"),
    "eval_strategy": _strategy("trainer.test_freq"),
    # sizes: see _sizes
    **{key: (lambda work, value: None) for key in _SIZES},
    # generation
    "temperature": f"{POLICY}.rollout.temperature",
    "top_p": f"{POLICY}.rollout.top_p",
    "top_k": f"{POLICY}.rollout.top_k",
    "min_p": lambda work, value: work.put(f"{POLICY}.rollout.min_p", value or 0.0),
    "repetition_penalty": f"{POLICY}.rollout.repetition_penalty",
    "generation_kwargs": No("give its entries under actor_rollout_ref.rollout", (None, {})),
    "use_vllm": _engine,
    "vllm_mode": lambda work, value: None,
    "vllm_server_base_url": _server,
    "vllm_server_host": _server,
    "vllm_server_port": _server,
    "vllm_gpu_memory_utilization": f"{POLICY}.rollout.gpu_memory_utilization",
    "vllm_tensor_parallel_size": f"{POLICY}.rollout.tensor_model_parallel_size",
    "vllm_max_model_length": f"{POLICY}.rollout.max_model_len",
    "vllm_enable_sleep_mode": f"{POLICY}.rollout.free_cache_engine",
    # losses
    "beta": beta_rule,
    "loss_type": loss_type_rule,
    "num_iterations": f"{POLICY}.actor.ppo_epochs",
    "epsilon": _epsilon,
    "epsilon_high": _epsilon_high,
    "delta": _delta,
    "importance_sampling_level": _level,
    "scale_rewards": _scale,
    "entropy_coef": f"{POLICY}.actor.entropy_coeff",
    "sapo_temperature_neg": f"{POLICY}.actor.tau_neg",
    "sapo_temperature_pos": f"{POLICY}.actor.tau_pos",
    "mask_truncated_completions": No(
        "truncated answers are trained on; give them a score of 0, or none, in the reward"
    ),
    "top_entropy_quantile": No("all tokens are trained on", (None, 1, 1.0)),
    "reward_weights": No("weigh them inside one reward function", (None,)),
    "multi_objective_aggregation": No("combine rewards inside one reward function", (None, "sum_then_normalize")),
    "off_policy_mask_threshold": No("use algorithm.rollout_correction.rollout_rs", (None,)),
    "vllm_importance_sampling_correction": lambda work, value: _correction(work, value),
    "reward_funcs": _rewards,
    "label_smoothing": "preference.label_smoothing",
    "ld_alpha": "preference.ld_alpha",
    "rpo_alpha": "preference.rpo_alpha",
    "use_weighting": "preference.use_weighting",
    "discopop_tau": "preference.discopop_tau",
    "desirable_weight": "preference.desirable_weight",
    "undesirable_weight": "preference.undesirable_weight",
    "precompute_ref_log_probs": "preference.precompute_ref_log_probs",
    "sync_ref_model": "preference.sync_ref_model",
    "ref_model_mixup_alpha": "preference.ref_model_mixup_alpha",
    "ref_model_sync_steps": "preference.ref_model_sync_steps",
    "f_divergence_type": No("the divergence is the reverse KL", (None, "reverse_kl")),
    "loss_weights": No("one loss at a time", (None,)),
    "cpo_alpha": "preference.cpo_alpha",
    "simpo_gamma": "preference.simpo_gamma",
    "center_rewards_coefficient": No("there is no centring term in the reward model's loss", (None, 0, 0.0)),
}
_ADAPTERS = No("adapters of this kind do not exist here", (None, False, []))
RULES |= {
    "normalize_advantages": No("advantages of RLOO are not normalised over the batch here"),
    "reward_clip_range": No("clip inside the reward function"),
    "use_adaptive_entropy": No("the entropy bonus has one weight, actor.entropy_coeff"),
    "use_bias_correction_kl": No("the KL in the loss is the plain estimator", (None, False, True)),
    "router_aux_loss_coef": No("there is no balancing loss of experts here", (None, 0, 0.0)),
    "max_tool_calling_iterations": f"{POLICY}.rollout.multi_turn.max_assistant_turns",
    "vllm_structured_outputs_regex": No("answers are not forced into a grammar"),
    "use_dora": _ADAPTERS,
    "use_rslora": _ADAPTERS,
    "lora_modules_to_save": _ADAPTERS,
    "lora_target_parameters": _ADAPTERS,
    "dataset_kwargs": No("rows are used as they are", (None, {})),
    "activation_checkpointing": f"{POLICY}.model.enable_gradient_checkpointing",
    "full_determinism": "trainer.full_determinism",
    "use_cpu": lambda work, value: work.put("trainer.device", "cpu" if value else "auto"),
    "dataloader_drop_last": lambda work, value: work.put("data.last_batch", "drop" if value else "short"),
    "data_seed": "data.seed",
    "project": "trainer.project_name",
    "load_best_model_at_end": "trainer.keep_best",
    "metric_for_best_model": No("the validation score decides; trainer.best_metric names another of our metrics"),
    "resume_from_checkpoint": No("a run here goes on in its own folder; checkpoints of TRL are Hugging Face folders"),
    "neftune_noise_alpha": No("no noise is added to embeddings"),
    "label_smoothing_factor": No("labels are not smoothed", (None, 0, 0.0)),
    "optim_args": No("give them as actor.optim.override_optimizer_config"),
    "fsdp": No("weights are sharded when there is more than one process (actor.strategy)", (None, "", [])),
    "fsdp_config": No("see actor_rollout_ref.actor.fsdp_config", (None, {})),
    "deepspeed": No("there is no DeepSpeed here; more than one process shards weights by FSDP (actor.strategy)"),
}
_UNNEEDED = """
bnb_4bit_quant_storage bnb_4bit_quant_type use_bnb_nested_quant transformers_continuous_batching_config local_rank
entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target f_alpha_divergence_coef train_sampling_strategy
vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos activation_checkpointing_kwargs ddp_timeout use_cache
average_tokens_across_devices save_only_model logging_nan_inf_filter hub_token hub_strategy hub_private_repo do_predict
dataloader_persistent_workers dataloader_prefetch_factor greater_is_better skip_memory_metrics auto_find_batch_size
logging_steps logging_strategy logging_first_step logging_dir disable_tqdm log_completions log_level log_multimodal
remove_unused_columns num_completions_to_print log_unique_prompts ds3_gather_for_generation tf32 do_train do_eval
ddp_find_unused_parameters dataloader_num_workers dataloader_pin_memory use_liger_kernel push_to_hub hub_model_id
per_device_eval_batch_size use_transformers_paged use_transformers_continuous_batching cache_implementation
gradient_checkpointing_kwargs activation_offloading pad_to_multiple_of torch_empty_cache_steps vllm_server_timeout
vllm_group_port vllm_model_impl overwrite_output_dir group_by_length bf16_full_eval torch_compile num_generations_eval
precompute_ref_batch_size pad_token eos_token log_completions_hub_repo lora_task_type model_revision eval_on_start
LoraConfig.task_type LoraConfig.bias cast_lm_head_to_fp32 include_num_input_tokens_seen
"""
RULES |= {key: Unneeded() for key in _UNNEEDED.split()}


def _correction(work: Conversion, value: Any) -> None:
    if value and work.given.get("use_vllm"):
        bound = work.given.get("vllm_importance_sampling_clip_max") or work.given.get("vllm_importance_sampling_cap")
        work.put("algorithm.rollout_correction.rollout_is", "sequence", "vllm_importance_sampling_correction")
        work.put("algorithm.rollout_correction.rollout_is_threshold", bound or 3.0)


for _key in ("mode", "clip_max", "clip_min", "cap"):
    RULES[f"vllm_importance_sampling_{_key}"] = lambda work, value: None


def rule_for(kind: str, key: str) -> Rule | None:
    if kind == "online_dpo" and key == "max_length":
        return No("lengths are data.max_prompt_length and data.max_response_length", (None,))
    return RULES.get(key)
