"""Runs that learn from texts that are there: their data, and a validation that is a loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.config import Config
from verl.data import validation_batches
from verl.data.loader import Collate, RowSource
from verl.data.sampler import resolve_seed
from verl.data.sequence_settings import SequenceSettings
from verl.data.sequences import SequenceDataset
from verl.dataflow import Dataflow, FlowSet
from verl.errors import DataError
from verl.metrics import Metrics
from verl.trainer.build import Plan, begin, plan_of
from verl.trainer.evaluation import Evaluation
from verl.trainer.roles import Roles

LOSS = "val/loss"


def read_sequences(
    kind: type[SequenceDataset], config: Config, tokenizer: PreTrainedTokenizerBase, split: str, files: Any
) -> SequenceDataset:
    """The rows of ``files``, encoded. ``config`` is resolved."""
    data, training = config.data, split == "train"
    settings = SequenceSettings.from_config(
        data,
        custom_chat_template=config.actor_rollout_ref.model.custom_chat_template,
        seed=data.seed if data.seed is not None else resolve_seed(config.trainer.seed),
        shuffle=data.shuffle if training else data.validation_shuffle,
    )
    most = data.train_max_samples if training else data.val_max_samples
    return kind(files, tokenizer, settings, max_samples=most, split=split)


def prepare_sequences(
    config: Config, kind: type[SequenceDataset], collate: Callable[..., Any], *, train_rows: Any, validation_rows: Any
) -> Plan:
    """The plan of a run over a data set of the class ``kind``; ``collate(rows, uids, pad_id)`` makes its batches."""
    config, choice, tokenizer = begin(
        config, need_data=train_rows is None, has_validation=True if validation_rows is not None else None
    )
    files = train_rows if train_rows is not None else config.data.train_files
    if files is None:
        raise DataError("data.train_files is not set: give a parquet, jsonl or json file, a folder or a hub name")
    train = read_sequences(kind, config, tokenizer, "train", files)
    validation = None
    if validation_rows is not None or config.data.val_files:
        given = validation_rows if validation_rows is not None else config.data.val_files
        validation = read_sequences(kind, config, tokenizer, "validation", given)
    else:
        config.trainer.test_freq = -1  # a notice of validate() has said that it has no effect
    return plan_of(config, choice, tokenizer, train, validation, partial(collate, pad_id=int(tokenizer.pad_token_id)))


class LossEvaluation(Evaluation):
    """The flow ``validate`` over every validation row; its metrics begin with ``val/``, and ``val/loss`` is one."""

    def __init__(
        self,
        config: Config,
        roles: Roles,
        tokenizer: PreTrainedTokenizerBase,
        dataset: RowSource | None,
        flow: Dataflow,
        collate: Collate,
    ):
        super().__init__(config, roles, tokenizer, None)
        self.dataset, self.collate = dataset, collate
        if dataset is not None:
            self.flows["validate"] = flow

    def validate(self, flows: FlowSet, step: int) -> tuple[Metrics, list[dict[str, Any]]]:
        assert self.dataset is not None
        data, metrics = self.config.data, Metrics()
        batches = validation_batches(
            self.dataset, data.val_batch_size, shuffle=data.validation_shuffle, seed=data.seed, collate=self.collate
        )
        for batch in batches:
            metrics.merge(flows.run("validate", batch, step, self.config.trainer.executor).metrics)
        self._remember(metrics)
        return metrics, []

    def _remember(self, metrics: Metrics) -> None:
        """A lower loss is better, so the score is its negative."""
        name = self.config.trainer.best_metric or LOSS
        if name not in metrics:
            raise DataError(
                f"trainer.best_metric={name} is not among the validation metrics; there are {', '.join(metrics)}"
            )
        self.score = -metrics[name] if name.endswith("loss") else metrics[name]
        if self.on_score is not None:
            self.on_score(self.score)
