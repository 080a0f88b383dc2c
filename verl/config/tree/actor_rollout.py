"""``actor_rollout_ref.*``: the model that is trained, its reference copy, and how it generates."""

# ruff: noqa: RUF009  (option() and group() make dataclass fields)
from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from verl.config import names
from verl.config.fields import group, option
from verl.config.tree.megatron import MegatronConfig, MegatronSplit
from verl.config.tree.sharding import FSDPConfig

_MICRO = "Sequences a forward pass; `null`: by memory (or by tokens with {dynamic})."


@dataclass(slots=True)
class Model:
    """The policy model; the reference starts from the same weights."""

    path: str | None = option(
        None, "Model folder or hub name. Required.", path=True, verl="~/models/deepseek-llm-7b-chat"
    )
    tokenizer_path: str | None = option(None, "Tokenizer folder or hub name; `null`: `path`.", path=True)
    trust_remote_code: bool = option(False, "Allow the model to run code from its repository.")
    override_config: dict[str, Any] = option({}, "Values written over the model's own config before it is built.")
    enable_gradient_checkpointing: bool | None = option(
        None,
        "Recompute activations in the backward pass to save memory; `null` or `auto`: on a GPU where the memory plan "
        "needs it.",
        verl="true",
    )
    gradient_checkpointing_every: int = option(
        1, "Where activations are recomputed: in every so many layers; 2 keeps those of every other one.", low=1
    )
    quantization: str | None = option(
        None,
        "LoRA: the frozen linear layers in 4 bits (`nf4`) or 8 (`int8`), with the package bitsandbytes (QLoRA).",
        choices=names.QUANTIZATIONS,
    )
    compile_layers: bool = option(
        False, "Compile the decoder layers of the training model (CUDA): a minute at the start, then faster updates."
    )
    lora_rank: int = option(0, "Rank of LoRA adapters; 0: train all weights. Needs the package peft.", low=0)
    lora_alpha: float = option(16, "LoRA: adapters are scaled by alpha / rank.", above=0)
    target_modules: str | list[str] = option(
        "all-linear", "LoRA: `all-linear` (all but the output layer), a regular expression, or a list of name endings."
    )
    exclude_modules: str | list[str] | None = option(
        None, "LoRA: modules to leave out, as a regular expression or a list of endings."
    )
    lora_adapter_path: str | None = option(
        None, "LoRA: folder of an adapter to go on from; rank, alpha and targets are its own.", path=True
    )
    custom_chat_template: str | None = option(None, "Chat template (Jinja text) in place of the tokenizer's own.")
    external_lib: str | None = option(
        None, "Python module, or several with commas, imported before the model is built (to register architectures)."
    )
    attn_implementation: str = option(
        "auto",
        "Attention of the training model; `auto`: by the hardware.",
        choices=names.ATTENTION,
        verl="flash attention 2",
    )
    dtype: str = option(
        "auto",
        "Type the weights compute in; master weights and moments are always float32. `auto`: by the hardware.",
        choices=names.DTYPES,
        normalise=names.dtype_name,
        verl="bfloat16",
    )


@dataclass(slots=True)
class Optim:
    """The optimizer and its schedule."""

    lr: float = option(1e-6, "Peak learning rate.", low=0, below=inf)
    weight_decay: float = option(0.01, "Decoupled weight decay.", low=0)
    betas: list[float] = option([0.9, 0.999], "Decay rates of the two moments.")
    eps: float = option(1e-8, "Added to the root of the second moment.", above=0, verl="(1e-8)")
    optimizer: str = option(
        "AdamW",
        "Which optimizer. 8-bit ones keep a moment in one byte, paged ones let moments move to the host when the GPU "
        "is full; both need the package bitsandbytes.",
        choices=names.OPTIMIZERS,
    )
    override_optimizer_config: dict[str, Any] = option({}, "More arguments of the optimizer's constructor, by name.")
    lr_warmup_steps: int = option(-1, "Training steps of linear warm-up; -1: from `lr_warmup_steps_ratio`.", low=-1)
    lr_warmup_steps_ratio: float = option(0.0, "Warm-up as a fraction of all training steps.", low=0, high=1)
    lr_scheduler_type: str = option("constant", "After warm-up.", choices=names.SCHEDULES)
    min_lr_ratio: float = option(0.0, "Lowest rate of a decaying schedule, as a fraction of `lr`.", low=0, high=1)
    num_cycles: float = option(0.5, "Cosine periods; 0.5 goes down once.", above=0)
    offload: bool | None = option(
        None,
        "Master weights, gradient sums and moments in host memory, where the optimizer then runs (for GPUs); `null`: "
        "where the memory plan needs it.",
        verl="false",
    )


@dataclass(slots=True)
class PolicyLoss:
    """Which surrogate is minimised, and the constants of the covariance ones."""

    loss_mode: str = option("vanilla", "Policy loss; see `docs/algorithms.md`.", choices=names.POLICY_LOSSES)
    clip_cov_ratio: float = option(2e-4, "clip_cov: fraction of tokens whose gradient is cut.", above=0, high=1)
    clip_cov_lb: float = option(1.0, "clip_cov: lowest covariance that may be cut.")
    clip_cov_ub: float = option(5.0, "clip_cov: highest covariance that may be cut.")
    kl_cov_ratio: float = option(2e-4, "kl_cov: fraction of tokens with a KL penalty.", above=0, high=1)
    ppo_kl_coef: float = option(0.1, "kl_cov: weight of that penalty.", low=0)


@dataclass(slots=True)
class Actor:
    """The update of the policy."""

    ppo_mini_batch_size: int | None = option(
        None, "Prompts an optimizer step; `null`: `data.train_batch_size`, one step a rollout.", low=1, verl=256
    )
    ppo_micro_batch_size_per_gpu: int | None = option(
        None, _MICRO.format(dynamic="`use_dynamic_bsz`"), low=1, verl="one needed"
    )
    use_dynamic_bsz: bool = option(False, "Cut micro-batches by tokens, not by sequences.")
    ppo_max_token_len_per_gpu: int = option(
        16384, "Most tokens (prompt and response) a micro-batch when cut by tokens or memory.", low=1
    )
    clip_ratio: float = option(0.2, "PPO clip range, both sides.", low=0)
    clip_ratio_low: float | None = option(None, "Lower clip range; `null`: `clip_ratio`.", low=0, verl=0.2)
    clip_ratio_high: float | None = option(None, "Upper clip range; `null`: `clip_ratio`.", low=0, verl=0.2)
    clip_ratio_c: float = option(3.0, "Dual clip: bound of the loss for negative advantages.", above=1)
    loss_agg_mode: str = option("token-mean", "How token losses become one number.", choices=names.LOSS_AGG_MODES)
    loss_scale_factor: float | None = option(
        None, "Divisor of `seq-mean-token-sum-norm`; `null`: `data.max_response_length`.", above=0
    )
    entropy_coeff: float = option(0.0, "Weight of the entropy bonus.")
    calculate_entropy: bool = option(False, "Report the entropy even when its weight is 0.")
    use_kl_loss: bool = option(False, "Add the KL against the reference to the loss (GRPO style).")
    kl_loss_coef: float = option(0.001, "Weight of that KL.", low=0)
    kl_loss_type: str = option("low_var_kl", "KL estimator in the loss.", choices=names.KL_ESTIMATORS)
    ppo_epochs: int = option(1, "Passes over each rollout.", low=1)
    shuffle: bool = option(False, "Shuffle the prompts of a rollout before they are cut into mini-batches.")
    data_loader_seed: int | None = option(
        None, "Seed of that shuffle; `null`: `trainer.seed`.", low=0, below=1e18, verl=42
    )
    grad_clip: float = option(1.0, "Largest norm of the gradient; 0: no clipping.", low=0)
    tau_pos: float = option(1.0, "sapo: temperature of the gate for positive advantages.", above=0)
    tau_neg: float = option(1.05, "sapo: temperature of the gate for negative advantages.", above=0)
    max_nonfinite_steps: int = option(
        5, "A step with a non-finite gradient is skipped; after this many in a row the run stops.", low=1, verl="(none)"
    )
    strategy: str = option(
        "auto",
        "`torch`: every process has all weights; `fsdp` (or `fsdp2`): a shard each; `auto`: shards if there is more "
        "than one process; `megatron`: Megatron-Core lays the model over some of them.",
        choices=names.STRATEGIES,
        normalise=names.strategy_name,
        verl="fsdp",
    )
    ulysses_sequence_parallel_size: int = option(
        1, "Processes that share the tokens of each micro-batch, for long sequences; needs sharding.", low=1
    )
    fsdp_config: FSDPConfig = group(FSDPConfig, "Sharding of the policy.")
    megatron: MegatronConfig = group(MegatronConfig, "Megatron-Core under the policy.")
    optim: Optim = group(Optim, "Optimizer of the policy.")
    policy_loss: PolicyLoss = group(PolicyLoss, "Policy loss.")


@dataclass(slots=True)
class Ref:
    """The frozen reference, built only if a KL needs it."""

    strategy: str | None = option(
        None, "As `actor.strategy`; `null`: the actor's.", choices=names.STRATEGIES, normalise=names.strategy_name
    )
    ulysses_sequence_parallel_size: int | None = option(
        None, "Processes that share the tokens of each micro-batch; `null`: as the actor.", low=1
    )
    fsdp_config: FSDPConfig = group(FSDPConfig, "Sharding of the reference.")
    megatron: MegatronSplit = group(MegatronSplit, "Megatron-Core under the reference.")
    log_prob_micro_batch_size_per_gpu: int | None = option(
        None, _MICRO.format(dynamic="`log_prob_use_dynamic_bsz`"), low=1
    )
    log_prob_use_dynamic_bsz: bool | None = option(None, "Cut by tokens; `null`: as the actor.")
    log_prob_max_token_len_per_gpu: int | None = option(None, "Most tokens a micro-batch; `null`: as the actor.", low=1)
    param_offload: bool | None = option(
        None,
        "Its weights lie in host memory while it has nothing to do (for GPUs); `null`: where the memory plan needs it.",
        verl="false",
    )
    enable_resource_pool: bool = option(False, "Devices of its own, so that it works beside the others.", verl="(none)")
    n_gpus_per_node: int | None = option(None, "How many on a machine; `null`: as the trainer.", low=1, verl="(none)")
    nnodes: int = option(1, "Machines that it has for itself.", low=1, verl="(none)")


@dataclass(slots=True)
class ValKwargs:
    """Sampling in validation; the default is one greedy answer."""

    n: int = option(1, "Answers a validation prompt.", low=1)
    do_sample: bool = option(False, "Sample; false: greedy.")
    temperature: float = option(0.0, "Temperature when sampling.", low=0)
    top_k: int = option(-1, "Most likely tokens kept; -1 or 0: all.", low=-1, normalise=names.top_k_off)
    top_p: float = option(1.0, "Probability mass kept.", above=0, high=1)


@dataclass(slots=True)
class MultiTurn:
    """Rollouts of several turns: tools, or an environment of your own, answer the policy."""

    enable: bool = option(False, "Go on after a turn, as long as it is answered.")
    tool_config_path: str | None = option(
        None,
        "Python file whose public functions are the tools; type hints and docstrings describe them to the model.",
        path=True,
    )
    environment: Any = option(
        None,
        "Who answers, in place of tools (only from Python): `fn(messages, row)` returns messages, or None at the end.",
        verl="(none)",
    )
    environment_path: str | None = option(None, "The same from a file: `FILE.py:NAME`.", path=True, verl="(none)")
    format: str = option("hermes", "How a tool call is written.", choices=names.TOOL_FORMATS)
    max_assistant_turns: int | None = option(None, "Most turns of the policy; `null`: by the response length.", low=1)
    max_user_turns: int | None = option(None, "Most answers to it; `null`: by the response length.", low=0)
    max_parallel_calls: int = option(1, "Tool calls of one turn that are run.", low=1)
    max_tool_response_length: int = option(256, "Characters of an answer that are shown to the policy.", low=1)
    tool_response_truncate_side: str = option(
        "middle", "What is cut of a longer one.", choices=("left", "middle", "right")
    )
    timeout_s: float = option(60.0, "Seconds for one answer.", above=0, verl="(none)")


@dataclass(slots=True)
class EngineKwargs:
    """Passed on as they are."""

    vllm: dict[str, Any] = option({}, "Arguments of `vllm.EngineArgs`, by name. They win over everything else here.")
    sglang: dict[str, Any] = option({}, "Arguments of `sglang.Engine`, by name. They win over everything else here.")


@dataclass(slots=True)
class Rollout:
    """How answers are generated for training."""

    name: str = option(
        "auto",
        "Engine; `auto`: the best that runs on this machine without another package.",
        choices=names.ROLLOUT_ENGINES,
        verl="required",
    )
    strict: bool = option(
        False,
        "Stop if the named engine cannot run here, in place of falling back to native with a notice.",
        verl="(none)",
    )
    nnodes: int = option(
        0, "Machines with devices of the rollout's own, for `trainer.schedule=one_step_off`; 0: none.", low=0
    )
    n_gpus_per_node: int | None = option(None, "How many on a machine; `null`: as the trainer.", low=1)
    n: int = option(1, "Answers a training prompt.", low=1)
    do_sample: bool = option(True, "Sample; false: greedy.")
    temperature: float = option(1.0, "Temperature, of sampling and of the log-probs in training alike.", low=0)
    top_k: int = option(-1, "Most likely tokens kept; -1 or 0: all.", low=-1, normalise=names.top_k_off)
    top_p: float = option(1.0, "Probability mass kept.", above=0, high=1)
    min_p: float = option(0.0, "Tokens below this fraction of the best one's probability are left out.", low=0, below=1)
    repetition_penalty: float = option(
        1.0, "Divides (or multiplies, if negative) logits of tokens that prompt or answer holds already.", above=0
    )
    min_tokens: int = option(0, "Tokens an answer has before its end may be drawn.", low=0)
    stop: list[str] = option([], "Texts that end an answer.")
    stop_token_ids: list[int] = option([], "Token ids that end an answer, besides the model's own.")
    ignore_eos: bool = option(False, "Go on after the end-of-sequence token, up to the full length.")
    max_num_seqs: int = option(256, "Most sequences decoded at a time.", low=1)
    max_num_batched_tokens: int = option(8192, "Most prompt tokens a prefill pass.", low=1)
    gpu_memory_utilization: float = option(
        0.5,
        "Share of the GPU's free memory that the cache of running sequences takes. vLLM, SGLang: share of the whole "
        "GPU, weights included.",
        above=0,
        high=1,
    )
    dtype: str = option(
        "auto",
        "Type the engine computes in; `auto`: the model's. The environment variable `VLLM_DTYPE` sets it too.",
        choices=names.DTYPES,
        normalise=names.dtype_name,
        verl="bfloat16",
    )
    seed: int | None = option(None, "Seed of sampling; `null`: `trainer.seed`.", low=0, below=1e18, verl=42)
    max_model_len: int | None = option(
        None, "vLLM, SGLang: tokens of prompt and response together; `null`: the lengths of `data`.", low=2
    )
    tensor_model_parallel_size: int = option(
        1, "Processes (vLLM, SGLang: GPUs) that share the model and generate together.", low=1, verl=2
    )
    enforce_eager: bool | None = option(
        None, "vLLM, SGLang: no compilation and no CUDA graphs; `null`: on a CPU only.", verl="false"
    )
    enable_chunked_prefill: bool = option(True, "vLLM, SGLang: long prompts are computed in pieces, beside decoding.")
    enable_prefix_caching: bool = option(True, "vLLM, SGLang: equal beginnings of prompts are computed once.")
    free_cache_engine: bool = option(
        True,
        "vLLM, SGLang: weights and cache are given back between rollouts. The native engine always gives its cache "
        "back.",
    )
    engine_kwargs: EngineKwargs = group(EngineKwargs, "More arguments of a serving engine.")
    server_url: str | None = option(
        None, "vllm_server: address of the running server, for example `http://localhost:8000`.", verl="(none)"
    )
    server_weights_dir: str | None = option(
        None,
        "vllm_server: folder that the server sees too, for handing weights over; `null`: one in this machine's memory.",
        path=True,
        verl="(none)",
    )
    probe_tolerance: float | None = option(
        None,
        "vLLM: mean difference of its log-probs from the training model's that is allowed after an update; `null`: "
        "1e-3 in float32, 0.03 in float16, 0.1 in bfloat16.",
        above=0,
        verl="(none)",
    )
    log_prob_micro_batch_size_per_gpu: int | None = option(
        None, _MICRO.format(dynamic="`log_prob_use_dynamic_bsz`"), low=1
    )
    log_prob_use_dynamic_bsz: bool | None = option(None, "Cut old log-probs by tokens; `null`: as the actor.")
    log_prob_max_token_len_per_gpu: int | None = option(None, "Most tokens a micro-batch; `null`: as the actor.", low=1)
    val_kwargs: ValKwargs = group(ValKwargs, "Sampling in validation.")
    multi_turn: MultiTurn = group(MultiTurn, "Rollouts of several turns.")


@dataclass(slots=True)
class ActorRolloutRef:
    """The policy in its three uses."""

    model: Model = group(Model, "The policy model.")
    actor: Actor = group(Actor, "Training of the policy.")
    ref: Ref = group(Ref, "The frozen reference.")
    rollout: Rollout = group(Rollout, "Generation.")
    nccl_timeout: int = option(600, "Seconds after which processes give up waiting for one of them.", low=1)
