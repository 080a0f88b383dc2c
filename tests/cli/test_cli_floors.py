"""The architecture, as a test: which room may import which, and how large files and functions may be."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import verl

PACKAGE = Path(verl.__file__).parent
FLOORS = [
    ["_version", "errors"],
    ["language", "notices", "metrics", "dependencies", "comm"],
    ["cli.run", "cli.arguments"],  # how a command begins and ends lies below everything that can be run as one
    ["hardware"],
    ["config"],
    ["convert"],
    ["protocol"],
    ["algorithms"],
    ["data"],
    ["rewards"],
    ["models"],
    ["rollout"],
    ["train_engine"],
    ["hybrid"],
    ["single_controller"],
    ["workers"],
    ["checkpoint"],
    ["tracking"],
    ["export"],
    ["serving"],
    ["dataflow"],
    ["trainer"],
    ["api"],
    ["cli"],
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
DOORS = {"dataflow/__init__.py": "verl.api.hybrid_dataflow"}
"""Public names that a document imports from a room below their own: looked up when asked for, never at import."""
PURE = {"algorithms", "config", "data", "rewards"}
ENGINES = {"ray", "vllm", "sglang", "megatron", "deepspeed"}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def room_of(module: str) -> str:
    """The room of a module named without ``verl.``: ``cli.run`` is one by itself."""
    return module if module in FLOOR else module.split(".")[0]


def imports(tree: ast.AST, path: Path):
    """(line, absolute module) of every import in a file, those inside functions too."""
    package = ["verl", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, node.module] if node.module else base)
            if module == "verl":
                yield from ((node.lineno, f"verl.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module


def violations(path: Path, text: str) -> list[str]:
    """Imports of a file that its room may not have."""
    room = room_of(module_of(path))
    found = []
    for line, module in imports(ast.parse(text), path):
        top, _, rest = module.partition(".")
        where = f"{path.relative_to(PACKAGE.parent)}:{line} imports {module}"
        if top == "verl" and rest and module != DOORS.get(str(path.relative_to(PACKAGE))):
            other = room_of(rest)
            if other in FLOOR and FLOOR[other] > FLOOR[room]:
                found.append(f"{where}, a room above")
            elif other in FLOOR and FLOOR[other] == FLOOR[room] and other != room:
                found.append(f"{where}, a room beside it")
        if room in PURE and top in ENGINES:
            found.append(f"{where}: {room}/ knows no engine")
    return found


def in_a_room(path: Path) -> bool:
    return module_of(path) not in ("__init__", "__main__")


def test_every_module_has_a_floor():
    unknown = {room_of(module_of(path)) for path in FILES if in_a_room(path)} - set(FLOOR)
    assert not unknown, f"say in FLOORS where these lie: {sorted(unknown)}"


def test_no_room_imports_a_room_above_it():
    found = [v for path in FILES if in_a_room(path) for v in violations(path, path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "text", "count"),
    [
        ("algorithms/kl.py", "import ray", 1),
        ("algorithms/kl.py", "def f():\n    from vllm.engine import x", 1),
        ("algorithms/kl.py", "from verl.trainer import base", 1),
        ("algorithms/kl.py", "from ..trainer.base import x", 1),
        ("algorithms/kl.py", "from verl import trainer", 1),
        ("algorithms/kl.py", "from verl import DataProto, __version__", 0),
        ("algorithms/advantages/gae.py", "from ..kl import x\nfrom ...errors import y\nimport torch", 0),
        ("trainer/main_ppo.py", "from verl.cli.run import run_cli\nimport ray", 0),
        ("trainer/main_ppo.py", "from verl.cli.main import main", 1),
        ("metrics.py", "from verl.notices import notice", 1),
    ],
)
def test_the_check_itself(file, text, count):
    assert len(violations(PACKAGE / file, text)) == count


def test_files_are_short():
    long = {module_of(p): n for p in FILES if (n := len(p.read_text().splitlines())) > MAX_FILE_LINES}
    assert not long


def test_functions_are_short():
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{node.lineno} {node.name} has {lines} lines"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert not found, "\n".join(found)
