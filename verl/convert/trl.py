"""TRL's config classes (version 1.16) in our keys. Its defaults are written out where ours differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.convert.result import Converted, refusal
from verl.convert.trl_rules import beta_rule, loss_type_rule, rule_for
from verl.convert.trl_work import OPTIM, POLICY, Conversion, No, Unneeded
from verl.errors import ConfigError

CONFIG_CLASSES = {
    "GRPOConfig": "grpo", "RLOOConfig": "rloo", "DPOConfig": "dpo", "KTOConfig": "kto", "SFTConfig": "sft",
    "RewardConfig": "rm", "OnlineDPOConfig": "online_dpo", "ORPOConfig": "orpo", "CPOConfig": "cpo",
}  # fmt: skip
"""Class → our ``algorithm.name``."""
KINDS = tuple(CONFIG_CLASSES.values())


def convert_trl(given: Mapping[str, Any], kind: str, name: str, processes: int = 1) -> Converted:
    """Convert the arguments of a TRL config. ``kind`` is our ``algorithm.name``; ``processes``: how many it ran on."""
    work = Conversion(given, kind, name, processes)
    work.put("algorithm.name", kind)
    _defaults(work)
    for key, value in given.items():
        rule = rule_for(kind, key)
        if type(value).__name__ == "Expression":
            work.result.changed.append(f"{key}={value} is computed by the script; write its value in")
        elif rule is None:
            work.result.dropped.append(f"{key}={value}: not a known key of TRL's")
        elif isinstance(rule, Unneeded):
            work.result.unneeded.append(key)
        elif isinstance(rule, No):
            if value in rule.harmless:
                work.result.unneeded.append(key)
            else:
                work.result.dropped.append(f"{key}={value}: {rule.why}")
        elif isinstance(rule, str):
            work.put(rule, value)
        else:
            rule(work, value)
    _sizes(work)
    _remove_refused(work.result)
    return work.result


def _remove_refused(result: Converted) -> None:
    """Values that our options do not take are told in place of being written."""
    for key, value in list(result.values.items()):
        problem = refusal(key, value)
        if problem is not None:
            del result.values[key]
            result.comments.pop(key, None)
            result.dropped.append(problem)


def guess_kind(content: Mapping[str, Any], name: str) -> str:
    """Which trainer a file without a class is for, by the keys that only one has."""
    for keys, kind in (
        (("num_generations", "max_completion_length", "epsilon", "num_iterations"), "grpo"),
        (("desirable_weight", "undesirable_weight"), "kto"),
        (("center_rewards_coefficient",), "rm"),
        (("completion_only_loss", "assistant_only_loss", "packing", "dataset_text_field"), "sft"),
        (("precompute_ref_log_probs", "f_divergence_type", "rpo_alpha", "ld_alpha", "label_smoothing"), "dpo"),
    ):
        if any(key in content for key in keys):
            return kind
    raise ConfigError(f"{name} does not show which trainer it is for: give --kind, one of {', '.join(KINDS)}")


# ---- sizes and defaults ------------------------------------------------------------------------------------------
def _defaults(work: Conversion) -> None:
    """What TRL does where nothing is said, and ours is another."""
    work.default("learning_rate", f"{OPTIM}.lr", work.value("learning_rate"))
    work.default("lr_scheduler_type", f"{OPTIM}.lr_scheduler_type", "linear")
    work.default("weight_decay", f"{OPTIM}.weight_decay", 0.0)
    if "max_steps" not in work.given:
        work.default("num_train_epochs", "trainer.total_epochs", 3)
    if work.kind in ("grpo", "rloo"):
        work.default("max_completion_length", "data.max_response_length", 512)
        for key, rule in (("loss_type", loss_type_rule), ("beta", beta_rule)):
            if key not in work.given:
                rule(work, work.value(key))
        if "delta" not in work.given:
            work.put(f"{POLICY}.actor.clip_ratio_c", 1e9, "TRL has no dual clip")


def _sizes(work: Conversion) -> None:
    """TRL counts rows a process; we count prompts of a whole step."""
    if work.processes > 1:
        work.put("trainer.n_gpus_per_node", work.processes)
    rows = work.value("per_device_train_batch_size")
    accumulate = work.value("gradient_accumulation_steps")
    if not isinstance(rows, int) or not isinstance(accumulate, int):
        return
    work.put(f"{POLICY}.actor.ppo_micro_batch_size_per_gpu", rows, "rows a forward pass of a process")
    step = rows * accumulate * work.processes
    if work.kind not in ("grpo", "rloo"):
        work.put("data.train_batch_size", step, f"{rows} x {accumulate} accumulated x {work.processes} processes")
        return
    n = work.value("num_generations")
    if not isinstance(n, int):
        return
    work.put(f"{POLICY}.rollout.n", n)
    generated = work.given.get("generation_batch_size")
    if generated is None:
        generated = rows * work.processes * (work.given.get("steps_per_generation") or accumulate)
    if generated % n or step % n:
        work.result.changed.append(
            f"a step has {step} answers, which are no whole groups of {n}: data.train_batch_size is rounded up"
        )
    work.put("data.train_batch_size", -(-generated // n), f"prompts a rollout: {generated} answers in groups of {n}")
    if step != generated:
        work.put(f"{POLICY}.actor.ppo_mini_batch_size", -(-step // n), "prompts an optimizer step")
