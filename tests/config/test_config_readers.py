"""No option is stored and never read."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import verl
from verl.config import LEAVES

ROOT = Path(verl.__file__).parent
NOT_YET: dict[str, str] = {}
"""Options that nothing reads, with why they are there."""

_DOTTED = re.compile(r"[a-z_0-9]+(\.[a-z_0-9]+)*")


def names_in(tree: ast.AST) -> tuple[set[str], set[str]]:
    """(attributes, texts that are a name) of a piece of code; a dotted text counts as attributes as well."""
    attributes: set[str] = set()
    texts: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            attributes.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
            *groups, name = node.value.split(".")
            attributes.update(groups)
            texts.add(name)
    return attributes, texts


def everything_read() -> tuple[set[str], set[str]]:
    """Names in all code outside ``verl/config``, and in the functions of ``derived.py`` that this code asks."""
    attributes: set[str] = set()
    texts: set[str] = set()
    asked: set[str] = set()
    for file in sorted(ROOT.rglob("*.py")):
        if ROOT / "config" in file.parents:
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        more = names_in(tree)
        attributes |= more[0]
        texts |= more[1]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "verl.config":
                asked.update(alias.name for alias in node.names)
    for node in ast.parse((ROOT / "config" / "derived.py").read_text(encoding="utf-8")).body:
        # a function that gives a configuration only moves values about; the constants are micro_batching's
        question = isinstance(node, ast.FunctionDef) and node.name in asked and ast.unparse(node.returns) != "Config"
        if question or isinstance(node, ast.Assign):
            more = names_in(node)
            attributes |= more[0]
            texts |= more[1]
    return attributes, texts


def test_every_option_is_read():
    attributes, texts = everything_read()

    def is_read(key: str) -> bool:
        *groups, name = key.split(".")
        return attributes.issuperset(groups) and (name in attributes or name in texts)

    unread = {key for key in LEAVES if not is_read(key)}
    assert unread <= set(NOT_YET), "stored and never read"
    assert set(NOT_YET) <= set(LEAVES)
    # the search can fail: what was taken out of the tree is not found
    for gone in ("actor_rollout_ref.actor.load_weight", "critic.fsdp_config.model_dtype", "reward.reward_manager.name"):
        assert not is_read(gone), gone
