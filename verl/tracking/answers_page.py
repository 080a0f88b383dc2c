"""One page with the answers of two models side by side; self-contained, and all texts are only texts."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from verl.tracking.report import asset, page_of


@dataclass(frozen=True)
class AnswerPair:
    """What two models answered to one prompt; ``expected`` is None where nobody knows."""

    prompt: str
    base: str
    tuned: str
    expected: str | None = None
    base_note: str = ""
    tuned_note: str = ""

    @property
    def differs(self) -> bool:
        return self.base != self.tuned


def answers_page(base: str, tuned: str, pairs: Sequence[AnswerPair], sampling: str) -> str:
    """The HTML page.

    Args:
        base, tuned: names of the models. sampling: how the answers were drawn, one line.
    """
    different = sum(pair.differs for pair in pairs)
    facts = [
        ("base", base),
        ("tuned", tuned),
        ("prompts", f"{len(pairs)}, answered differently: {different}"),
        ("sampling", sampling),
        ("written", datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")),
    ]
    parts = {
        "FACTS": "".join(f"<div><dt>{_text(k)}</dt><dd>{_text(v)}</dd></div>" for k, v in facts),
        "BASE": _text(base),
        "TUNED": _text(tuned),
        "ROWS": "\n".join(_row(number, pair) for number, pair in enumerate(pairs, 1)),
    }
    return page_of(asset("answers.html"), parts, title=f"{base} and {tuned}")


def _row(number: int, pair: AnswerPair) -> str:
    expected = f'<p class="expected"><i>expected</i> {_text(pair.expected)}</p>' if pair.expected is not None else ""
    answers = "".join(
        f'<div class="answer" data-label="{label}"><div class="text">{_text(text) or "<i>nothing</i>"}</div>'
        f"<small>{_text(note)}</small></div>"
        for label, text, note in (("base", pair.base, pair.base_note), ("tuned", pair.tuned, pair.tuned_note))
    )
    return (
        f'<article class="{"differs" if pair.differs else "same"}"><div class="ask"><b>{number}</b>'
        f'<div class="text">{_text(pair.prompt)}</div>{expected}</div>{answers}</article>'
    )


def _text(value: object) -> str:
    return html.escape(str(value))
