"""The page that lists every option: ``python -m verl.config.reference > docs/config.md``."""

from __future__ import annotations

from typing import Any

from verl.config.coerce import describe
from verl.config.compat import MOVED_GROUPS, RENAMES, SHORT_FORMS, SPREADS
from verl.config.compat_inert import INERT
from verl.config.fields import SAME, Leaf
from verl.config.presets import FAMILY_PRESETS, PRESETS
from verl.config.tree import GROUPS, LEAVES

_INTRO = """# Configuration

This page is generated: `python -m verl.config.reference > docs/config.md`.

A run is configured by dotted keys, given (weakest first) by a preset (`algorithm.name=grpo`), a YAML file, a Python
dict, and command-line overrides in Hydra's syntax:

```
verl train data.train_files=train.parquet actor_rollout_ref.model.path=my/model algorithm.name=grpo \\
    actor_rollout_ref.actor.optim.lr=1e-6 trainer.logger=[console,tensorboard] '~data.val_files'
```

* `key=value`, `+key=value` and `++key=value` mean the same; `~key` goes back to the default. A list is `[a,b]`, a
  mapping `{a: 1}`, no value `null`, another option's value `${data.max_prompt_length}`. Text with special characters
  goes into quotes: `"key='a, b'"`. Several values for one key (a sweep) are an error.
* `~` and `$NAME` are expanded in files and folders.
* A stronger source wins, whatever the spelling. Within one source, two spellings of one option must agree.
  A key that is given twice on one command line takes the last value, with a notice of both.
* `verl train dpo` is `algorithm.name=dpo`; a word and a key that name different algorithms are an error.
* An unknown key, a value of the wrong type and a contradiction are errors; all are reported at once.
* Where the default is not that of ByteDance's verl, the other one stands in the column "verl".
"""


def render() -> str:
    """The whole page as Markdown."""
    parts = [_INTRO, *(_section(key, doc) for key, doc in GROUPS.items()), _presets(), _compatibility()]
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def _section(group: str, doc: str) -> str:
    leaves = [leaf for key, leaf in LEAVES.items() if key.rpartition(".")[0] == group]
    if not leaves:
        return f"## `{group}`\n{doc}\n" if "." not in group else ""
    rows = "\n".join(_row(leaf) for leaf in leaves)
    level = "##" if "." not in group else "###"
    return f"{level} `{group}`\n{doc}\n\n| option | type | default | verl | meaning |\n|---|---|---|---|---|\n{rows}\n"


def _row(leaf: Leaf) -> str:
    name = leaf.key.rpartition(".")[2]
    other = "" if leaf.about.verl is SAME else _value(leaf.about.verl)
    kind = "a Python function" if leaf.hint is Any else describe(leaf.hint)
    return _cells(f"`{name}`", kind, f"`{_value(leaf.default)}`", other, leaf.about.doc + _limits(leaf))


def _limits(leaf: Leaf) -> str:
    about, words = leaf.about, []
    if about.choices is not None:
        words.append("One of " + ", ".join(f"`{name}`" for name in about.choices) + ".")
    for bound, sign in ((about.low, "≥"), (about.above, ">"), (about.high, "≤"), (about.below, "<")):
        if bound is not None:
            words.append(f"{sign} {bound:g}.")
    return "".join(f" {word}" for word in words)


def _value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _presets() -> str:
    rows = [
        _cells(f"`{name}`", ", ".join(f"`{key}={_value(value)}`" for key, value in content.items()))
        for name, content in {**PRESETS, **FAMILY_PRESETS}.items()
    ]
    return "\n".join(["## Presets (`algorithm.name`)", "", "| name | sets |", "|---|---|", *rows, ""])


def _compatibility() -> str:
    moved = [_cells(f"`{old}.*`", f"`{new}.*`") for old, new in MOVED_GROUPS.items()]
    renamed = [_cells(f"`{old}`", f"`{new}`") for old, new in RENAMES.items() if old not in SHORT_FORMS]
    short = [_cells(f"`{old}`", f"`{RENAMES[old]}` (a short form)") for old in SHORT_FORMS]
    spread = [_cells(f"`{old}`", spread.why) for old, spread in SPREADS.items()]
    inert = [_cells(f"`{key}`", inert.why, _accepted(inert.harmless)) for key, inert in INERT.items()]
    return "\n".join(
        [
            "## Keys of other versions",
            "",
            "Each is accepted with one notice.",
            "",
            "| key | is now |",
            "|---|---|",
            *moved,
            *renamed,
            *short,
            *spread,
            "",
            "These have no effect here. Where the last column names values, any other value is an error, because",
            "ignoring it would train something else.",
            "",
            "| key, or group | why | accepted |",
            "|---|---|---|",
            *inert,
        ]
    )


def _accepted(harmless: Any) -> str:
    if harmless is None:
        return "anything"
    if callable(harmless):
        return "empty"
    return ", ".join(_value(value) for value in harmless if value not in ("", "null") and value not in ({}, []))


if __name__ == "__main__":
    print(render(), end="")
