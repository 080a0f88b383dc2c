"""``verl compare``: two models answer the same prompts; their answers side by side, here and on a page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from verl.cli.answering import (
    MODEL_HELP,
    add_model_options,
    add_sampling_options,
    load_options,
    notices_to_stderr,
    parser,
    sampling_of,
)
from verl.cli.arguments import count, output_file
from verl.cli.terminal import printable, prompt_text
from verl.errors import ConfigError

if TYPE_CHECKING:
    from verl.serving.answers import Answer, Sampling
    from verl.serving.prompts import Question
    from verl.tracking.answers_page import AnswerPair

PAGE = "compare.html"


def parse(argv: list[str]) -> argparse.Namespace:
    options = parser(
        "compare",
        "Let two models answer the same prompts, and show the answers side by side.",
        "Both models draw with the same seeds. --step is of TUNED.",
    )
    options.add_argument("base", metavar="BASE", help=f"the model before: {MODEL_HELP}")
    options.add_argument("tuned", metavar="TUNED", help="the model after")
    options.add_argument("--prompts", metavar="FILE", help="lines of a .txt file, or rows of a dataset file")
    options.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    options.add_argument("--limit", type=count, metavar="N", help="the first N prompts of the file")
    options.add_argument("--raw", action="store_true", help="give texts as they are, without chat template")
    options.add_argument("--output", type=Path, default=Path(PAGE), metavar="FILE", help=f"the page (default: {PAGE})")
    add_sampling_options(options, temperature=0.0, n=False)
    add_model_options(options)
    return options.parse_args(argv)


def main(argv: list[str]) -> int:
    """Compare; the exit code."""
    arguments = parse(argv)
    with notices_to_stderr():
        from verl.serving.prompts import Question, read_questions

        if bool(arguments.prompts) == bool(arguments.prompt):
            raise ConfigError("verl compare needs --prompts FILE or --prompt TEXT")
        questions = (
            read_questions(arguments.prompts, arguments.limit)
            if arguments.prompts
            else [Question(text) for text in arguments.prompt]
        )
        page, models = output_file(arguments.output), ((arguments.base, None), (arguments.tuned, arguments.step))
        from verl.checkpoint.models import locate_model
        from verl.export.kinds import require_language_model
        from verl.models.loading import load_tokenizer

        for path, step in models:  # both, before one of them answers
            place, trust = locate_model(path, step).path, arguments.trust_remote_code
            load_tokenizer(place, trust_remote_code=trust)
            require_language_model(place, trust_remote_code=trust)
        sampling = sampling_of(arguments)
        names, answers = [], []
        for path, step in models:
            name, given = _answers(path, step, questions, sampling, arguments)
            names.append(name)
            answers.append(given)
        _report(names, questions, answers, sampling, page)
    return 0


def _answers(
    path: str, step: str | None, questions: list[Question], sampling: Sampling, arguments: argparse.Namespace
) -> tuple[str, list[Answer]]:
    """Name and answers of one model, which is given up again afterwards."""
    from dataclasses import replace

    from verl.serving.answers import answer_all
    from verl.serving.model import load_model

    model = load_model(path, replace(load_options(arguments), step=step))
    print(f"{model.name}: {model.described}", file=sys.stderr, flush=True)
    prompts = [question.prompt for question in questions]
    found = {i: answer for i, _, answer in answer_all(model, prompts, sampling, chat=not arguments.raw)}
    return model.name, [found[i] for i in range(len(questions))]


def _report(
    names: list[str], questions: list[Question], answers: list[list[Answer]], sampling: Sampling, page: Path
) -> None:
    from verl.tracking.answers_page import AnswerPair, answers_page
    from verl.tracking.jsonl import write_atomic

    pairs = [
        AnswerPair(
            prompt_text(question.prompt), base.text, tuned.text,
            None if question.expected is None else str(question.expected), _note(base), _note(tuned),
        )
        for question, base, tuned in zip(questions, *answers, strict=True)
    ]  # fmt: skip
    how = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}, seed {sampling.seed}"
    _show(names, pairs)
    write_atomic(page, answers_page(names[0], names[1], pairs, how).encode("utf-8", errors="replace"))
    print(f"\n{sum(pair.differs for pair in pairs)} of {len(pairs)} answers differ. Page: {page}")


def _note(answer: Answer) -> str:
    ended = ", cut off" if answer.finish_reason == "length" else ""
    return f"{answer.tokens} token{'' if answer.tokens == 1 else 's'}{ended}"


def _show(names: list[str], pairs: list[AnswerPair]) -> None:
    """Side by side on a terminal; one under the other into a file, a pipe or a narrow window."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal or console.width < 60:
        for pair in pairs:
            print(f"\n> {printable(pair.prompt)}")
            print(f"[{names[0]}] {printable(pair.base)}\n[{names[1]}] {printable(pair.tuned)}")
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, expand=True, show_lines=True, pad_edge=False)
    for name, ratio in (("prompt", 2), (names[0], 3), (names[1], 3)):
        table.add_column(Text(name), ratio=ratio, overflow="fold")
    for pair in pairs:
        ask = Text(printable(pair.prompt))
        if pair.expected is not None:
            ask.append(f"\nexpected: {printable(pair.expected)}", style="dim")
        style = "" if pair.differs else "dim"
        table.add_row(ask, Text(printable(pair.base), style=style), Text(printable(pair.tuned), style=style))
    console.print(table)
