"""Assembling a run from its configuration, with every mistake that can be found early found before a model loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from verl.algorithms.registry import load_custom, registered_names
from verl.config import Config, fit_batch_to_rows, generates, max_sequence_length, resolve, validate
from verl.data import PromptLoader, build_prompt_dataset, build_train_loader
from verl.data.collate import collate_prompts
from verl.data.custom import LOOKED_AT
from verl.data.loader import Collate, RowSource
from verl.hardware import Choice
from verl.models.loading import load_config as load_model_config
from verl.models.loading import load_tokenizer
from verl.notices import notice
from verl.rollout.multi_turn import load_environment, schemas_of
from verl.trainer.groups import cluster_address, workers_choice
from verl.trainer.megatron_plan import check_megatron
from verl.trainer.placement import check_devices
from verl.trainer.rollout_split import check_rollout_split
from verl.trainer.settings import hardware_for, multi_turn_settings


@dataclass
class Plan:
    """What is known before any model is loaded."""

    config: Config
    choice: Choice
    tokenizer: PreTrainedTokenizerBase
    train: RowSource
    validation: RowSource | None
    loader: PromptLoader
    total_steps: int

    @property
    def prompt_columns(self) -> list[str]:
        return columns_of(self.train)


def columns_of(dataset: RowSource) -> list[str]:
    """Prompt columns that a batch of this dataset will have, besides its ids."""
    names: dict[str, None] = {}
    for position in range(min(len(dataset), LOOKED_AT)):
        names.update(dict.fromkeys(dataset[position]))
    return [name for name in names if name not in ("prompt_ids", "input_ids", "attention_mask", "position_ids", "uid")]


def prepare(config: Config, *, train_rows=None, validation_rows=None) -> Plan:
    """Check the configuration, look at the machine, read the data.

    Args:
        config: as loaded; a resolved copy is in the result.
        train_rows, validation_rows: rows in memory in place of ``data.train_files`` and ``data.val_files``.
    """
    config, choice, tokenizer = begin(
        config, need_data=train_rows is None, has_validation=True if validation_rows is not None else None
    )
    model = config.actor_rollout_ref.model
    options = {
        "seed": config.trainer.seed,
        "chat_template": model.custom_chat_template,
        "tools": tools_of(config),
    }
    train = build_prompt_dataset(config.data, tokenizer, "train", files=train_rows, **options)
    validation = None
    if validation_rows is not None or config.data.val_files:
        validation = build_prompt_dataset(config.data, tokenizer, "validation", files=validation_rows, **options)
    else:
        config.trainer.test_freq = -1  # a notice of validate() has said that it has no effect
    return plan_of(config, choice, tokenizer, train, validation)


def tools_of(config: Config) -> list[dict[str, Any]] | None:
    """What the chat template is told of the tools of a multi-turn run; None where there are none."""
    several = multi_turn_settings(config)
    return None if several is None else schemas_of(load_environment(several))


def begin(
    config: Config, *, need_data: bool, has_validation: bool | None
) -> tuple[Config, Choice, PreTrainedTokenizerBase]:
    """(resolved configuration, what this machine will use, tokenizer), with all that is wrong before data are read."""
    custom: tuple[str, ...] = ()
    if config.algorithm.custom_path:
        load_custom(config.algorithm.custom_path)
        custom = tuple(name for names in registered_names() for name in names)
    validate(
        config,
        need_data=need_data,
        custom_names=custom,
        has_validation=has_validation,
    )
    config = resolve(config)
    _seed(config)
    choice = hardware_for(config, workers_choice(config))
    check_devices(config, choice, cluster_address(config))
    model = config.actor_rollout_ref.model
    _tell_of_context(config)
    check_megatron(config)
    check_rollout_split(config, choice)
    tokenizer = load_tokenizer(
        config.actor_rollout_ref.model.tokenizer_path,
        trust_remote_code=model.trust_remote_code,
        chat_template=model.custom_chat_template,
    )
    return config, choice, tokenizer


def plan_of(
    config: Config,
    choice: Choice,
    tokenizer: PreTrainedTokenizerBase,
    train: RowSource,
    validation: RowSource | None,
    collate: Collate = collate_prompts,
) -> Plan:
    """The plan of a run over these data sets, with its loader."""
    config = resolve(fit_batch_to_rows(config, len(train)))
    steps = config.trainer.total_training_steps
    epochs = None if steps is not None else config.trainer.total_epochs
    loader = build_train_loader(train, config.data, epochs=epochs, seed=config.trainer.seed, collate=collate)
    total = steps if steps is not None else (loader.total_steps or 0)
    return Plan(config, choice, tokenizer, train, validation, loader, total)


def _tell_of_context(config: Config) -> None:
    """Find the model early, and say so if prompt and response may outgrow the context it was trained with."""
    model = config.actor_rollout_ref.model
    about = load_model_config(model.path, trust_remote_code=model.trust_remote_code, override=model.override_config)
    context = getattr(about.get_text_config(), "max_position_embeddings", None)
    longest = max_sequence_length(config)
    if isinstance(context, int) and longest > context:
        keys = "data.max_prompt_length + data.max_response_length" if generates(config) else "data.max_length"
        notice(
            f"{keys} is {longest}, more than the {context} positions that "
            "the model was made for: longer sequences are outside what it knows."
        )


def _seed(config: Config) -> None:
    """Seed torch's generators and, if asked for, allow only deterministic kernels."""
    torch.manual_seed(config.trainer.seed)
    if config.trainer.full_determinism:
        torch.use_deterministic_algorithms(True)
        notice("trainer.full_determinism: only deterministic kernels are used.")
