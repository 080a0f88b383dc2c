"""``data.*``: which rows are read and how they become batches of prompts."""

# ruff: noqa: RUF009  (option() and group() make dataclass fields)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config import names
from verl.config.fields import group, option


@dataclass(slots=True)
class CustomClass:
    """A user's class in a Python file."""

    path: str | None = option(None, "Python file with the class; `null`: the built-in one.", path=True)
    name: str | None = option(None, "Name of the class in that file.")


@dataclass(slots=True)
class Data:
    """Data sets, prompts and batch sizes. Sizes count prompts, lengths count tokens."""

    train_files: str | list[str] | None = option(
        None,
        "Training data: a file (parquet, jsonl, json), an Arrow folder, a hub name, or a list of them. Required.",
        path=True,
        verl="~/data/rlhf/gsm8k/train.parquet",
    )
    val_files: str | list[str] | None = option(
        None,
        "Validation data, as `train_files`; `null`: no validation.",
        path=True,
        verl="~/data/rlhf/gsm8k/test.parquet",
    )
    tokenizer: str | None = option(
        None, "Tokenizer folder or hub name; `null`: `model.tokenizer_path`, then `model.path`.", path=True
    )
    prompt_key: str = option("prompt", "Column with the prompt: a list of messages, or text.")
    answer_key: str | None = option(
        None, "Column with the reference answer of an unlabelled layout; `null`: found by the layout.", verl="(none)"
    )
    reward_fn_key: str = option("data_source", "Column that tells the default scorer which rule to use.")
    max_prompt_length: int = option(512, "Longest prompt, in tokens.", low=1)
    max_response_length: int = option(512, "Longest response, in tokens.", low=1)
    train_batch_size: int = option(
        64,
        "Prompts a training step. When it is not given and the data set is smaller, the data set is one batch.",
        low=1,
        verl=1024,
    )
    gen_batch_size: int | None = option(
        None, "Prompts drawn at a time when groups are filtered; `null`: `train_batch_size`.", low=1
    )
    val_batch_size: int | None = option(None, "Prompts a validation batch; `null`: the whole set.", low=1)
    train_max_samples: int = option(
        -1, "Use only this many training rows (a seeded choice if `shuffle`); -1: all.", low=-1
    )
    val_max_samples: int = option(-1, "Use only this many validation rows; -1: all.", low=-1)
    shuffle: bool = option(True, "Draw training rows in a seeded random order, a new one each epoch.")
    seed: int | None = option(
        None, "Seed of that order and of `train_max_samples`; `null`: `trainer.seed`.", low=0, below=1e18
    )
    validation_shuffle: bool = option(False, "Shuffle the validation rows too (matters with `val_max_samples`).")
    filter_overlong_prompts: bool = option(
        False, "Leave out rows whose prompt is longer than `max_prompt_length`, and count them."
    )
    max_length: int = option(
        1024, "SFT, pairs, labels: longest prompt and answer together, in tokens.", low=2, verl="1024 (SFT)"
    )
    on_bad_row: str = option(
        "error",
        "SFT, pairs, labels: a row that cannot be used stops the run with its place (`error`), or is left out and "
        "counted (`drop`).",
        choices=("error", "drop"),
        verl="(none)",
    )
    response_key: str | None = option(
        None, "SFT: column with the answer; `null`: the first of response, completion, output, answer.", verl="response"
    )
    messages_key: str = option("messages", "SFT: column with a whole conversation.")
    text_key: str = option("text", "SFT: column of which every token is learned.", verl="(none)")
    tools_key: str = option("tools", "SFT, pairs, labels: column with tool schemas for the chat template.")
    truncation: str = option(
        "error",
        "What to do with a prompt (SFT, pairs, labels: a row) that is too long: stop with its row, or keep the end "
        "(`left` cuts the left; also `keep_end`), the start (`right`, `keep_start`), or of prompts both ends "
        "(`middle`).",
        choices=names.TRUNCATIONS,
    )
    last_batch: str = option(
        "drop",
        "The rows left at the end of an epoch: `drop` them with a notice, or make a `short` batch.",
        choices=("drop", "short"),
        verl="(drop)",
    )
    apply_chat_template: str = option(
        "auto",
        "`true`: always template the prompt; `false`: use its text as it is; "
        "`auto`: template if the tokenizer has a template.",
        choices=("auto", "true", "false"),
        normalise=str.lower,
        verl="(true)",
    )
    apply_chat_template_kwargs: dict[str, Any] = option(
        {}, "Extra arguments of the chat template, for example `enable_thinking`."
    )
    custom_cls: CustomClass = group(CustomClass, "A user's data set class.")
