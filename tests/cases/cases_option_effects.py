"""Options whose effect shows without a run, or in what a run leaves behind; and where the others are shown."""

from __future__ import annotations

from typing import Any

import cases_option_views as views
import cases_toys
from cases_options import ACTOR, FILTER, MODEL, ROLLOUT, VAL, Base

CRITIC, REF, TURNS = "critic", "actor_rollout_ref.ref", f"{ROLLOUT}.multi_turn"
KL, GAE = {f"{ACTOR}.use_kl_loss": True}, {"algorithm.adv_estimator": "gae"}
VLLM, INIT = {f"{ROLLOUT}.name": "vllm"}, "ray_kwargs.ray_init"
SERVER = {f"{ROLLOUT}.name": "vllm_server", f"{ROLLOUT}.server_url": "http://a", f"{ROLLOUT}.server_weights_dir": "a"}
SHARDS = {"fsdp_config.fsdp_size": 2, "fsdp_config.reshard_after_forward": False, "fsdp_config.forward_prefetch": True}
JUDGE = {"reward.judge.url": "http://judge"}
TEMPLATE = "{{ word }}{% for m in messages %}{{ m['content'] }}{% endfor %}"


def under(prefix: str, changes: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}.{name}": value for name, value in changes.items()}


def split(role: str) -> dict[str, Any]:
    """How Megatron lays a role's model out."""
    sizes = ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context")
    found = {f"{role}.megatron.{name}_parallel_size": 2 for name in sizes}
    return {**found, f"{role}.megatron.sequence_parallel": False}


TRAINED = {
    "use_distributed_optimizer": False,
    **under(
        "override_transformer_config",
        {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": 2,
            "recompute_modules": ["mlp"],
        },
    ),
}

VIEWS: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    # ---- what the workers are given
    (views.actor, {}, {
        **under(ACTOR, SHARDS),
        f"{ACTOR}.strategy": "torch",
        f"{ACTOR}.ulysses_sequence_parallel_size": 2,
        **split(ACTOR),
        **under(f"{ACTOR}.megatron", TRAINED),
        f"{ACTOR}.max_nonfinite_steps": 2,
        f"{MODEL}.path": "{other}",
        f"{MODEL}.tokenizer_path": "{other}",
        f"{MODEL}.trust_remote_code": True,
        f"{MODEL}.override_config": {"attention_dropout": 0.1},
        f"{MODEL}.gradient_checkpointing_every": 2,
        f"{MODEL}.custom_chat_template": TEMPLATE,
        f"{MODEL}.lora_adapter_path": "{other}",
        f"{MODEL}.attn_implementation": "eager",
        f"{MODEL}.dtype": "float64",
        "data.tokenizer": "{other}",
        f"{ROLLOUT}.name": "hf",
        f"{ROLLOUT}.max_num_batched_tokens": 77,
        f"{ROLLOUT}.gpu_memory_utilization": 0.3,
        f"{ROLLOUT}.log_prob_use_dynamic_bsz": True,
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 77,
    }),
    (views.actor, {f"{MODEL}.lora_rank": 4}, {f"{MODEL}.quantization": "int8"}),
    (views.actor_on_gpu, {f"{MODEL}.lora_rank": 4}, {f"{MODEL}.compile_layers": True}),
    (views.actor_on_gpu, {}, {f"{ACTOR}.optim.offload": True}),
    (views.reference, KL, {
        **under(REF, SHARDS),
        f"{REF}.strategy": "torch",
        f"{REF}.ulysses_sequence_parallel_size": 2,
        **split(REF),
        f"{REF}.log_prob_micro_batch_size_per_gpu": 1,
        f"{REF}.log_prob_use_dynamic_bsz": True,
        f"{REF}.log_prob_max_token_len_per_gpu": 77,
    }),
    (views.reference_on_gpu, KL, {f"{REF}.param_offload": True}),
    (views.critic, GAE, {
        **under(CRITIC, SHARDS),
        "critic.strategy": "torch",
        "critic.ulysses_sequence_parallel_size": 2,
        **split("critic"),
        **under("critic.megatron", TRAINED),
        "critic.ppo_micro_batch_size_per_gpu": 1,
        "critic.forward_micro_batch_size_per_gpu": 1,
        "critic.use_dynamic_bsz": True,
        "critic.ppo_max_token_len_per_gpu": 77,
        "critic.model.path": "{other}",
        "critic.model.trust_remote_code": True,
        "critic.model.override_config": {"attention_dropout": 0.1},
        "critic.model.enable_gradient_checkpointing": True,
        "critic.model.attn_implementation": "eager",
        "critic.optim.weight_decay": 0.5,
        "critic.optim.betas": [0.5, 0.9],
        "critic.optim.eps": 0.1,
        "critic.optim.optimizer": "SGD",
        "critic.optim.override_optimizer_config": {"amsgrad": True},
        "critic.optim.lr_warmup_steps": 2,
        "critic.optim.lr_warmup_steps_ratio": 1.0,
        "critic.optim.lr_scheduler_type": "cosine",
        "critic.optim.min_lr_ratio": 0.5,
        "critic.optim.num_cycles": 2.0,
    }),
    (views.critic, {**GAE, "critic.model.custom_cls.path": "a.py", "critic.model.custom_cls.name": "A"}, {
        "critic.model.custom_cls.path": "b.py",
        "critic.model.custom_cls.name": "B",
    }),
    (views.critic_on_gpu, GAE, {"critic.param_offload": True, "critic.optim.offload": True}),
    (views.vllm, VLLM, {
        f"{ROLLOUT}.dtype": "float16",
        f"{ROLLOUT}.max_model_len": 2048,
        f"{ROLLOUT}.tensor_model_parallel_size": 2,
        f"{ROLLOUT}.enforce_eager": True,
        f"{ROLLOUT}.enable_chunked_prefill": False,
        f"{ROLLOUT}.enable_prefix_caching": False,
        f"{ROLLOUT}.free_cache_engine": False,
        f"{ROLLOUT}.engine_kwargs.vllm": {"swap_space": 3},
        f"{ROLLOUT}.probe_tolerance": 0.5,
    }),
    (views.sglang, {f"{ROLLOUT}.name": "sglang"}, {f"{ROLLOUT}.engine_kwargs.sglang": {"page_size": 16}}),
    (views.vllm_server, SERVER, {f"{ROLLOUT}.server_url": "http://b", f"{ROLLOUT}.server_weights_dir": "b"}),
    (views.hardware, VLLM, {f"{ROLLOUT}.strict": True}),
    (views.machine, {}, {"trainer.device": "mps"}),
    (views.libraries, {}, {f"{MODEL}.external_lib": "json", "critic.model.external_lib": "json"}),
    (views.conversations, {}, {f"{TURNS}.enable": True}),
    (views.conversations, {f"{TURNS}.enable": True}, {
        f"{TURNS}.tool_config_path": "tools.yaml",
        f"{TURNS}.environment": views.ToyEnvironment,
        f"{TURNS}.environment_path": "{classes}:First",
        f"{TURNS}.format": "llama3_json",
        f"{TURNS}.max_assistant_turns": 2,
        f"{TURNS}.max_user_turns": 2,
        f"{TURNS}.max_parallel_calls": 2,
        f"{TURNS}.max_tool_response_length": 9,
        f"{TURNS}.tool_response_truncate_side": "left",
        f"{TURNS}.timeout_s": 9.0,
    }),
    # ---- who there is, and where
    (views.needs, {"algorithm.name": "grpo"}, {
        "algorithm.name": "ppo",
        "critic.enable": True,
        "trainer.nnodes": 2,
        "trainer.n_gpus_per_node": 2,
        "trainer.ray_address": "1.2.3.4:6379",
    }),
    (views.needs, {**KL, **GAE}, {
        f"{REF}.enable_resource_pool": True,
        "critic.enable_resource_pool": True,
        "trainer.max_colocate_count": 1,
    }),
    (views.needs, {**KL, f"{REF}.enable_resource_pool": True}, under(REF, {"n_gpus_per_node": 2, "nnodes": 2})),
    (views.needs, {**GAE, "critic.enable_resource_pool": True}, under(CRITIC, {"n_gpus_per_node": 2, "nnodes": 2})),
    (views.needs, {"trainer.schedule": "one_step_off", f"{ROLLOUT}.nnodes": 1}, {
        f"{ROLLOUT}.nnodes": 2,
        f"{ROLLOUT}.n_gpus_per_node": 2,
        "trainer.schedule": "sync",
    }),
    (views.cluster, {}, {
        f"{INIT}.num_cpus": 3,
        f"{INIT}.num_gpus": 3,
        f"{INIT}.object_store_memory": 99_000_000,
        f"{INIT}.runtime_env": {"env_vars": {"A": "b"}},
        "trainer.stall_timeout_s": 9.0,
        "trainer.full_determinism": True,
        "actor_rollout_ref.nccl_timeout": 9,
    }),
    # ---- what the data sets hold
    (views.prompts, {"data.max_prompt_length": 8}, {
        "data.prompt_key": "other",
        "data.answer_key": "gold",
        "data.reward_fn_key": "kind",
        "data.max_prompt_length": 2,
    }),
    (views.prompts, {"data.max_prompt_length": 4, "data.truncation": "right"}, {
        "data.truncation": "left",
        "data.filter_overlong_prompts": True,
    }),
    (views.prompts, {"data.apply_chat_template": "true", f"{MODEL}.custom_chat_template": TEMPLATE}, {
        "data.apply_chat_template_kwargs": {"word": "x"},
    }),
    (views.prompts, {"data.custom_cls.name": "First"}, {"data.custom_cls.path": "{classes}"}),
    (views.prompts, {"data.custom_cls.path": "{classes}", "data.custom_cls.name": "First"}, {
        "data.custom_cls.name": "Second",
    }),
    (views.prompts_of_files, {"data.train_files": "{a}", "data.val_files": "{a}"}, {
        "data.train_files": "{b}",
        "data.val_files": "{b}",
    }),
    (views.validation_prompts, {"data.val_max_samples": 3}, {"data.validation_shuffle": True}),
    (views.batches, {"data.train_batch_size": 2}, {"data.last_batch": "short"}),
    (views.answers, {}, {"data.messages_key": "chat", "data.tools_key": "schemas"}),
    (views.plain_answers, {}, {"data.response_key": "more", "data.max_length": 2}),
    (views.texts, {}, {"data.text_key": "words"}),
    (views.pair_rows, {"data.on_bad_row": "drop"}, {"data.on_bad_row": "error"}),
    # ---- how answers are scored
    (views.reward, {}, {
        "reward.timeout_s": 3.0,
        "reward.on_error": "zero",
        "reward.reward_fn": views.other_reward,
        "reward.judge.url": "http://judge",
    }),
    (views.reward, {"reward.reward_fn": None, "reward.custom_reward_function.name": "first"}, {
        "reward.custom_reward_function.path": "{classes}",
    }),
    (views.reward, {
        "reward.reward_fn": None, "reward.custom_reward_function.path": "{classes}",
        "reward.custom_reward_function.name": "first",
    }, {
        "reward.custom_reward_function.name": "second",
        "reward.custom_reward_function.reward_kwargs": {"extra": 1},
    }),
    (views.judge, JUDGE, {
        "reward.judge.model": "m",
        "reward.judge.prompt": "{response}",
        "reward.judge.scale": 3.0,
        "reward.judge.concurrency": 3,
        "reward.judge.api_key_variable": "KEY",
    }),
    (views.scorer, {"reward_model.model.path": "a"}, {
        "reward_model.model.path": "b",
        "reward_model.model.trust_remote_code": True,
        "reward_model.normalize": "batch",
        "reward_model.micro_batch_size_per_gpu": 3,
        "reward_model.max_length": 33,
    }),
]  # fmt: skip

RECORDS = {
    "record": Base("grpo", {}, {
        "trainer.project_name": "mine",
        "trainer.experiment_name": "mine",
        "trainer.logger": ["tensorboard"],
        "trainer.save_freq": 1,
        "trainer.save_final": True,
        "trainer.default_local_dir": "{folder}",
        "trainer.rollout_data_dir": "{folder}",
        "trainer.validation_data_dir": "{folder}",
        "trainer.val_before_train": True,
        "trainer.log_val_generations": 2,
        "trainer.best_metric": "val-core/none",
        "data.val_batch_size": 1,
        "trainer.profile_steps": [1],
    }),
    "checkpoints": Base("grpo", {"trainer.save_freq": 1}, {
        "trainer.max_actor_ckpt_to_keep": 1,
    }),
    "one checkpoint": Base("grpo", {
        "trainer.save_freq": 1, "trainer.max_actor_ckpt_to_keep": 1, "trainer.total_training_steps": 4,
        f"{ACTOR}.optim.lr": 0.02, f"{VAL}.do_sample": True, f"{VAL}.temperature": 1.0,
        "reward.reward_fn": cases_toys.worse_the_better,
    }, {"trainer.keep_best": True}),
    "validated only": Base("grpo", {"trainer.val_before_train": True, "trainer.log_val_generations": 1}, {
        "trainer.val_only": True,
    }),
    "own prompts": Base("grpo", {"trainer.sample_freq": 2, "trainer.sample_prompts": ["1+1="]}, {
        "trainer.sample_freq": 1,
        "trainer.sample_prompts": ["2+2=", "3+3="],
    }),
    "profiled": Base("grpo", {"trainer.profile_steps": [1]}, {"trainer.profile_dir": "{folder}"}),
    "resumed": Base("grpo", {"trainer.default_local_dir": "{done}"}, {"trainer.resume_mode": "disable"}),
    "resumed from": Base("grpo", {
        "trainer.resume_mode": "resume_path", "trainer.resume_from_path": "{done}/global_step_1",
        "trainer.total_training_steps": 3,
    }, {"trainer.resume_from_path": "{done}/global_step_2"}),
    "varied groups": Base("grpo", {f"{FILTER}.enable": True, f"{FILTER}.on_limit": "smaller"}, {
        f"{FILTER}.max_num_gen_batches": 1,
        "data.gen_batch_size": 2,
    }),
    "accuracies": Base("grpo", {
        f"{FILTER}.enable": True, f"{FILTER}.on_limit": "smaller", "reward.reward_fn": cases_toys.accurate,
    }, {f"{FILTER}.metric": "acc"}),
    "a limit": Base("grpo", {
        f"{FILTER}.enable": True, f"{FILTER}.on_limit": "smaller", f"{FILTER}.max_num_gen_batches": 1,
    }, {f"{FILTER}.on_limit": "error"}),
}  # fmt: skip
REFUSALS = {
    "data.max_prompt_length": "max_prompt_length 2",
    "data.max_length": "max_length 2",
    "data.tools_key": "tools are text but not JSON",
    "data.on_bad_row": "on_bad_row",
    f"{ROLLOUT}.strict": "vllm",
    "trainer.device": "mps",
    "trainer.best_metric": "trainer.best_metric=val-core/none",
    f"{FILTER}.on_limit": "limit of 1 draws",
}
"""Options whose effect is an error: what it says."""

ELSEWHERE = {
    f"{FILTER}.carry": "config/test_config_checks.py::test_groups_may_be_carried_where_their_age_is_corrected",
    "algorithm.custom_path": "trainer/test_trainer_algorithms.py::"
    "test_validation_scores_every_row_once_and_a_custom_estimator_is_used",
    "distillation.teacher_path": "trainer/test_trainer_online.py::test_distillation_brings_the_student_to_the_teacher",
    "preference.precompute_ref_log_probs": "trainer/test_trainer_dpo.py::test_precomputed_log_probs_train_the_same",
    "reward_model.enable": "trainer/test_trainer_rm.py::test_ppo_is_scored_by_it",
    "trainer.max_restarts": "scale/test_scale_faults.py::test_a_killed_worker_ends_the_run_and_the_next_one_goes_on",
    "trainer.total_epochs": "cases/test_cases_checkpoints.py::"
    "test_B62_resuming_at_the_end_of_an_epoch_does_the_next_epoch",
}
"""Options with a test of their own: file and function, which names the option."""
