"""Datasets of judged answers: pairs of a chosen and a rejected one, and single ones with a label."""

from __future__ import annotations

from typing import Any

import numpy as np

from verl.data.conversation import RowProblem
from verl.data.messages import Message, Prompt, check_messages, common_prefix
from verl.data.rows import Part, Row
from verl.data.sequences import SequenceDataset, split
from verl.errors import DataError

Answer = str | list[Message]


def need_columns(part: Part, needed: tuple[str, ...], what: str) -> None:
    missing = [name for name in needed if name not in part.columns]
    if missing:
        raise DataError(
            f"{part.name} has no column {' and no column '.join(map(repr, missing))}, which {what} needs; its columns "
            f"are {', '.join(part.columns) or '(none)'}"
        )


def read_answer(row: Row, column: str, where: str) -> Answer:
    """A text, or messages (one message as a dict is a list of one)."""
    value = row.get(column)
    if value is None:
        raise RowProblem("missing value", f"{where}: column '{column}' is null or missing")
    if isinstance(value, str):
        return value
    return check_messages([value] if isinstance(value, dict) else value, f"{where}, column '{column}'")


def _is_empty(answer: Answer) -> bool:
    if isinstance(answer, str):
        return not answer.strip()
    spoken = [message for message in answer if message["role"] == "assistant"]
    return not any(message["content"].strip() or message.get("tool_calls") for message in spoken)


def _check_not_empty(answer: Answer, column: str, where: str) -> None:
    if _is_empty(answer):
        raise RowProblem("empty completion", f"{where}: '{column}' has no text of an assistant, so nothing to learn")


def _without_prompt(prompt: Prompt, answer: Answer) -> Answer:
    """An answer given as the whole conversation, without the messages of the prompt that it repeats."""
    if isinstance(answer, str):
        return answer
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return answer[len(messages) :] if answer[: len(messages)] == messages else answer


class PreferenceDataset(SequenceDataset):
    """Pairs: columns ``prompt``, ``chosen``, ``rejected``, each text or messages.

    Without a prompt, chosen and rejected are whole conversations and the prompt is their longest common beginning.
    Each side is templated once, with its prompt. Both sides keep the same prompt tokens: a pair whose two cuts to
    ``max_length`` leave different ones cannot be used, nor one that is left without a response.

    An item has ``prompt_ids`` (P,), and for each side ``{side}_ids`` (R,) and ``{side}_mask`` (R,) bool; see
    `verl.data.padding.collate_pairs`. A column ``margin`` is passed on, as any other.
    """

    def check_part(self, part: Part) -> None:
        need_columns(part, ("chosen", "rejected"), "learning from pairs")

    def encode_row(self, row: Row, part: Part, where: str) -> Row:
        prompt, chosen, rejected = self._texts(row, where)
        if chosen == rejected:
            raise RowProblem("chosen equals rejected", f"{where}: chosen and rejected are equal")
        _check_not_empty(chosen, "chosen", where)
        _check_not_empty(rejected, "rejected", where)
        tools = self.tools(row, where)
        item: Row = {"truncated": False}
        prompts, contexts = [], []
        for side, answer in (("chosen", chosen), ("rejected", rejected)):
            encoded = self.template.encode_completion(prompt, answer, f"{where}, '{side}'", tools=tools)
            contexts.append(split(encoded)[0])
            kept = self.fit(encoded, f"{where}, '{side}'")
            context, item[f"{side}_ids"], item[f"{side}_mask"] = split(kept)
            item["truncated"] |= len(kept[0]) < len(encoded[0])
            prompts.append(context)
            if not item[f"{side}_mask"].any():
                raise RowProblem("no response after cutting", f"{where}: max_length leaves nothing of '{side}'")
        if not np.array_equal(contexts[0], contexts[1]):
            raise RowProblem("template", f"{where}: the chat template renders the prompt differently for the two sides")
        if not (np.array_equal(prompts[0], prompts[1]) and len(prompts[0])):
            raise RowProblem("different prompts after cutting", f"{where}: max_length cuts the two prompts differently")
        if np.array_equal(item["chosen_ids"], item["rejected_ids"]):
            raise RowProblem("chosen equals rejected", f"{where}: chosen and rejected are equal after cutting")
        return {**item, "prompt_ids": prompts[0]}

    def _texts(self, row: Row, where: str) -> tuple[Prompt, Answer, Answer]:
        chosen, rejected = read_answer(row, "chosen", where), read_answer(row, "rejected", where)
        if row.get(self.settings.prompt_key) is not None:
            prompt = read_answer(row, self.settings.prompt_key, where)
            return prompt, _without_prompt(prompt, chosen), _without_prompt(prompt, rejected)
        if isinstance(chosen, str) or isinstance(rejected, str):
            raise RowProblem(
                "missing value",
                f"{where}: chosen and rejected are plain texts, so the row needs a '{self.settings.prompt_key}' too",
            )
        prompt = common_prefix(chosen, rejected)
        if not prompt:
            raise RowProblem(
                "no common prompt", f"{where}: chosen and rejected do not begin with the same message: no prompt"
            )
        return prompt, chosen[len(prompt) :], rejected[len(prompt) :]


class UnpairedDataset(SequenceDataset):
    """Labelled answers for KTO: columns ``prompt``, ``completion`` (text or messages) and ``label`` (true or false).

    Without a prompt, the completion is a whole conversation and its last assistant message is the answer.

    An item has ``prompt_ids`` (P,), ``response_ids`` (R,), ``response_mask`` (R,) bool and ``label`` (bool).
    """

    def check_part(self, part: Part) -> None:
        need_columns(part, ("completion", "label"), "learning from labelled answers")

    def encode_row(self, row: Row, part: Part, where: str) -> Row:
        label = row.get("label")
        if not isinstance(label, bool | np.bool_):
            raise RowProblem("label not boolean", f"{where}: label must be true or false, got {label!r}")
        answer = read_answer(row, "completion", where)
        prompt = self._prompt(row, answer, where)
        if row.get(self.settings.prompt_key) is None:
            answer = answer[len(prompt) :]
        answer = _without_prompt(prompt, answer)
        _check_not_empty(answer, "completion", where)
        encoded = self.template.encode_completion(prompt, answer, where, tools=self.tools(row, where))
        kept = self.fit(encoded, where)
        return {**response_item(kept, where), "truncated": len(kept[0]) < len(encoded[0]), "label": bool(label)}

    def _prompt(self, row: Row, answer: Answer, where: str) -> Prompt:
        if row.get(self.settings.prompt_key) is not None:
            return read_answer(row, self.settings.prompt_key, where)
        if isinstance(answer, str):
            key = self.settings.prompt_key
            raise RowProblem("missing value", f"{where}: completion is a plain text, so the row needs a '{key}' too")
        turns = [number for number, message in enumerate(answer) if message["role"] == "assistant"]
        if not turns or not turns[-1]:
            raise RowProblem("no prompt", f"{where}: the completion holds no prompt with an answer of the assistant")
        return answer[: turns[-1]]


def response_item(kept: tuple[np.ndarray, np.ndarray], where: str) -> dict[str, Any]:
    """``prompt_ids``, ``response_ids``, ``response_mask`` of a row after cutting."""
    ids, mask = kept
    if mask[:1].any():  # cut inside the response: its first token is left as context
        mask = mask.copy()
        mask[0] = False
    prompt, response, response_mask = split((ids, mask))
    if not response_mask.any():
        raise RowProblem("no response after cutting", f"{where}: max_length leaves nothing of the response")
    return {"prompt_ids": prompt, "response_ids": response, "response_mask": response_mask}
