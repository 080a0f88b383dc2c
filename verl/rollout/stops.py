"""What ends a response: ids, and strings in what was written last."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from verl.rollout.base import SamplingParams

STOP_WINDOW = 16  # tokens that are decoded to look for a stop string, beyond the string's own length


def stop_ids(params: SamplingParams, eos: frozenset[int]) -> frozenset[int]:
    """Ids that end a response."""
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)


def ends(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], params: SamplingParams, stops: frozenset[int]
) -> str | None:
    """The finish reason of a response whose last token is the last of ``tokens``; None if it goes on."""
    may_end = len(tokens) >= params.min_tokens
    if may_end and (tokens[-1] in stops or (params.stop and _completes_stop_string(tokenizer, tokens, params))):
        return "stop"
    return "length" if len(tokens) >= params.max_tokens else None


def _completes_stop_string(tokenizer: PreTrainedTokenizerBase, tokens: list[int], params: SamplingParams) -> bool:
    """True if a stop string is in the text of the last of ``tokens``. A string has at most a token a character.

    Up to ``min_tokens`` a string may have been passed over: then only one that the last token completes counts.
    """
    window = STOP_WINDOW + max(len(s) for s in params.stop)
    text = tokenizer.decode(tokens[-window:])
    found = [s for s in params.stop if s in text]
    if not found or not params.min_tokens:
        return bool(found)
    before = tokenizer.decode(tokens[-window:-1])
    return any(text.count(s) > before.count(s) for s in found)
