"""The layouts of prompt datasets that are understood, and how a row of each becomes a prompt row.

==================  ==========================================  ===================================================
layout              columns                                     prompt and reference
==================  ==========================================  ===================================================
prompt              ``prompt`` (or ``data.prompt_key``)         messages or plain text; see ``REFERENCE_COLUMNS``
question_answer     question, answer                            GSM8K as published, or any question with its answer
alpaca              instruction, output, [input]                user message; the output
dolly               instruction, response, [context]            user message; the response
messages            messages                                    the turns before a final assistant turn; that turn
preference          chosen, rejected                            their common first messages; no reference
==================  ==========================================  ===================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

from verl.data.messages import Message, Prompt, check_messages, common_prefix, plain
from verl.data.preprocess import GSM8K_SOURCE, gsm8k_ground_truth, gsm8k_prompt, is_gsm8k_answer
from verl.data.rows import Row
from verl.errors import DataError
from verl.notices import notice

DEFAULT_PROMPT_KEY = "prompt"
# Where the prompt layout looks for the answer when a row has no reward_model, first match wins.
REFERENCE_COLUMNS = ("ground_truth", "answer", "output", "response", "completion")
# Names that the dataflow gives its own values; a dataset column of that name is renamed.
RESERVED = frozenset(
    {"uid", "sample_id", "pair_id", "index", "prompt_ids", "raw_prompt", "prompts", "responses", "response_mask"}
    | {"response_ids", "input_ids", "attention_mask", "position_ids", "rollout_log_probs", "finish_reason"}
    | {"generated_tokens"}
)


class Layout(Enum):
    PROMPT = "prompt"
    QUESTION_ANSWER = "question_answer"
    ALPACA = "alpaca"
    DOLLY = "dolly"
    MESSAGES = "messages"
    PREFERENCE = "preference"


_NEEDED: list[tuple[Layout, set[str]]] = [
    (Layout.QUESTION_ANSWER, {"question", "answer"}),
    (Layout.ALPACA, {"instruction", "output"}),
    (Layout.DOLLY, {"instruction", "response"}),
    (Layout.MESSAGES, {"messages"}),
    (Layout.PREFERENCE, {"chosen", "rejected"}),
]


def detect_layout(columns: Sequence[str], prompt_key: str, name: str) -> Layout:
    """The layout of a file from its columns. A ``prompt_key`` other than the default must be there."""
    if prompt_key in columns:
        return Layout.PROMPT
    if prompt_key == DEFAULT_PROMPT_KEY:
        for layout, needed in _NEEDED:
            if needed <= set(columns):
                return layout
    raise DataError(
        f"{name} has no column '{prompt_key}': its columns are {', '.join(columns) or '(none)'}; set data.prompt_key "
        "to the one that holds the prompt (a list of messages or plain text)"
    )


def _text(row: Row, column: str, where: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise DataError(f"{where}: column '{column}' must be text, got {'null' if value is None else repr(value)[:60]}")
    return value


def _user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _instruction(row: Row, extra: str, where: str) -> list[Message]:
    text = _text(row, "instruction", where)
    addition = row.get(extra)
    return _user(f"{text}\n\n{_text(row, extra, where)}" if addition else text)


def _split_answer(messages: list[Message], where: str) -> tuple[list[Message], str | None]:
    """A conversation that ends with the assistant's turn: that turn is the answer, not part of the prompt."""
    if messages[-1]["role"] != "assistant":
        return messages, None
    if len(messages) == 1:
        raise DataError(f"{where}: the conversation holds only an assistant message, so there is no prompt")
    return messages[:-1], messages[-1]["content"]


def _reference(row: Row, prompt_key: str) -> Any:
    return next((row[name] for name in REFERENCE_COLUMNS if name != prompt_key and row.get(name) is not None), None)


def _from_prompt(row: Row, column: str, where: str) -> tuple[Prompt, Any]:
    value = row.get(column)
    if value is None:
        raise DataError(f"{where}: column '{column}' is null")
    reference = _reference(row, column)
    if isinstance(value, str):
        if value.lstrip().startswith('[{"role"'):
            notice(f"{where}: the prompt looks like messages written as JSON text; it is used as plain text as it is")
        return value, reference
    messages, answer = _split_answer(check_messages(value, where), where)
    if answer is not None:
        notice(
            f"{where}: the prompt ends with an assistant message; such messages are taken as the reference answer",
            key="data.prompt_ends_with_assistant",
        )
    return messages, answer if reference is None else reference


def _from_question_answer(row: Row, where: str) -> tuple[Prompt, Any]:
    question, answer = _text(row, "question", where), row.get("answer")
    if is_gsm8k_answer(answer):
        return gsm8k_prompt(question), gsm8k_ground_truth(answer, where)
    return _user(question), answer


def _from_preference(row: Row, where: str) -> tuple[Prompt, Any]:
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise DataError(f"{where}: chosen and rejected are plain texts, so the row also needs a 'prompt' column")
    prompt = common_prefix(check_messages(chosen, where), check_messages(rejected, where))
    if not prompt:
        raise DataError(f"{where}: chosen and rejected do not begin with the same message, so there is no prompt")
    return prompt, None


_BUILDERS: dict[Layout, Callable[[Row, str], tuple[Prompt, Any]]] = {
    Layout.QUESTION_ANSWER: _from_question_answer,
    Layout.ALPACA: lambda row, where: (_instruction(row, "input", where), row.get("output")),
    Layout.DOLLY: lambda row, where: (_instruction(row, "context", where), row.get("response")),
    Layout.MESSAGES: lambda row, where: _split_answer(check_messages(row.get("messages"), where), where),
    Layout.PREFERENCE: _from_preference,
}


def prompt_row(
    row: Row,
    layout: Layout,
    where: str,
    *,
    prompt_key: str = DEFAULT_PROMPT_KEY,
    answer_key: str | None = None,
    source_key: str = "data_source",
    default_source: str = "local",
) -> Row:
    """One dataset row in the form that the dataflow uses.

    Returns every dataset column under its own name (reserved names get the prefix ``dataset_``) and

    - ``raw_prompt``: list of messages, or plain text;
    - ``data_source``: the column ``source_key``, else ``openai/gsm8k`` for GSM8K, else ``default_source``;
    - ``reward_model``: as given, else ``{"style", "ground_truth"}`` from ``answer_key`` or the layout's own reference,
      with style "rule" (a scorer of the data source judges it), "reference" (an answer to compare with) or "none"
      (``ground_truth`` is then None). A ground truth is passed on unchanged, whatever its type;
    - ``extra_info``: a dict, empty where the row has none.
    """
    if layout is Layout.PROMPT:
        prompt, reference = _from_prompt(row, prompt_key, where)
    else:
        prompt, reference = _BUILDERS[layout](row, where)
    if answer_key is not None:
        if answer_key not in row:
            raise DataError(f"{where}: no column '{answer_key}' (data.answer_key); the columns are {', '.join(row)}")
        reference = row[answer_key]
    source = row.get(source_key)
    is_gsm8k = layout is Layout.QUESTION_ANSWER and is_gsm8k_answer(row.get("answer"))
    labelled = answer_key is not None or row.get("ground_truth") is not None
    has_rule = (is_gsm8k and answer_key is None) or (source is not None and labelled)
    return {
        **own_columns(row),
        "raw_prompt": prompt,
        "data_source": source if source is not None else GSM8K_SOURCE if is_gsm8k else default_source,
        "reward_model": _reward_model(row.get("reward_model"), reference, "rule" if has_rule else "reference", where),
        "extra_info": _extra_info(row.get("extra_info"), where),
    }


def own_name(column: str) -> str:
    """What a dataset column is called in a prompt row."""
    return f"dataset_{column}" if column in RESERVED else column


def own_columns(row: Row) -> Row:
    """The dataset's columns; those with a name that the dataflow uses get the prefix ``dataset_``."""
    columns = {}
    for name, value in row.items():
        if name in RESERVED:
            notice(f"dataset column '{name}' is called '{own_name(name)}' here: the name is used by the training data")
        columns[own_name(name)] = value
    return columns


def _reward_model(given: Any, reference: Any, style: str, where: str) -> Row:
    if given is None:
        return {"style": "none" if reference is None else style, "ground_truth": reference}
    if not isinstance(given, Mapping):
        raise DataError(
            f"{where}: column 'reward_model' must be a dict with style and ground_truth, got {type(given).__name__}; "
            "an answer by itself belongs in a column 'ground_truth'"
        )
    return dict(given)


def _extra_info(given: Any, where: str) -> Row:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise DataError(f"{where}: column 'extra_info' must be a dict, got {type(given).__name__}")
    return plain(given)


def rows_from_prompts(prompts: Sequence[Prompt]) -> list[Row]:
    """Rows for a Python list of prompts, each a text or a list of messages."""
    return [{DEFAULT_PROMPT_KEY: prompt} for prompt in prompts]
