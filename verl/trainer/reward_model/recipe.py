"""Training a reward model, as the loop needs it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.config import Config, micro_batching
from verl.data import PreferenceDataset
from verl.data.conversation import ConversationTemplate, Encoded, RowProblem
from verl.data.messages import Message, Prompt
from verl.data.rows import Part, Row
from verl.dataflow import Dataflow
from verl.dataflow.executor import StepResult
from verl.protocol import DataProto
from verl.trainer.build import Plan
from verl.trainer.evaluation import Evaluation
from verl.trainer.groups import external_libraries, import_libraries, make_group
from verl.trainer.preference.recipe import collate as collate_pair_rows
from verl.trainer.preference.recipe import pair_tokens
from verl.trainer.recipe import Recipe, Source
from verl.trainer.reward_model import RewardModelRoles, bradley_terry, reward_model_validation
from verl.trainer.sequences import LossEvaluation, prepare_sequences
from verl.trainer.settings import optimizer_of, parallel_of, planned_cut, policy_of
from verl.workers.reward_model import RewardModelLearner, RewardModelSettings

MARGIN = "margin"


class WholeTemplate(ConversationTemplate):
    """What a reward model is given to score: a conversation up to the last character of its template, or a text as the
    tokenizer gives it, with an end only where that adds one."""

    def encode_completion(
        self, prompt: Prompt, completion: str | list[Message], where: str, *, tools: Sequence[Any] | None = None
    ) -> Encoded:
        ids, mask = super().encode_completion(prompt, completion, where, tools=tools)
        if isinstance(prompt, str) and isinstance(completion, str) and self.prompts.mode is not True:
            ended = list(self.tokenizer(prompt + completion)["input_ids"])[-1:] == [self.tokenizer.eos_token_id]
            return (ids, mask) if ended else (ids[:-1], mask[:-1])
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        messages += [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        if not self.templates_messages:
            return ids, mask
        kwargs = dict(self._kwargs) if not tools else {**self._kwargs, "tools": list(tools)}
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
        whole = np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=ids.dtype)
        if not np.array_equal(whole[: len(ids)], ids):
            return ids, mask  # cut at the border of prompt and answer, or closed with an eos: it ends as it is
        return whole, np.concatenate([mask, np.zeros(len(whole) - len(ids), dtype=bool)])


class MarginDataset(PreferenceDataset):
    """Pairs, with an optional column ``margin``: by how much the chosen answer is better."""

    template_class = WholeTemplate

    def encode_row(self, row: Row, part: Part, where: str) -> Row:
        if MARGIN in part.columns:
            margin = row.get(MARGIN)
            number = isinstance(margin, int | float | np.number) and not isinstance(margin, bool)
            if not number or not math.isfinite(margin):
                raise RowProblem("margin not a number", f"{where}: margin must be a number, got {margin!r}")
        return super().encode_row(row, part, where)


def collate(rows: Sequence[Row], uids: Sequence[str], pad_id: int) -> DataProto:
    """Rows of frame "pair", with the tensor ``margin`` (B,): 0 where a row's file has no such column."""
    margins = [float(row.get(MARGIN) or 0.0) for row in rows]
    plain = [{name: value for name, value in row.items() if name != MARGIN} for row in rows]
    batch = collate_pair_rows(plain, uids, pad_id)
    batch.batch[MARGIN] = torch.tensor(margins)
    return batch


class RewardModels(Recipe):
    """One role: a sequence-classification model, which is called the actor because it is what is trained."""

    def __init__(self, config: Config, *, train_rows: Any = None):
        self.config = config

    def prepare(self, config: Config, *, train_rows: Any = None, validation_rows: Any = None) -> Plan:
        return prepare_sequences(config, MarginDataset, collate, train_rows=train_rows, validation_rows=validation_rows)

    def roles(self, plan: Plan) -> Any:
        config, parts = plan.config, plan.config.actor_rollout_ref
        import_libraries(external_libraries(config))
        settings = RewardModelSettings(
            model=policy_of(parts.model, plan.choice, config),
            optimizer=optimizer_of(
                parts.actor.optim, config, plan.choice, total_steps=plan.total_steps, grad_clip=parts.actor.grad_clip
            ),
            center=config.reward_model.center_rewards_coefficient,
            tokenizer_path=parts.model.tokenizer_path,
            chat_template=parts.model.custom_chat_template,
            update_cut=planned_cut(micro_batching(config, "actor"), config, plan.choice),
            forward_cut=planned_cut(micro_batching(config, "old_log_prob"), config, plan.choice),
            parallel=parallel_of(parts.actor, "actor_rollout_ref.actor"),
        )
        actor = make_group(config, "actor", RewardModelLearner, settings)
        return RewardModelRoles(actor, Path(config.trainer.default_local_dir))

    def flows(self, plan: Plan, roles: Any, source: Source) -> Sequence[Dataflow]:
        return [bradley_terry(roles, plan.config)]

    def evaluation(self, plan: Plan, roles: Any) -> Evaluation:
        flow = reward_model_validation(roles, plan.config)
        return LossEvaluation(plan.config, roles, plan.tokenizer, plan.validation, flow, plan.loader.collate)

    def tokens(self, result: StepResult) -> tuple[int, int]:
        return pair_tokens(result)
