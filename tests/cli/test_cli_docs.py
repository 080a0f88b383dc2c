"""The documentation against the code: commands, links, files, Python blocks and tables are what is really there."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import verl
from verl.cli.main import COMMANDS
from verl.config import PRESETS, load_config, validate
from verl.config.overrides import with_algorithm

ROOT = Path(verl.__file__).parent.parent
ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("benchmarks/*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
OUR_FILE = re.compile(r"`((?:verl|docs|tests|benchmarks|examples)/[\w./-]*(?:/|\.\w+))`")

pytestmark = pytest.mark.skipif(not ENGLISH.is_file(), reason="not run from a clone")
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
every_readme = pytest.mark.parametrize("page", [ENGLISH, CHINESE], ids=lambda page: page.name)


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    return FENCE.findall(page.read_text(encoding="utf-8"))


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def python_blocks(page: Path) -> list[str]:
    return [text for language, text in blocks(page) if language == "python"]


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every command line quoted on a page: in shell blocks (one command may be joined by ``&&``) and in
    backquotes. What stands for something (``...``, ``…``) is left out."""
    shell = "\n".join(text for language, text in blocks(page) if language in ("bash", "sh", ""))
    lines = shell.replace("\\\n", " ").splitlines()
    lines += [text for text in re.findall(r"`([^`\n]+)`", prose(page)) if " " in text]
    for line in lines:
        if re.match(r"(HF_HUB_OFFLINE=1 )?(verl|python|python3|make|pip) ", line):
            words = shlex.split(line, comments=True)
            while "&&" in words:
                at = words.index("&&")
                yield [word for word in words[:at] if word not in ("...", "…")]
                words = words[at + 1 :]
            yield [word for word in words if word not in ("...", "…")]


def makefile_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


def custom_names() -> list[str]:
    """Names that the README's own examples register."""
    return re.findall(r'register_(?:adv_est|policy_loss)\("(\w+)"\)', ENGLISH.read_text())


def problem_with(words: list[str]) -> str | None:
    """What is wrong with a command line, or None."""
    while "=" in words[0]:
        words = words[1:]
    program, rest = words[0], words[1:]
    if not rest or rest[0] == "-c":
        return None
    if program == "make":
        targets = [word for word in rest if "=" not in word and not word.startswith("-")]
        unknown = set(targets) - makefile_targets()
        return f"no target {unknown}" if unknown else None
    if program == "pip":
        extras = {name for word in rest for name in re.findall(r"^\.\[([\w,]+)\]$", word)}
        text = (ROOT / "pyproject.toml").read_text()
        unknown = {e for names in extras for e in names.split(",") if not re.search(rf"^{e} = \[", text, re.M)}
        return f"no extra {unknown}" if unknown else None
    if program == "verl":
        return problem_with_verl(rest)
    if rest[0] == "-m" and (len(rest) == 1 or not rest[1].startswith("verl")):
        return None  # the option by itself, or somebody else's module
    if rest[0] == "-m":
        return None if importlib.util.find_spec(rest[1]) else f"no module {rest[1]}"
    return None if (ROOT / rest[0]).is_file() else f"no script {rest[0]}"


def problem_with_verl(rest: list[str]) -> str | None:
    name, arguments = rest[0], rest[1:]
    if name == "--lang":
        name, arguments = rest[2], rest[3:]
    if name in ("--help", "--version"):
        return None
    if name not in COMMANDS:
        return f"no subcommand {name}"
    if arguments and name in ("generate", "chat", "compare", "serve", "export"):
        try:
            importlib.import_module(f"verl.cli.{name}").parse(arguments)
        except verl_errors() as error:
            return str(error)
    if "--config" in arguments:  # a file of the reader's own
        at = arguments.index("--config")
        arguments = arguments[:at] + arguments[at + 2 :]
    overrides = [word for word in arguments if re.match(r"[~+]*[\w.]+(=|$)", word) and word != "key=value"]
    if name == "quickstart":
        from verl.trainer.quickstart import parse

        try:
            overrides = parse([word for word in arguments if word != "key=value"]).overrides
        except (SystemExit, argparse.ArgumentError, verl_errors()):
            return "an option that the quick start does not have"
    if name in ("quickstart", "train", "plan"):
        try:
            named = with_algorithm(overrides) if name != "quickstart" else overrides
            validate(load_config(named), need_data=False, need_model=False, custom_names=custom_names())
        except verl_errors() as error:
            problems = [text for text in getattr(error, "problems", [str(error)]) if not names_a_file(text)]
            return "; ".join(problems) or None
    return None


def verl_errors() -> type[Exception]:
    from verl.errors import ConfigError

    return ConfigError


def names_a_file(problem: str) -> bool:
    """Whether this is about an example's file, which is not there now."""
    return bool(re.search(r"\.(parquet|py|jsonl)\b", problem))


@every_page
def test_every_quoted_command_exists(page):
    found = [f"{shlex.join(words)}: {why}" for words in commands(page) if (why := problem_with(words))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("line", "good"),
    [
        ("verl train trainer.save_freq=20", True),
        ("verl train trainer.save_fraq=20", False),
        ("verl train algorithm.adv_estimator=no_such", False),
        ("verl quickstart --steps 3", True),
        ("verl quickstart --stops 3", False),
        ("verl tray", False),
        ("verl --lang zh --help", True),
        ("verl train --config ours.yaml", True),
        ("verl export --model_path runs/a --output_dir out", True),
        ("verl export --model_path runs/a --output_dir out --vrify", False),
        ("verl chat", True),
        ("verl chat runs/a --loud", False),
        ("python benchmarks/quickstart.py", True),
        ("python benchmarks/quick.py", False),
        ("python -m verl.config.reference", True),
        ("make quickstart", True),
        ("make quickstert", False),
        ('pip install -e ".[tensorboard]"', True),
        ('pip install -e ".[tensorbord]"', False),
    ],
)
def test_the_check_of_commands_itself(line, good):
    assert (problem_with(shlex.split(line)) is None) == good


def test_the_readme_is_looked_at_and_not_passed_over():
    assert len(list(commands(ENGLISH))) >= 10
    assert len(list(LINK.finditer(prose(ENGLISH)))) >= 10


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def headings(page: Path) -> list[tuple[int, str]]:
    return [(len(marks), text) for marks, text in re.findall(r"^(#+) (.+)$", prose(page), re.M)]


@every_page
def test_every_relative_link_resolves(page):
    broken = []
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in {slug(text) for _, text in headings(file)}):
            broken.append(target)
    assert not broken


@every_page
def test_every_file_named_exists(page):
    missing = [path for path in OUR_FILE.findall(prose(page)) if not (ROOT / path).exists()]
    assert not missing


def without_comments(text: str) -> list[str]:
    """The lines of a block as far as they do something; comments may be in either language."""
    text = re.sub(r'""".*?"""', "", text, flags=re.S)
    return [line for raw in text.splitlines() if (line := raw.split("  #")[0].rstrip()) and not line.startswith("#")]


def test_both_readmes_have_the_same_structure():
    assert [level for level, _ in headings(ENGLISH)] == [level for level, _ in headings(CHINESE)]
    assert [language for language, _ in blocks(ENGLISH)] == [language for language, _ in blocks(CHINESE)]
    tables = [len(re.findall(r"^\|", prose(page), re.M)) for page in (ENGLISH, CHINESE)]
    assert tables[0] == tables[1]


def test_both_readmes_show_the_same_code():
    for (language, ours), (_, theirs) in zip(blocks(ENGLISH), blocks(CHINESE), strict=True):
        if language in ("python", "bash"):
            assert without_comments(ours) == without_comments(theirs)
        elif language == "text":
            paths = [re.sub(r"^(runs/\S+) .*", r"\1", text, flags=re.M) for text in (ours, theirs)]
            assert paths[0] == paths[1]


@every_page
def test_python_blocks_compile(page):
    for number, text in enumerate(python_blocks(page), 1):
        assert compile(text, f"{page.name}, Python block {number}", "exec")


@every_readme
def test_the_readme_lists_every_preset_and_no_other(page):
    section = re.search(r"^\| [^|\n]+ \| [^|\n]+ \|\n\|---\|---\|\n((?:\| [^|\n]+ \| `\w+` \|\n)+)", prose(page), re.M)
    listed = re.findall(r"\| `(\w+)` \|$", section[1], re.M)
    assert listed and set(listed) == set(PRESETS), f"bring the table of algorithms in {page.name} up to date"
    assert len(listed) == len(set(listed))


@every_readme
def test_the_file_map_names_every_room(page):
    package = ROOT / "verl"
    rooms = {f"verl/{p.name}/" for p in package.iterdir() if (p / "__init__.py").is_file()}
    rooms |= {f"verl/{p.name}" for p in package.glob("*.py") if not p.name.startswith("_")}
    rows = [line for line in prose(page).splitlines() if line.startswith("| `verl/")]
    named = {path for row in rows for path in re.findall(r"`(verl/[\w./]+)`", row.split(" | ")[0])}
    assert named == rooms, f"bring the file map of {page.name} up to date"


@every_readme
def test_the_hardware_table_is_what_is_chosen(page):
    from verl.hardware.choice import DTYPES, choose
    from verl.hardware.device import Device

    devices = [
        Device("cuda", "H100", (9, 0)),
        Device("cuda", "T4", (7, 5)),
        Device("cuda", "Tesla P40", (6, 1)),
        Device("cpu", "with AMX", cpu_flags=frozenset({"amx_bf16", "avx512_bf16"})),
        Device("cpu", "other"),
        Device("mps", "Apple"),
    ]
    rows = re.findall(r"^\| [^|]+ \| ([a-z]+\d+)?[^|]* \| (\w*) ?\| (?!\W)([^|]+) \|$", prose(page), re.M)
    table = [
        (dtype, master, re.match(r"[a-z_]+", kernel)[0], re.findall(r"[a-z_]+", kernel)[-1])
        for dtype, master, kernel in rows
        if dtype in DTYPES
    ]
    chosen = [(choose(device, "2.13.0", ()), choose(device, "2.6.0", ())) for device in devices]
    shown = [(new.dtype, new.master_dtype or "", new.attention, old.attention) for new, old in chosen]
    assert table == shown, f"bring the hardware table of {page.name} up to date with verl/hardware/choice.py"


@pytest.fixture
def in_an_empty_folder(tmp_path, tiny_model_dir, monkeypatch):
    """A working directory in which the quick start's model is a tiny random one, already in the cache."""
    (tmp_path / "SmolLM2-135M-Instruct").symlink_to(tiny_model_dir)
    monkeypatch.setenv("VERL_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_python_start_runs(in_an_empty_folder, capsys):
    exec(compile(python_blocks(ENGLISH)[0], "README.md", "exec"), {"__name__": "__main__"})
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert 0 <= float(last) <= 1
    assert list(in_an_empty_folder.glob("checkpoints/*/*/report.html"))


def test_the_reward_and_the_algorithm_of_the_readme_train(in_an_empty_folder, tiny_model_dir):
    from verl import Trainer
    from verl.data import arithmetic_task

    for text in python_blocks(ENGLISH)[1:]:
        name = re.match(r"# (\w+\.py)\n", text)[1]
        Path(name).write_text(text)
    quoted = [words[2:] for words in commands(ENGLISH) if words[:2] == ["verl", "train"]]
    keys = [
        k for words in quoted for k in words if k.startswith(("algorithm.", "reward.", "actor_rollout_ref.actor.p"))
    ]
    keys = [k for k in keys if not k.startswith("algorithm.name")]
    small = ["data.train_batch_size=4", "data.max_response_length=5", "actor_rollout_ref.rollout.n=3"]
    small += ["trainer.total_training_steps=1", "reward.num_workers=1", "trainer.save_final=false"]
    config = load_config([*keys, *small, f"actor_rollout_ref.model.path={tiny_model_dir}"])
    assert {"reward.custom_reward_function.path=my_reward.py", "algorithm.custom_path=my_algorithm.py"} <= set(keys)
    assert config.algorithm.adv_estimator == "above_median"
    metrics = Trainer(config, train_rows=arithmetic_task("train", 5)).fit()
    assert metrics["reward/failed"] == 0
    assert "actor/pg_loss" in metrics


def test_the_node_of_the_architecture_page_runs(in_an_empty_folder, tiny_model_dir):
    from verl.data import arithmetic_task

    keys = ["algorithm.name=grpo", "data.train_batch_size=2", "data.max_response_length=4", "reward.num_workers=1"]
    keys += ["trainer.total_training_steps=1", "trainer.save_final=false", "actor_rollout_ref.rollout.n=2"]
    config = load_config([*keys, f"actor_rollout_ref.model.path={tiny_model_dir}"])
    (block,) = [text for text in python_blocks(ROOT / "docs" / "architecture.md") if "with_node" in text]
    names = {"config": config, "rows": arithmetic_task("train", 5)}
    exec(compile(block, "architecture.md", "exec"), names)
    assert 1 <= names["trainer"].fit()["mine/longest"] <= 4
