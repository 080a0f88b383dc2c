"""verl's own configurations: the overrides in a bash script, or a YAML file. Their keys are ours, old ones included."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from typing import Any

from verl.config.compat import translate
from verl.config.overrides import OVERRIDES, Setting, parse_overrides, spread
from verl.convert.result import Converted, refusal
from verl.errors import ConfigError

ENTRY_POINTS = ("verl.trainer.main_ppo", "verl.trainer.main_generation", "verl.trainer.fsdp_sft_trainer", "main_dapo")
_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.S)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?-([^}]*))?\}|([A-Za-z_]\w*))")
_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.Div: lambda a, b: int(a / b),
}  # fmt: skip
_OWN_FILES = ("--config-path=config", "--config-path=./config", "--config-name=ppo_trainer")
_OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w.]*(=.*)?", re.S)


def convert_script(text: str, name: str) -> Converted:
    """The overrides that a bash script gives to verl's trainer.

    Variables that the script sets are filled in, with defaults such as ``${N:-8}`` and sums such as ``$((A * 2))``;
    what only the shell could know (commands, loops, arguments of the script) is told.

    Raises:
        ConfigError: it starts no trainer of verl.
    """
    result = Converted(name)
    words, unknown, commands = _trainer_words(text, result)
    if words is None:
        other = "; the options of OpenRLHF stand in docs/coming_from.md with our keys" if "openrlhf" in text else ""
        raise ConfigError(f"{name} starts no trainer of verl (python -m verl.trainer.main_ppo key=value ...){other}")
    overrides = []
    for word in words:
        if _OVERRIDE.fullmatch(word) and ("=" in word or word.startswith("~")):
            overrides.append(word)
        elif word in _OWN_FILES:
            result.unneeded.append(word)
        elif word.startswith(("--config-path=", "--config-name=")):
            result.dropped.append(f"{word}: a configuration file of its own, to be converted by itself")
        elif word.startswith("--"):
            result.dropped.append(f"{word}: an option of the program, not a configuration key")
        else:
            result.dropped.append(f"{word}: not of the form key=value")
    for variable in sorted(unknown):
        why = "is the output of a command" if variable in commands else "is not set in the script"
        result.changed.append(f"${variable} {why}: its place is written as ${{oc.env:{variable}}}")
    settings, problems = parse_overrides(overrides)
    result.dropped += problems
    return _finish(settings, result)


def convert_tree(tree: dict[str, Any], name: str) -> Converted:
    """A YAML file of verl's: any part of its tree."""
    return _finish([Setting(key, value, OVERRIDES) for key, value in spread(tree) if key], Converted(name))


def _finish(settings: list[Setting], result: Converted) -> Converted:
    """Settings under canonical keys, each tried by itself so that one that fails does not lose the others."""
    for setting in settings:
        done = translate([setting])
        result.dropped += done.problems
        result.changed += done.notices
        for moved in done.settings:
            if moved.delete:
                result.values.pop(moved.key, None)
                continue
            problem = _refused(moved)
            if problem is None:
                result.put(moved.key, moved.value)
            else:
                result.dropped.append(problem)
    return result


def _refused(setting: Setting) -> str | None:
    """Why the value does not suit the key, or None."""
    if isinstance(setting.value, str) and "${" in setting.value:
        return None  # known when it is used
    return refusal(setting.key, setting.value)


def _trainer_words(text: str, result: Converted) -> tuple[list[str] | None, set[str], set[str]]:
    """The words after the entry point, variables filled in; the variables that are used there and not known; and those
    that a command sets."""
    variables: dict[str, str] = {}
    unknown: set[str] = set()
    commands: set[str] = set()
    for line in _logical_lines(text):
        try:
            words = shlex.split(_computed(line, variables), comments=True)
        except ValueError as error:
            result.dropped.append(f"a line that cannot be read ({error}): {line.strip()[:60]}")
            continue
        place = next((i for i, word in enumerate(words) if any(entry in word for entry in ENTRY_POINTS)), None)
        if place is not None:
            filled = [_fill(word, variables, unknown) for word in words[place + 1 :]]
            return [word for word in filled if word not in ("$@", "&")], unknown, commands
        for word in words:
            found = _ASSIGNMENT.fullmatch(word)
            if found is None:
                if word not in ("export", "set", "local"):
                    break
                continue
            if "$(" in found[2] or "`" in found[2]:
                commands.add(found[1])
                continue
            variables[found[1]] = _fill(found[2], variables, unknown=set())
    return None, unknown, commands


def _computed(line: str, variables: dict[str, str]) -> str:
    """The line with the values of its ``$((...))``, as far as they are of whole numbers that are known."""
    done, rest = "", line
    while (start := rest.find("$((")) >= 0:
        depth, end = 0, start + 1
        while end < len(rest):
            depth += {"(": 1, ")": -1}.get(rest[end], 0)
            end += 1
            if not depth:
                break
        inside = _VARIABLE.sub(lambda found: found[1] or found[3], rest[start + 3 : end - 2])
        try:
            value = str(_sum_of(ast.parse(inside.strip(), mode="eval").body, variables))
        except (SyntaxError, ValueError, KeyError, TypeError, ZeroDivisionError):
            value = rest[start:end]
        done, rest = done + rest[:start] + value, rest[end:]
    return done + rest


def _sum_of(node: ast.AST, variables: dict[str, str]) -> int:
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_sum_of(node.left, variables), _sum_of(node.right, variables))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_sum_of(node.operand, variables)
    if isinstance(node, ast.Name):
        return int(variables[node.id])
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError(ast.dump(node))


def _logical_lines(text: str) -> list[str]:
    """Lines with their continuations, in which a comment may stand between two of them."""
    kept = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return "\n".join(kept).replace("\\\n", " ").splitlines()


def _fill(word: str, variables: dict[str, str], unknown: set[str]) -> str:
    def value(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        if name in variables:
            return variables[name]
        if found[2] is not None:
            return _fill(found[2], variables, unknown)
        if name in ("HOME", "USER", "PWD"):
            return found[0]  # paths are expanded when they are used
        unknown.add(name)
        return f"${{oc.env:{name}}}"

    return _VARIABLE.sub(value, word)
