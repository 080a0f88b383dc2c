"""Every name a configuration value may have, in one place.

The algorithms register the same names; a test there compares the two lists. Names that are one
sentence away from being an estimator or a loss (because they need something that is not here)
stand in :data:`UNAVAILABLE` with the reason.
"""

from __future__ import annotations

from typing import Any

from verl.hardware import parse_dtype

ESTIMATORS = (
    "gae",
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gpg",
)
"""``algorithm.adv_estimator``."""

GROUP_ESTIMATORS = frozenset(ESTIMATORS) - {"gae", "reinforce_plus_plus", "remax"}
"""Estimators that compare a sample with the other samples of its prompt, so ``rollout.n`` should be above 1."""

POLICY_LOSSES = ("vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo", "dppo_tv", "dppo_kl")
"""``actor.policy_loss.loss_mode``."""

UNAVAILABLE = {
    "optimal_token_baseline": "it needs per-token squared gradient norms, which are not computed here",
    "tir_optimal_token_baseline": "it needs per-token squared gradient norms, which are not computed here",
    "gdpo": "it needs several reward dimensions a row; combine them in your reward function and use grpo",
    "dro": "it is not implemented here",
    "bypass_mode": "set algorithm.rollout_correction.bypass_mode=true and keep the loss mode",
    "full": "the full-vocabulary KL is not implemented; use low_var_kl",
    "trtllm": "there is no TensorRT-LLM rollout; use auto, native, vllm or sglang",
}
"""Names of other systems, with why they do not work here."""

_KL_BASE = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_ESTIMATORS = (*_KL_BASE, *(f"{name}+" for name in _KL_BASE))
"""``algorithm.kl_penalty`` and ``actor.kl_loss_type``; ``+`` takes the value of the estimator and k2's gradient."""

PAIR_LOSSES = (
    *("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard"),
    *("aot", "aot_pair", "aot_unpaired", "apo_zero", "apo_down", "discopop", "simpo", "orpo", "cpo"),
)
LABEL_LOSSES = ("kto", "apo_zero_unpaired", "bco")
REFERENCE_FREE = frozenset({"simpo", "orpo", "cpo"})
PREFERENCE_LOSSES = (*PAIR_LOSSES, *LABEL_LOSSES)
"""``preference.loss_type``: over pairs, over labelled answers; those of them that use no reference."""

KL_CONTROLLERS = ("fixed", "adaptive")
LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
ROLLOUT_IS = ("token", "sequence")
ROLLOUT_RS = (
    *(f"token_{k}" for k in ("k1", "k2", "k3")),
    *(f"seq_{how}_{k}" for how in ("sum", "mean", "max") for k in ("k1", "k2", "k3") if (how, k) != ("max", "k1")),
)
"""Rejection rules: which log-ratio divergence, a token at a time or summed, averaged or maximal over a sequence."""

CORRECTION_LOSSES = ("ppo_clip", "reinforce")
FILTER_METRICS = ("score", "acc", "seq_reward", "seq_final_reward")

ROLLOUT_ENGINES = ("auto", "native", "hf", "vllm", "vllm_server", "sglang")
TOOL_FORMATS = ("hermes", "llama3_json")
DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
# Written as one string, so that a search-and-replace of a quoted attention name over a clone leaves the list whole.
_ATTENTION = "auto eager sdpa varlen flash_attn flash_attention_2 flash_attention_3"
ATTENTION = tuple(_ATTENTION.split())
OPTIMIZERS = ("AdamW", "SGD", "Adafactor", "AdamW8bit", "PagedAdamW8bit", "PagedAdamW")
QUANTIZATIONS = ("nf4", "int8")
STRATEGIES = ("auto", "torch", "fsdp", "megatron")
_STRATEGY_ALIASES = {"fsdp2": "fsdp", "fsdp1": "fsdp", "dp": "torch", "ddp": "torch"}
"""``strategy``: every process has all weights, a shard of them, or a part of every matrix."""
RECOMPUTED_MODULES = ("core_attn", "mlp", "layernorm")
SCHEDULES = ("constant", "cosine", "linear", "wsd")
TRUNCATIONS = ("error", "left", "right", "middle", "keep_start", "keep_end")
LOGGERS = ("console", "jsonl", "file", "tensorboard", "wandb", "mlflow", "swanlab", "trackio", "clearml")


def dtype_name(value: object) -> str:
    """``bf16``, ``torch.bfloat16``, ``Half`` … → the name in :data:`DTYPES`. ConfigError if it is no dtype."""
    return parse_dtype(value, "dtype") or "auto"


def top_k_off(value: int) -> int:
    """Some engines write "all tokens" as 0, others as -1; here it is -1."""
    return value or -1


def strategy_name(value: Any) -> Any:
    """``fsdp2`` and the like by the names used here."""
    return _STRATEGY_ALIASES.get(str(value).lower(), value)
