"""Where the assistant speaks in a templated conversation: as character spans that are proven, never guessed.

A conversation is templated as a whole. The span of an assistant turn starts where the generation prompt of the turns
before it ends, and ends where the template of the turns up to it ends, if both texts are beginnings of the whole text.
A template that writes earlier turns differently when more follow (Mistral's puts the system text into the last user
turn) is tried with markers in place of the assistant's texts: if the rendering around the markers, with the texts
put back, is the whole text character for character, then the texts stand there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from verl.data.messages import Message

Render = Callable[[list[Message], bool], str]
"""(messages, add_generation_prompt) to text; raises whatever the template raises."""

Span = tuple[int, int]

_TRIMS: tuple[Callable[[str], str], ...] = (str, str.strip, str.lstrip, str.rstrip)


def assistant_turns(messages: Sequence[Message]) -> list[int]:
    """Numbers of the assistant's messages."""
    return [number for number, message in enumerate(messages) if message["role"] == "assistant"]


def assistant_spans(messages: list[Message], render: Render, full: str) -> list[Span] | None:
    """The span of each assistant turn in ``full`` = ``render(messages, False)``; None if they cannot be proven.

    A span has at least the turn's text; whether the end-of-turn token is in it depends on the method.
    """
    turns = assistant_turns(messages)
    starts = [_beginning(messages[:turn], True, render, full) for turn in turns]
    ends = [_beginning(messages[: turn + 1], False, render, full) for turn in turns]
    spans = [(a, b) for a, b in zip(starts, ends, strict=True) if a is not None and b is not None]
    if len(spans) == len(turns) and _hold_their_texts(messages, spans, full):
        return spans
    texts = _by_markers(messages, render, full)
    if texts is None:
        return None
    # What the template writes between the generation prompt and the text is the assistant's too.
    borders = [0, *(end for _, end in texts)]
    return [
        (start if start is not None and border <= start <= text[0] else text[0], text[1])
        for start, border, text in zip(starts, borders, texts, strict=False)
    ]


def _beginning(messages: list[Message], generation_prompt: bool, render: Render, full: str) -> int | None:
    """Length of the rendered beginning of the conversation, if ``full`` does begin with it."""
    if not messages:
        return None
    try:
        text = render(messages, generation_prompt)
    except Exception:  # a template may refuse a shorter conversation in any way; the other method then has to do
        return None
    return len(text) if full.startswith(text) else None


def _hold_their_texts(messages: list[Message], spans: list[Span], full: str) -> bool:
    turns = assistant_turns(messages)
    ordered = all(start <= end for start, end in spans) and all(
        before[1] <= after[0] for before, after in pairwise(spans)
    )
    return ordered and all(
        messages[turn]["content"].strip() in full[start:end] for turn, (start, end) in zip(turns, spans, strict=True)
    )


def _by_markers(messages: list[Message], render: Render, full: str) -> list[Span] | None:
    turns = assistant_turns(messages)
    markers = [f"@@turn-{number}@@" for number in range(len(turns))]
    if any(marker in full for marker in markers):
        return None
    marked = [dict(message) for message in messages]
    for turn, marker in zip(turns, markers, strict=True):
        marked[turn]["content"] = marker
    try:
        rest = render(marked, False)
    except Exception:  # as above: then nothing is proven
        return None
    around = []
    for marker in markers:
        before, found, rest = rest.partition(marker)
        if not found or marker in rest:
            return None
        around.append(before)
    around.append(rest)
    for trim in _TRIMS:
        texts = [trim(messages[turn]["content"]) for turn in turns]
        if full == "".join(a + b for a, b in zip(around, [*texts, ""], strict=True)):
            spans, position = [], 0
            for before, text in zip(around, texts, strict=False):
                start = position + len(before)
                position = start + len(text)
                spans.append((start, position))
            return spans
    return None
