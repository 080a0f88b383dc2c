"""Options that `generate`, `chat`, `compare` and `serve` share: which model, on what, and how to draw."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from verl.cli.arguments import Arguments, count, finite
from verl.notices import add_sink

if TYPE_CHECKING:
    from verl.serving.answers import Sampling
    from verl.serving.model import LoadOptions


def parser(name: str, description: str, epilog: str | None = None) -> Arguments:
    return Arguments(prog=f"verl {name}", description=description, epilog=epilog)


MODEL_HELP = "a run folder, a checkpoint, a Hugging Face folder, or a hub name"


def add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--step", metavar="N", help="of a run folder: a number, last (the default) or best")
    group.add_argument("--device", default="auto", help="auto, cuda, cpu or mps")
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    group.add_argument("--engine", default="auto", help="auto, native or hf")
    group.add_argument("--max_num_seqs", type=int, default=64, metavar="N", help="responses written together (64)")
    group.add_argument("--max_model_len", type=count, metavar="N", help="most tokens of prompt and response together")
    group.add_argument(
        "--gpu_memory_utilization", type=finite, default=0.85, metavar="X", help="share of free memory (0.85)"
    )
    group.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")


def load_options(arguments: argparse.Namespace) -> LoadOptions:
    from verl.serving.model import LoadOptions

    return LoadOptions(
        step=arguments.step,
        device=arguments.device,
        dtype=arguments.dtype,
        engine=arguments.engine,
        max_num_seqs=arguments.max_num_seqs,
        max_model_len=arguments.max_model_len,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        trust_remote_code=arguments.trust_remote_code,
    )


def add_sampling_options(parser: argparse.ArgumentParser, *, temperature: float = 1.0, n: bool = True) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max_tokens", type=int, metavar="N", help="of an answer (512, or what fits)")
    group.add_argument(
        "--temperature", type=finite, default=temperature, metavar="T", help=f"0: greedy ({temperature:g})"
    )
    group.add_argument("--top_p", type=finite, default=1.0, metavar="P", help="smallest set of this probability (1)")
    group.add_argument("--top_k", type=int, default=-1, metavar="K", help="the K likeliest tokens only (-1: all)")
    group.add_argument("--min_p", type=finite, default=0.0, metavar="P", help="at least P times the best (0)")
    group.add_argument(
        "--repetition_penalty", type=finite, default=1.0, metavar="X", help="of what was written (1: none)"
    )
    group.add_argument("--min_tokens", type=int, default=0, metavar="N", help="no end before so many tokens (0)")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends an answer; may be repeated")
    group.add_argument("--seed", type=int, default=0, help="of the draws (0)")
    group.add_argument("--ignore_eos", action="store_true", help="write on beyond the end token")
    if n:
        group.add_argument("--n", type=count, default=1, metavar="N", help="answers to each prompt (1)")


def sampling_of(arguments: argparse.Namespace) -> Sampling:
    from verl.serving.answers import Sampling

    return Sampling(
        max_tokens=arguments.max_tokens,
        n=getattr(arguments, "n", 1),
        seed=arguments.seed,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        min_tokens=arguments.min_tokens,
        stop=tuple(text.replace("\\n", "\n").replace("\\t", "\t") for text in arguments.stop),
        ignore_eos=arguments.ignore_eos,
    )


@contextmanager
def notices_to_stderr() -> Iterator[None]:
    """Standard output is for the answers alone."""
    remove = add_sink(lambda text: print(f"[notice] {text}", file=sys.stderr, flush=True))
    try:
        yield
    finally:
        remove()
