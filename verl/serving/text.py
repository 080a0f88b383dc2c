"""Text out of tokens while they come: no half characters, and nothing at or beyond a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"


class TextStream:
    """The text of one response as it grows.

    A few tokens before the new ones are decoded with them, because some tokenizers write a token differently at the
    beginning. Text that may be the start of a stop string is held back until that is decided.

    Attributes:
        text: what was given out so far.
        stopped: a stop string was found; the text ends before it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = (), *, skip_special: bool = True):
        self._tokenizer, self._stop, self._skip_special = tokenizer, tuple(stop), skip_special
        self._tokens: list[int] = []
        self._context, self._read = 0, 0  # tokens decoded as context begin here; all before _read are in _decoded
        self._decoded = ""
        self.text = ""
        self.stopped = False

    def push(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Take the next tokens and return the new text. ``last``: nothing comes after these."""
        self._tokens += tokens
        if self.stopped:
            return ""
        before = self._decode(self._context, self._read)
        after = self._decode(self._context, len(self._tokens))
        if len(after) > len(before) and (last or not after.endswith(_INCOMPLETE)):
            self._decoded += after[len(before) :]
            self._context, self._read = self._read, len(self._tokens)
        ready = len(self._decoded) - (0 if last else self._held_back())
        if (found := self._stop_at()) is not None:
            ready, self.stopped = found, True
        new = self._decoded[len(self.text) : ready]
        self.text += new
        return new

    def _decode(self, start: int, end: int) -> str:
        text = self._tokenizer.decode(
            self._tokens[start:end], skip_special_tokens=self._skip_special, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _stop_at(self) -> int | None:
        places = [place for text in self._stop if (place := self._decoded.find(text)) >= 0]
        return min(places) if places else None

    def _held_back(self) -> int:
        """Characters at the end that may begin a stop string."""
        for size in range(min(len(self._decoded), max(map(len, self._stop), default=1) - 1), 0, -1):
            end = self._decoded[-size:]
            if any(text.startswith(end) for text in self._stop):
                return size
        return 0


def response_text(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], stop: Sequence[str] = (), *, skip_special: bool = True
) -> str:
    """The text of a whole response, up to its first stop string."""
    return TextStream(tokenizer, stop, skip_special=skip_special).push(tokens, last=True)
