"""The configuration in a Python script that uses TRL: what is written out in its calls."""

from __future__ import annotations

import ast
from typing import Any

from verl.convert.trl import CONFIG_CLASSES
from verl.errors import ConfigError

_TRAINER_ARGUMENTS = {"model": "model_name_or_path", "reward_funcs": "reward_funcs", "peft_config": "peft_config"}


def read_calls(text: str, name: str) -> tuple[str, dict[str, Any]]:
    """Kind and values of the first TRL config that the script makes, with its trainer's model, data and LoRA.

    Names that the script assigns once to a plain value are followed; an expression becomes its own source text, and
    so is told as something to look at.

    Raises:
        ConfigError: no syntax of Python, or no TRL config in it.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"{name}, line {error.lineno}, is not Python: {error.msg}") from error
    known = _constants(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    config = next((call for call in calls if _name(call.func) in CONFIG_CLASSES), None)
    if config is None:
        raise ConfigError(f"{name} makes no TRL config; known are {', '.join(CONFIG_CLASSES)}")
    values = _keywords(config, known)
    for call in calls:
        called = _name(call.func)
        if called.endswith("Trainer"):
            given = _keywords(call, known)
            values |= {ours: given[theirs] for theirs, ours in _TRAINER_ARGUMENTS.items() if theirs in given}
        elif called == "load_dataset" and call.args and "dataset_name" not in values:
            values["dataset_name"] = _value(call.args[0], known)
        elif called == "LoraConfig":
            values |= _lora(_keywords(call, known))
    values.pop("peft_config", None)
    return CONFIG_CLASSES[_name(config.func)], values


def _lora(given: dict[str, Any]) -> dict[str, Any]:
    names = {"r": "lora_r", "lora_alpha": "lora_alpha", "target_modules": "lora_target_modules"}
    names |= {"lora_dropout": "lora_dropout"}
    return {"use_peft": True, **{names.get(key, f"LoraConfig.{key}"): value for key, value in given.items()}}


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _keywords(call: ast.Call, known: dict[str, Any]) -> dict[str, Any]:
    return {word.arg: _value(word.value, known) for word in call.keywords if word.arg is not None}


def _constants(tree: ast.AST) -> dict[str, Any]:
    """Names that are assigned exactly once, to a plain value."""
    found: dict[str, list[ast.AST]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    constants = {}
    for name, nodes in found.items():
        try:
            values = [ast.literal_eval(node) for node in nodes]
        except (ValueError, TypeError, SyntaxError):
            continue
        if len(values) == 1:
            constants[name] = values[0]
    return constants


class Expression(str):
    """Source text whose value only running the script would tell."""


def _value(node: ast.AST, known: dict[str, Any]) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        if isinstance(node, ast.Name) and node.id in known:
            return known[node.id]
        return Expression(ast.unparse(node))
