"""Validation and previews: flows that generate and score, and write nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.config import Config
from verl.data import PromptDataset, collate_prompts, rows_from_prompts, validation_batches
from verl.data.loader import RowSource
from verl.dataflow import Dataflow, FlowSet
from verl.errors import DataError
from verl.metrics import Metrics
from verl.protocol import DataProto
from verl.tracking import dump_generations
from verl.trainer.build import columns_of, tools_of
from verl.trainer.ppo import preview_flow, validation_flow
from verl.trainer.roles import Roles
from verl.trainer.samples import decode_rows, ground_truths, prompt_values, row_scores, sample_rows
from verl.trainer.validation_metrics import headline, validation_metrics

Frames = dict[str, DataProto]


class Evaluation:
    """``score`` is the headline number of the last validation (or ``trainer.best_metric``), None before one."""

    def __init__(self, config: Config, roles: Roles, tokenizer: PreTrainedTokenizerBase, dataset: RowSource | None):
        self.config, self.tokenizer, self.dataset = config, tokenizer, dataset
        self.score: float | None = None
        self.on_score: Callable[[float | None], object] | None = None
        self.flows: dict[str, Dataflow] = {}
        if dataset is not None:
            self.flows["validate"] = validation_flow(roles, config, columns_of(dataset))
        self.prompts = self._preview_prompts()
        if self.prompts is not None:
            self.flows["preview"] = preview_flow(
                roles, config, [n for n in self.prompts.non_tensor_batch if n not in ("uid", "prompt_ids")]
            )

    def validate(self, flows: FlowSet, step: int) -> tuple[Metrics, list[dict[str, Any]]]:
        """Every validation row exactly once: the metrics, and ``trainer.log_val_generations`` rows to show."""
        assert self.dataset is not None
        rows: list[dict[str, Any]] = []
        shown: list[dict[str, Any]] = []
        wanted = self.config.trainer.log_val_generations
        data = self.config.data
        batches = validation_batches(self.dataset, data.val_batch_size, shuffle=data.validation_shuffle, seed=data.seed)
        texts: list[list[Any]] = [[], [], [], []]
        for batch in batches:
            frames = flows.run("validate", batch, step, self.config.trainer.executor).frames
            rows += self._scored_rows(frames)
            take = range(min(max(wanted - len(shown), 0), len(frames["sample"])))
            shown += sample_rows(frames, self.tokenizer, step=step, split="val", rows=take)
            if self.config.trainer.validation_data_dir:
                for column, more in zip(texts, self._texts(frames), strict=True):
                    column += more
        if self.config.trainer.validation_data_dir:
            dump_generations(self.config.trainer.validation_data_dir, step, *texts)
        metrics = validation_metrics(rows)
        self._remember(metrics)
        return metrics, shown

    def _scored_rows(self, frames: Frames) -> list[dict[str, Any]]:
        samples = frames["sample"]
        sources = prompt_values(frames, "data_source")
        extras = samples.non_tensor_batch["reward_extra_info"]
        return [
            {"uid": uid, "data_source": source, "score": score or 0.0, "valid": score is not None, "extra": extra or {}}
            for uid, source, score, extra in zip(
                samples.non_tensor_batch["uid"], sources, row_scores(samples), extras, strict=True
            )
        ]

    def _remember(self, metrics: Metrics) -> None:
        name = self.config.trainer.best_metric
        if name is not None and name not in metrics:
            raise DataError(
                f"trainer.best_metric={name} is not among the validation metrics; there are {', '.join(metrics)}"
            )
        self.score = metrics[name] if name is not None else headline(metrics)
        if self.on_score is not None:
            self.on_score(self.score)

    def preview(self, flows: FlowSet, step: int) -> list[dict[str, Any]]:
        """Answers to the user's own prompts (``trainer.sample_prompts``)."""
        assert self.prompts is not None
        frames = flows.run("preview", self.prompts, step, self.config.trainer.executor).frames
        return sample_rows(frames, self.tokenizer, step=step, split="preview", rows=range(len(frames["sample"])))

    def _preview_prompts(self) -> DataProto | None:
        prompts = self.config.trainer.sample_prompts
        if not prompts:
            return None
        if isinstance(prompts, str):
            try:
                with open(prompts, encoding="utf-8") as lines:
                    prompts = [line.rstrip("\n") for line in lines if line.strip()]
            except OSError as error:
                raise DataError(f"trainer.sample_prompts={prompts} cannot be read: {error.strerror}") from error
        dataset = PromptDataset(
            rows_from_prompts(prompts), self.tokenizer, self.config.data, tools=tools_of(self.config)
        )
        rows = [dataset[i] for i in range(len(dataset))]
        return collate_prompts(rows, [f"preview{i}" for i in range(len(rows))])

    def _texts(self, frames: Frames) -> tuple[list[Any], ...]:
        prompts, responses = decode_rows(frames["sample"], self.tokenizer)
        return prompts, responses, ground_truths(frames), row_scores(frames["sample"])

    def dump(self, frames: Frames, folder: str, step: int) -> None:
        """verl's dump of all rows of a step, ``{step}.jsonl``."""
        dump_generations(folder, step, *self._texts(frames))
