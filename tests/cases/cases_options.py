"""Options, each with a run that it changes. Many have an effect only beside another one: those runs have a base."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
VAL, CORRECTION = f"{ROLLOUT}.val_kwargs", "algorithm.rollout_correction"
KL_CTRL, FILTER, LOSS = "algorithm.kl_ctrl", "algorithm.filter_groups", f"{ACTOR}.policy_loss"


@dataclass(frozen=True)
class Base:
    """A short run, and what changes it: key → value."""

    algorithm: str
    given: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    validation: bool = False


RUNS = {
    "grpo": Base("grpo", {}, {
        f"{ACTOR}.optim.lr": 0.01,
        f"{ACTOR}.optim.weight_decay": 0.5,
        f"{ACTOR}.optim.betas": [0.5, 0.9],
        f"{ACTOR}.optim.eps": 0.1,
        f"{ACTOR}.optim.optimizer": "SGD",
        f"{ACTOR}.optim.lr_scheduler_type": "linear",
        f"{ACTOR}.optim.lr_warmup_steps": 2,
        f"{ACTOR}.optim.lr_warmup_steps_ratio": 1.0,
        f"{ACTOR}.optim.override_optimizer_config": {"amsgrad": True},
        f"{ACTOR}.grad_clip": 0.001,
        f"{ACTOR}.clip_ratio": 0.001,
        f"{ACTOR}.clip_ratio_low": 0.001,
        f"{ACTOR}.clip_ratio_high": 0.001,
        f"{ACTOR}.clip_ratio_c": 1.0001,
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
        f"{ACTOR}.entropy_coeff": 0.1,
        f"{ACTOR}.calculate_entropy": True,
        f"{ACTOR}.use_kl_loss": True,
        f"{ACTOR}.ppo_epochs": 2,
        f"{ACTOR}.ppo_mini_batch_size": 4,
        f"{ACTOR}.shuffle": True,
        f"{LOSS}.loss_mode": "gspo",
        f"{MODEL}.lora_rank": 4,
        f"{ROLLOUT}.n": 2,
        f"{ROLLOUT}.temperature": 0.7,
        f"{ROLLOUT}.top_k": 3,
        f"{ROLLOUT}.top_p": 0.4,
        f"{ROLLOUT}.min_p": 0.3,
        f"{ROLLOUT}.repetition_penalty": 5.0,
        f"{ROLLOUT}.min_tokens": 4,
        f"{ROLLOUT}.ignore_eos": True,
        f"{ROLLOUT}.do_sample": False,
        f"{ROLLOUT}.stop": ["a", "1"],
        f"{ROLLOUT}.stop_token_ids": list(range(5, 40)),
        f"{ROLLOUT}.seed": 7,
        "data.seed": 7,
        "data.shuffle": False,
        "data.train_batch_size": 6,
        "data.train_max_samples": 8,
        "data.max_response_length": 3,
        "data.apply_chat_template": "true",
        "algorithm.adv_estimator": "rloo",
        "algorithm.norm_adv_by_std_in_grpo": False,
        "algorithm.use_kl_in_reward": True,
        f"{CORRECTION}.rollout_is": "token",
        f"{CORRECTION}.bypass_mode": True,
        f"{FILTER}.enable": True,
        "reward.overlong_buffer.enable": True,
        "trainer.seed": 7,
        "trainer.total_training_steps": 1,
    }),
    "ppo": Base("ppo", {}, {
        "algorithm.gamma": 0.5,
        "algorithm.lam": 0.5,
        "critic.optim.lr": 0.5,
        "critic.cliprange_value": 0.0001,
        "critic.ppo_epochs": 3,
        "critic.grad_clip": 0.0001,
        "critic.loss_agg_mode": "seq-mean-token-sum",
        "critic.ppo_mini_batch_size": 4,
        "critic.shuffle": True,
        "trainer.critic_warmup": 1,
    }),
    "KL in the loss": Base("grpo", {f"{ACTOR}.use_kl_loss": True}, {
        f"{ACTOR}.kl_loss_coef": 1.0,
        f"{ACTOR}.kl_loss_type": "kl",
    }),
    "KL in the reward": Base("grpo", {"algorithm.use_kl_in_reward": True, f"{KL_CTRL}.kl_coef": 0.5}, {
        "algorithm.kl_penalty": "abs",
        f"{KL_CTRL}.kl_coef": 2.0,
        f"{KL_CTRL}.type": "adaptive",
    }),
    "steered KL": Base("grpo", {
        "algorithm.use_kl_in_reward": True, f"{KL_CTRL}.kl_coef": 0.5, f"{KL_CTRL}.type": "adaptive",
        f"{KL_CTRL}.horizon": 20, f"{KL_CTRL}.target_kl": 1e-9, "trainer.total_training_steps": 3,
    }, {f"{KL_CTRL}.horizon": 200, f"{KL_CTRL}.target_kl": 100.0}),
    "shuffled mini-batches": Base("grpo", {f"{ACTOR}.shuffle": True}, {f"{ACTOR}.data_loader_seed": 3}),
    "divided by a constant": Base("grpo", {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"}, {
        f"{ACTOR}.loss_scale_factor": 77.0,
    }),
    "sapo": Base("grpo", {f"{LOSS}.loss_mode": "sapo"}, {f"{ACTOR}.tau_pos": 9.0, f"{ACTOR}.tau_neg": 9.0}),
    "clip_cov": Base("grpo", {
        f"{LOSS}.loss_mode": "clip_cov", f"{LOSS}.clip_cov_ratio": 0.5, f"{LOSS}.clip_cov_lb": -10.0,
        f"{LOSS}.clip_cov_ub": 10.0,
    }, {f"{LOSS}.clip_cov_ratio": 0.1, f"{LOSS}.clip_cov_lb": 0.2, f"{LOSS}.clip_cov_ub": 0.1}),
    "kl_cov": Base("grpo", {f"{LOSS}.loss_mode": "kl_cov", f"{LOSS}.kl_cov_ratio": 0.5}, {
        f"{LOSS}.kl_cov_ratio": 0.1,
        f"{LOSS}.ppo_kl_coef": 9.0,
    }),
    "cosine": Base("grpo", {f"{ACTOR}.optim.lr_scheduler_type": "cosine"}, {
        f"{ACTOR}.optim.min_lr_ratio": 0.5,
        f"{ACTOR}.optim.num_cycles": 2.0,
    }),
    "importance weights": Base("grpo", {
        f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": 0.5,
    }, {
        f"{CORRECTION}.rollout_is_threshold": 0.25,
        f"{CORRECTION}.rollout_is_batch_normalize": True,
    }),
    "rejection": Base("grpo", {f"{CORRECTION}.rollout_rs": "token_k2", f"{CORRECTION}.rollout_rs_threshold": "2.0"}, {
        f"{CORRECTION}.rollout_rs": "seq_sum_k2",
        f"{CORRECTION}.rollout_rs_threshold": "1e-15",
    }),
    "the engine's log-probs": Base("grpo", {f"{CORRECTION}.bypass_mode": True}, {
        f"{CORRECTION}.loss_type": "reinforce",
    }),
    "overlong": Base("grpo", {"reward.overlong_buffer.enable": True}, {
        "reward.overlong_buffer.len": 4,
        "reward.overlong_buffer.penalty_factor": 0.3,
    }),
    "adapters": Base("grpo", {f"{MODEL}.lora_rank": 4}, {
        f"{MODEL}.lora_alpha": 99,
        f"{MODEL}.target_modules": ["q_proj"],
        f"{MODEL}.exclude_modules": ["q_proj"],
    }),
    "validation": Base("grpo", {"trainer.test_freq": 2}, {
        f"{VAL}.n": 2,
        "data.val_max_samples": 2,
        "trainer.test_freq": -1,
    }, validation=True),
    "validation that could sample": Base("grpo", {"trainer.test_freq": 2, f"{VAL}.temperature": 1.0}, {
        f"{VAL}.do_sample": True,
    }, validation=True),
    "sampled validation": Base("grpo", {"trainer.test_freq": 2, f"{VAL}.do_sample": True, f"{VAL}.temperature": 1.0}, {
        f"{VAL}.temperature": 0.3,
        f"{VAL}.top_k": 2,
        f"{VAL}.top_p": 0.2,
    }, validation=True),
    "dpo": Base("dpo", {}, {
        "preference.loss_type": "ipo",
        "preference.beta": 0.9,
        "preference.label_smoothing": 0.2,
        "preference.rpo_alpha": 1.0,
        "preference.ld_alpha": 0.1,
        "preference.use_weighting": True,
        "preference.length_normalize": True,
        "preference.ref_model_path": "{other}",
    }),
    "a reference that may follow": Base("dpo", {"preference.ref_model_sync_steps": 1}, {
        "preference.sync_ref_model": True,
    }),
    "SFT in between": Base("dpo", {"sft.train_files": "{answers}", "sft.ratio": 0.5}, {
        "sft.ratio": 0.1,
        "sft.train_batch_size": 2,
    }),
    "SFT may stand in between": Base("dpo", {"sft.ratio": 0.5}, {"sft.train_files": "{answers}"}),
    "a reference that follows": Base("dpo", {"preference.sync_ref_model": True, "preference.ref_model_sync_steps": 1}, {
        "preference.ref_model_sync_steps": 2,
        "preference.ref_model_mixup_alpha": 0.1,
    }),
    "simpo": Base("dpo", {"preference.loss_type": "simpo"}, {"preference.simpo_gamma": 3.0}),
    "cpo": Base("dpo", {"preference.loss_type": "cpo"}, {"preference.cpo_alpha": 5.0}),
    "discopop": Base("dpo", {"preference.loss_type": "discopop"}, {"preference.discopop_tau": 3.0}),
    "kto": Base("kto", {}, {"preference.desirable_weight": 3.0, "preference.undesirable_weight": 3.0}),
    "rm": Base("rm", {}, {"reward_model.center_rewards_coefficient": 1.0}),
}  # fmt: skip
CUTS = {
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 20,
    f"{ACTOR}.use_dynamic_bsz": True,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 1,
    f"{ROLLOUT}.max_num_seqs": 2,
    "reward.num_workers": 2,
    "trainer.executor": "serial",
    f"{MODEL}.enable_gradient_checkpointing": True,
}
"""Options that may change time and memory, but no value."""
