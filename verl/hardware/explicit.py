"""What the user asked for, held against what the device can do."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from verl.errors import ConfigError
from verl.hardware.choice import ATTENTIONS, DTYPES, ENGINES, Choice, master_dtype, master_reason, scaling_reason
from verl.notices import notice

ROLLOUT_DTYPE_VARIABLE = "VLLM_DTYPE"
_DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_DTYPE_ALIASES |= {"fp64": "float64", "double": "float64"}
FLASH_ATTENTIONS = ("varlen", "flash_attn")
FLASH_DTYPES = ("bfloat16", "float16")
_FLASH = re.compile(r"(flash_attention|flash_attn)(_\d)?")


def parse_dtype(value: object, where: str) -> str | None:
    """Canonical name of a dtype as people write it ("bf16", "Half", ``torch.float32``); None for "auto" or nothing.

    Raises:
        ConfigError: not a dtype; the message names ``where`` and the names there are.
    """
    text = "auto" if value is None else str(value).strip().lower().removeprefix("torch.")
    if text in ("auto", "null", "none", ""):
        return None
    text = _DTYPE_ALIASES.get(text, text)
    if text not in DTYPES:
        raise ConfigError(f"{where}={value} is not a dtype; there are auto, {', '.join(DTYPES)}")
    return text


def environment_dtype(environ: Mapping[str, str] = os.environ) -> str | None:
    """The rollout dtype that the variable VLLM_DTYPE asks for, or None."""
    return parse_dtype(environ.get(ROLLOUT_DTYPE_VARIABLE), f"environment variable {ROLLOUT_DTYPE_VARIABLE}")


def check_explicit(
    choice: Choice,
    *,
    dtype: object = None,
    rollout_dtype: object = None,
    attention: str | None = None,
    rollout_engine: str | None = None,
    strict_engine: bool = False,
) -> Choice:
    """Put the user's explicit wishes in place of what was chosen (None or "auto": leave the choice).

    An engine that cannot run here falls back to the chosen one with a notice, unless ``strict_engine``; everything
    else that cannot run is an error.

    Raises:
        ConfigError: lists every wish that cannot be granted: what the device is, what it lacks, which value works.
    """
    problems: list[str] = []
    dtype_name = _checked_dtype(choice, "dtype", dtype, problems)
    rollout_name = _checked_dtype(choice, "rollout_dtype", rollout_dtype, problems)
    attention_name = _checked_attention(choice, attention, problems)
    engine_name = _checked_engine(choice, rollout_engine, strict_engine, problems)
    if attention_name in FLASH_ATTENTIONS and (computes := dtype_name or choice.dtype) not in FLASH_DTYPES:
        works = [name for name in choice.works("attention", ATTENTIONS) if name not in FLASH_ATTENTIONS]
        lack = f"flash attention does not compute in {computes}"
        problems.append(_refusal(choice, "attention", str(attention), lack, works))
    if problems:
        raise ConfigError(problems)
    if dtype_name:
        choice = _with(choice, "dtype", dtype_name, "asked for")
        choice = replace(choice, master_dtype=master_dtype(dtype_name), grad_scaling=dtype_name == "float16")
        choice.reasons.update(master_dtype=master_reason(dtype_name), grad_scaling=scaling_reason(dtype_name))
        choice = _with(choice, "rollout_dtype", dtype_name, choice.reasons["rollout_dtype"])
        _notice_slow(choice, dtype_name)
    if rollout_name:
        choice = _with(choice, "rollout_dtype", rollout_name, "asked for")
    if attention_name:
        choice = _with(choice, "attention", attention_name, "asked for")
    elif choice.attention in FLASH_ATTENTIONS and choice.dtype not in FLASH_DTYPES:
        choice = _with(choice, "attention", "sdpa", f"flash attention does not compute in {choice.dtype}")
    if engine_name:
        choice = _with(choice, "rollout_engine", engine_name, "asked for")
    return choice


def _with(choice: Choice, option: str, value: str, reason: str) -> Choice:
    changes: dict[str, Any] = {option: value, "reasons": {**choice.reasons, option: reason}}
    return replace(choice, **changes)


def _refusal(choice: Choice, key: str, asked: str, lack: str, works: list[str]) -> str:
    return f"{key}={asked} does not work on {choice.device.described}: {lack}; use {' or '.join(works)}"


def _checked_dtype(choice: Choice, key: str, asked: object, problems: list[str]) -> str | None:
    try:
        name = parse_dtype(asked, key)
    except ConfigError as error:
        problems.extend(error.problems)
        return None
    if name and (lack := choice.lacks.get(f"{key}.{name}")):
        works = [d for d in choice.works(key, DTYPES) if d in (choice.dtype, "float32")]
        problems.append(_refusal(choice, key, str(asked), lack, works))
    return name


def _checked_attention(choice: Choice, asked: str | None, problems: list[str]) -> str | None:
    if asked in (None, "auto"):
        return None
    works = choice.works("attention", ATTENTIONS)
    if _FLASH.fullmatch(asked):
        # Any flash attention serves whoever asks for "flash attention": the package's, else torch's own.
        found = next((name for name in ("flash_attn", "varlen") if name in works), None)
        if found is None:
            problems.append(_refusal(choice, "attention", asked, choice.lacks["attention.flash_attn"], works))
        return found
    if asked not in ATTENTIONS:
        problems.append(f"attention={asked} is unknown; there are auto, {', '.join(ATTENTIONS)}")
        return None
    if asked not in works:
        problems.append(_refusal(choice, "attention", asked, choice.lacks[f"attention.{asked}"], works))
    return asked


def _checked_engine(choice: Choice, asked: str | None, strict: bool, problems: list[str]) -> str | None:
    if asked in (None, "auto"):
        return None
    if asked not in ENGINES:
        problems.append(f"rollout.name={asked} is unknown; there are auto, {', '.join(ENGINES)}")
        return None
    lack = choice.lacks.get(f"rollout_engine.{asked}")
    if lack is None:
        return asked
    if strict:
        works = choice.works("rollout_engine", ENGINES)
        problems.append(_refusal(choice, "rollout.name", asked, lack, works) + " (rollout.strict is on)")
        return None
    notice(f"rollout.name={asked} cannot be used here ({lack}); rollouts use '{choice.rollout_engine}' instead.")
    return None


def _notice_slow(choice: Choice, dtype: str) -> None:
    device = choice.device
    if dtype == "bfloat16" and device.kind == "cpu" and not device.has_bfloat16_cpu:
        notice(f"dtype=bfloat16 is emulated and slow on {device.described}; float32 is faster here.")
    if dtype == "float16" and device.capability == (6, 1):
        notice(f"dtype=float16 runs at a small fraction of float32's speed on {device.described}.")
