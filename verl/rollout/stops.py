"""Looking for stop strings in what was written last."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

STOP_WINDOW = 16  # tokens that are decoded to look for a stop string, beyond the string's own length


def has_stop_string(tokenizer: PreTrainedTokenizerBase, tokens: list[int], stop: Sequence[str]) -> bool:
    """True if the text of the last of ``tokens`` contains one of ``stop``. A string has at most a token a character."""
    window = STOP_WINDOW + max(len(s) for s in stop)
    text = tokenizer.decode(tokens[-window:])
    return any(s in text for s in stop)
