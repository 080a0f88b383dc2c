"""Model text on a terminal: it may break lines and indent, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.tracking.samples import visible

if TYPE_CHECKING:
    from verl.data.messages import Prompt


def printable(text: str) -> str:
    """``text`` with line ends and tabs as they are, and every other control character shown instead of obeyed."""
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join("\t".join(visible(part) for part in line.split("\t")) for line in lines)


def prompt_text(prompt: Prompt) -> str:
    """A prompt for people: of a conversation its last message."""
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
