"""``verl generate``: answers to prompts, printed as they are written or as JSON lines."""

from __future__ import annotations

import argparse
import json
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
from verl.errors import ConfigError

if TYPE_CHECKING:
    from verl.data.messages import Prompt
    from verl.serving.answers import Sampling
    from verl.serving.model import ServedModel


def parse(argv: list[str]) -> argparse.Namespace:
    options = parser(
        "generate",
        "Answer prompts with a model, all of them together in one running batch.",
        "Without --prompt and --prompts, one prompt is read from standard input.",
    )
    options.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    options.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    options.add_argument(
        "--prompts", metavar="FILE", help="lines of a .txt file, or rows of a parquet, JSON or Arrow file"
    )
    options.add_argument("--limit", type=count, metavar="N", help="the first N prompts of the file")
    options.add_argument(
        "--raw", action="store_true", help="give texts to the model as they are, without chat template"
    )
    options.add_argument("--output", metavar="FILE", help="write JSON lines to this file (- is standard output)")
    add_sampling_options(options)
    add_model_options(options)
    return options.parse_args(argv)


def main(argv: list[str]) -> int:
    """Generate; the exit code."""
    arguments = parse(argv)
    with notices_to_stderr():
        prompts = _prompts(arguments)
        output = None if arguments.output in (None, "-") else output_file(arguments.output)
        from verl.serving.model import load_model

        model = load_model(arguments.model, load_options(arguments))
        print(f"{model.name}: {model.described}", file=sys.stderr, flush=True)
        sampling = sampling_of(arguments)
        if arguments.output:
            _write(model, prompts, sampling, output, chat=not arguments.raw)
        elif len(prompts) == 1 and sampling.n == 1:
            _stream(model, prompts[0], sampling, chat=not arguments.raw)
        else:
            _show(model, prompts, sampling, chat=not arguments.raw)
    return 0


def _prompts(arguments: argparse.Namespace) -> list[Prompt]:
    if arguments.prompt and arguments.prompts:
        raise ConfigError("verl generate takes --prompt or --prompts, not both")
    if arguments.prompts:
        from verl.serving.prompts import read_prompts

        return read_prompts(arguments.prompts, arguments.limit)
    if arguments.prompt:
        return arguments.prompt
    if sys.stdin.isatty():
        raise ConfigError("verl generate needs --prompt TEXT, --prompts FILE, or a prompt on standard input")
    text = sys.stdin.read().rstrip("\n")
    if not text:
        raise ConfigError("verl generate got an empty prompt on standard input")
    return [text]


def _stream(model: ServedModel, prompt: Prompt, sampling: Sampling, *, chat: bool) -> None:
    from verl.cli.terminal import printable
    from verl.serving.answers import stream_answer

    for piece in stream_answer(model, prompt, sampling, chat=chat):
        print(printable(piece), end="", flush=True)
    print()


def _show(model: ServedModel, prompts: list[Prompt], sampling: Sampling, *, chat: bool) -> None:
    """Prompt by prompt, each as soon as all before it are finished."""
    from verl.cli.terminal import printable, prompt_text
    from verl.serving.answers import answer_all

    done: dict[tuple[int, int], str] = {}
    order = [(i, k) for i in range(len(prompts)) for k in range(sampling.n)]
    shown = 0
    for i, k, answer in answer_all(model, prompts, sampling, chat=chat):
        done[i, k] = answer.text
        while shown < len(order) and order[shown] in done:
            i, k = order[shown]
            if k == 0:
                print(f"{'' if i == 0 else chr(10)}> {printable(prompt_text(prompts[i]))}")
            print(f"{f'[{k + 1}] ' if sampling.n > 1 else ''}{printable(done.pop(order[shown]))}", flush=True)
            shown += 1


def _write(model: ServedModel, prompts: list[Prompt], sampling: Sampling, output: Path | None, *, chat: bool) -> None:
    """JSON lines into a file, whole or not at all, or to standard output (None)."""
    from verl.serving.answers import answer_all
    from verl.tracking.jsonl import write_atomic

    answers = answer_all(model, prompts, sampling, chat=chat)
    lines = []
    for i, k, answer in sorted(answers, key=lambda item: item[:2]):
        row = {
            "prompt": prompts[i], "sample": k, "response": answer.text, "tokens": answer.tokens,
            "finish_reason": answer.finish_reason, "log_prob": round(answer.log_prob, 4),
        }  # fmt: skip
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    if output is None:
        sys.stdout.write("".join(lines))
        return
    write_atomic(output, "".join(lines).encode("utf-8", errors="backslashreplace"))
    print(f"{len(lines)} answers in {output}")
