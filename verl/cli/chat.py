"""``verl chat``: a conversation in the terminal, with history."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from verl.cli.answering import (
    MODEL_HELP,
    add_model_options,
    add_sampling_options,
    load_options,
    notices_to_stderr,
    parser,
    sampling_of,
)
from verl.cli.terminal import printable
from verl.errors import DataError, RolloutError
from verl.notices import notice

if TYPE_CHECKING:
    from verl.serving.answers import Sampling
    from verl.serving.model import ServedModel

HELP = """/reset       forget the conversation
/undo        take back the last question and its answer
/system TEXT the system message from here on
/set K=V     temperature, top_p, top_k, min_p, repetition_penalty, max_tokens, min_tokens or seed
/quit        leave (also Ctrl-D); Ctrl-C stops an answer
A line that ends with \\ goes on in the next one."""
_SETTABLE = {
    "temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float,
    "max_tokens": int, "min_tokens": int, "seed": int,
}  # fmt: skip


def parse(argv: list[str]) -> argparse.Namespace:
    options = parser("chat", "Talk to a model in the terminal.", "/help in the conversation lists its commands.")
    options.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    options.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_options(options, temperature=0.7, n=False)
    add_model_options(options)
    return options.parse_args(argv)


def main(argv: list[str]) -> int:
    """Talk until the end of input; the exit code."""
    arguments = parse(argv)
    with notices_to_stderr():
        from verl.serving.model import load_model

        model = load_model(arguments.model, load_options(arguments))
        print(f"{model.name}: {model.described}. /help lists commands, Ctrl-D leaves.", flush=True)
        if not model.template.has_template:
            notice("The tokenizer has no chat template: the conversation is written as User: and Assistant: lines.")
        Chat(model, sampling_of(arguments), system=arguments.system).run(_read_line)
    return 0


def _read_line() -> str | None:
    """One entry, lines that end with a backslash joined; None at the end of input."""
    lines: list[str] = []
    while True:
        try:
            line = input("... " if lines else "> ") if sys.stdin.isatty() else _piped()
        except EOFError:
            return "\n".join(lines) if lines else None
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])


def _piped() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


@dataclass
class Chat:
    """The conversation so far, and what a line typed into it does."""

    model: ServedModel
    sampling: Sampling
    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)

    def run(self, read: Callable[[], str | None]) -> None:
        while (line := read()) is not None:
            if not line.strip():
                continue
            if line.startswith("/"):
                if not self.command(line[1:].strip()):
                    return
            else:
                self.ask(line)

    def ask(self, text: str) -> None:
        """Put a question, and print the answer while it is written."""
        from verl.serving.answers import stream_answer

        self.messages.append({"role": "user", "content": text})
        answer = ""
        pieces = stream_answer(self.model, self._conversation(), self._sampling(), chat=True)
        try:
            for piece in pieces:
                answer += piece
                print(printable(piece), end="", flush=True)
            print(flush=True)
        except KeyboardInterrupt:
            pieces.close()
            print(" [stopped]", flush=True)
        except (DataError, RolloutError) as error:
            self.messages.pop()
            print(f"{error}. /reset forgets the conversation.", flush=True)
            return
        self.messages.append({"role": "assistant", "content": answer})

    def _conversation(self) -> list[dict[str, Any]]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.messages]

    def _sampling(self) -> Sampling:
        """Another seed for every turn; without a chat template the next "User:" is not ours to write."""
        stop = self.sampling.stop if self.model.template.has_template else (*self.sampling.stop, "\nUser:")
        return replace(self.sampling, seed=self.sampling.seed + len(self.messages), stop=stop)

    def command(self, text: str) -> bool:
        """Do what a line after "/" says; False ends the conversation."""
        name, _, rest = text.partition(" ")
        if name in ("quit", "exit", "q"):
            return False
        if name == "reset":
            self.messages.clear()
            print("The conversation is forgotten.")
        elif name == "undo":
            del self.messages[-2:]
            print(f"{len(self.messages) // 2} turns are left.")
        elif name == "system":
            self.system = rest.strip() or None
            print("The system message is set." if self.system else "There is no system message now.")
        elif name == "set":
            print(self._set(rest))
        else:
            print(HELP if name == "help" else f"There is no command /{name}.\n{HELP}")
        return True

    def _set(self, text: str) -> str:
        from verl.serving.answers import ANSWER_TOKENS

        key, _, value = (part.strip() for part in text.partition("="))
        if key not in _SETTABLE:
            return f"/set takes {', '.join(_SETTABLE)}, as in /set temperature=0.7"
        try:
            changed = replace(self.sampling, **{key: _SETTABLE[key](value)})
            changed.params(changed.max_tokens or max(ANSWER_TOKENS, changed.min_tokens))
        except (ValueError, RolloutError) as error:
            return f"{key} stays {getattr(self.sampling, key)}: {error}"
        self.sampling = changed
        return f"{key} is {getattr(changed, key)} now."
