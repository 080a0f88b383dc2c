"""The dataset of supervised fine-tuning: conversations, prompts with answers, or plain text.

======================  ==================================================================================
columns                 what is learned
======================  ==================================================================================
``messages``            every assistant message, with the token that ends it
prompt and response     the response; prompt is text or messages, the response column is ``data.response_key``
                        or the first of response, completion, output, answer
question and answer     the answer (GSM8K: after the same prompt as for reinforcement learning)
instruction and output  the output (Alpaca; ``input`` is put under the instruction)
instruction, response   the response (dolly; ``context`` is put under the instruction)
``text``                every token
======================  ==================================================================================

Prompts with answers and a boolean ``label`` are data for KTO, where false marks an answer that is not wanted: such a
row is no row to learn.
"""

from __future__ import annotations

import numpy as np

from verl.data.conversation import Encoded, RowProblem
from verl.data.messages import Prompt, check_messages
from verl.data.preference import read_answer, response_item
from verl.data.preprocess import gsm8k_prompt, is_gsm8k_answer
from verl.data.rows import Part, Row
from verl.data.schemas import Layout, prompt_row
from verl.data.sequences import SequenceDataset
from verl.errors import DataError

RESPONSE_COLUMNS = ("response", "completion", "output", "answer")


class SFTDataset(SequenceDataset):
    """Rows of the layouts above; ``data_files`` is whatever `verl.data.readers.read_rows` takes.

    ``config`` are the keys of `SequenceSettings` as a dict or dataclass. A column ``tools`` goes to the chat template.
    An item has ``prompt_ids`` (P,) (what stands before the first trained token, at least one token), ``response_ids``
    (R,) (the rest, up to the last trained token) and ``response_mask`` (R,) bool, True where trained.

    Raises DataError with file and row for a row without anything to learn, one that is longer than ``max_length``
    (with ``truncation="error"``), or one whose assistant parts cannot be told from the rest with its chat template.
    """

    def check_part(self, part: Part) -> None:
        self._layout(part)

    def encode_row(self, row: Row, part: Part, where: str) -> Row:
        encoded = self._encode(row, self._layout(part), where)
        if not len(encoded[0]):
            raise RowProblem("empty completion", f"{where}: there is no token to learn")
        kept = self.fit(encoded, where)
        return {**response_item(kept, where), "truncated": len(kept[0]) < len(encoded[0])}

    def _encode(self, row: Row, layout: tuple[str, str], where: str) -> Encoded:
        kind, column = layout
        tools = self.tools(row, where)
        if kind == "messages":
            return self.template.encode_conversation(check_messages(row.get(column), where), where, tools=tools)
        if kind == "prompt" and isinstance(row.get("label"), bool | np.bool_) and not row["label"]:
            raise RowProblem(
                "labelled false",
                f"{where}: label is false, which marks an answer that is not wanted, and SFT would learn it (kto "
                "learns from both labels; without the column 'label' every row is learned)",
            )
        answer = read_answer(row, column, where)
        if isinstance(answer, str) and not answer.strip():
            raise RowProblem("empty completion", f"{where}: column '{column}' is empty, so there is nothing to learn")
        if kind == "text":
            if not isinstance(answer, str):
                raise RowProblem("wrong row", f"{where}: column '{column}' must be text")
            return self.template.encode_text(answer, where)
        return self.template.encode_completion(self._prompt(row, kind, where), answer, where, tools=tools)

    def _prompt(self, row: Row, kind: str, where: str) -> Prompt:
        if kind == "prompt":
            return read_answer(row, self.settings.prompt_key, where)
        if kind == "question_answer":
            question = read_answer(row, "question", where)
            if not isinstance(question, str):
                raise RowProblem("wrong row", f"{where}: column 'question' must be text")
            return gsm8k_prompt(question) if is_gsm8k_answer(row["answer"]) else [{"role": "user", "content": question}]
        return prompt_row(row, Layout(kind), where)["raw_prompt"]

    def _layout(self, part: Part) -> tuple[str, str]:
        """(layout, column that is learned)."""
        s, columns = self.settings, set(part.columns)
        if s.messages_key in columns:
            return "messages", s.messages_key
        responses = [s.response_key] if s.response_key else [name for name in RESPONSE_COLUMNS if name in columns]
        if s.prompt_key in columns and columns.issuperset(responses) and responses:
            return "prompt", responses[0]
        for kind, needed in (
            ("question_answer", ("question", "answer")),
            ("alpaca", ("instruction", "output")),
            ("dolly", ("instruction", "response")),
            ("text", (s.text_key,)),
        ):
            if columns.issuperset(needed):
                return kind, needed[-1]
        raise DataError(
            f"{part.name} has no layout to learn from: its columns are {', '.join(part.columns) or '(none)'}; "
            f"set data.messages_key ('{s.messages_key}'), data.text_key ('{s.text_key}'), or data.prompt_key "
            f"('{s.prompt_key}') and data.response_key ({s.response_key or 'one of ' + ', '.join(RESPONSE_COLUMNS)})"
        )
