"""From ``config.data`` to datasets and loaders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from verl.config.tree.data import Data
from verl.data.collate import collate_prompts
from verl.data.custom import CustomDataset, load_dataset_class
from verl.data.loader import Collate, PromptLoader, RowSource
from verl.data.readers import DataFiles
from verl.data.rl_dataset import PromptDataset
from verl.data.sampler import resolve_seed
from verl.data.settings import PromptSettings
from verl.data.templating import PromptTemplate
from verl.errors import DataError


def build_prompt_dataset(
    data: Data,
    tokenizer: Any,
    split: Literal["train", "validation"] = "train",
    *,
    files: DataFiles | None = None,
    seed: int | None = None,
    chat_template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> RowSource:
    """The training or validation prompts that ``data`` describes.

    ``files`` replaces ``data.train_files`` or ``data.val_files`` (rows in memory, for example), ``seed`` serves where
    ``data.seed`` is null, ``chat_template`` replaces the tokenizer's. With ``data.custom_cls.path`` the user's class
    is made with verl's constructor: data_files, tokenizer, config, processor, max_samples.
    """
    training = split == "train"
    key = "train_files" if training else "val_files"
    files = files if files is not None else getattr(data, key)
    if files is None:
        raise DataError(f"data.{key} is not set: give a parquet, jsonl or json file, an Arrow folder or a hub name")
    max_samples = data.train_max_samples if training else data.val_max_samples
    settings = PromptSettings.from_config(
        data,
        custom_chat_template=chat_template,
        seed=data.seed if data.seed is not None else resolve_seed(seed),
        shuffle=data.shuffle if training else data.validation_shuffle,
    )
    if data.custom_cls.path is None:
        return PromptDataset(files, tokenizer, settings, max_samples=max_samples, split=split, tools=tools)
    cls = load_dataset_class(data.custom_cls.path, data.custom_cls.name)
    inner = cls(data_files=files, tokenizer=tokenizer, config=data, processor=None, max_samples=max_samples)
    if isinstance(inner, PromptDataset):
        return inner
    template = PromptTemplate(
        tokenizer,
        mode=settings.template_mode,
        kwargs=settings.apply_chat_template_kwargs,
        chat_template=settings.custom_chat_template,
        tools=tools,
    )
    return CustomDataset(inner, template, settings)


def build_train_loader(
    dataset: RowSource,
    data: Data,
    *,
    epochs: int | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    collate: Collate = collate_prompts,
) -> PromptLoader:
    """The training loader.

    ``batch_size`` replaces ``data.train_batch_size``, ``seed`` serves where ``data.seed`` is null, ``collate`` makes
    batches of another frame than "prompt".
    """
    return PromptLoader(
        dataset,
        batch_size if batch_size is not None else data.train_batch_size,
        shuffle=data.shuffle,
        seed=data.seed if data.seed is not None else seed,
        last_batch=data.last_batch,  # type: ignore[arg-type]
        epochs=epochs,
        collate=collate,
    )
