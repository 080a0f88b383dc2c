"""Reward models: trained, saved, and used to train a policy."""

from __future__ import annotations

import json
import math

import pytest
import torch
from learning_helpers import assert_equal, make_learner, pairs, two_ranks, weights
from tiny_models import make_tokenizer, save_tiny_model
from trainer_helpers import SETTINGS
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from verl.config import load_config
from verl.data import arithmetic_task
from verl.errors import ConfigError, DataError
from verl.trainer.base import Trainer
from verl.workers.reward_scorer import RewardModel

SGD = {"actor_rollout_ref__actor__optim__optimizer": "SGD", "actor_rollout_ref__actor__optim__weight_decay": 0.0}
MICRO = "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def chats(count: int = 8) -> list[dict]:
    """The pairs as conversations."""
    return [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            **{side: [{"role": "assistant", "content": row[side]}] for side in ("chosen", "rejected")},
        }
        for row in pairs(count)
    ]


@pytest.mark.parametrize("rows", [pairs(), chats()], ids=["texts", "conversations"])
def test_it_learns_is_saved_and_scores_the_same(model, tmp_path, rows):
    trainer = make_learner(
        model, tmp_path, "rm", rows, validation=rows, trainer__total_training_steps=12, trainer__test_freq=12,
        trainer__save_final=True, actor_rollout_ref__actor__optim__lr=3e-3,
    )  # fmt: skip
    metrics = trainer.fit()
    assert metrics["val/rewards/accuracies"] == 1.0 and metrics["val/loss"] < 0.4
    folder = tmp_path / "actor" / "global_step_12"
    saved = AutoModelForSequenceClassification.from_pretrained(folder)
    assert saved.config.num_labels == 1 and saved.config.pad_token_id == 0
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = []
    for row in rows:
        for side in ("chosen", "rejected"):
            if isinstance(row["prompt"], str):
                text = row["prompt"] + row[side]
            else:
                text = tokenizer.apply_chat_template([*row["prompt"], *row[side]], tokenize=False)
            with torch.no_grad():
                expected.append(float(saved(**tokenizer(text, return_tensors="pt")).logits[0, 0]))
    chosen, rejected = expected[0::2], expected[1::2]
    assert sum(chosen) / len(chosen) == pytest.approx(metrics["val/rewards/chosen"], abs=2e-5)
    assert sum(rejected) / len(rejected) == pytest.approx(metrics["val/rewards/rejected"], abs=2e-5)
    scorer = RewardModel(str(folder), normalize="none", rows=3)
    answers = [row["chosen"] if isinstance(row["chosen"], str) else row["chosen"][0]["content"] for row in rows]
    scores = scorer({"raw_prompt": [r["prompt"] for r in rows], "prompts": ["?"] * len(rows), "responses": answers})
    assert scores == pytest.approx(chosen, abs=2e-5)


def test_a_pad_token_that_is_also_eos_is_trained_where_it_is_scored(tmp_path):
    folder = save_tiny_model(tmp_path / "model", pad_token_id=1)
    tokenizer = make_tokenizer()
    tokenizer.pad_token = "<eos>"
    tokenizer.save_pretrained(folder)
    trainer = make_learner(
        folder, tmp_path / "run", "rm", pairs(), validation=pairs(), trainer__test_freq=3, trainer__save_final=True
    )
    metrics = trainer.fit()
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "actor" / "global_step_3")
    with torch.no_grad():
        scores = [
            float(saved(**tokenizer(row["prompt"] + row["chosen"], return_tensors="pt")).logits[0, 0])
            for row in pairs()
        ]
    assert sum(scores) / len(scores) == pytest.approx(metrics["val/rewards/chosen"], abs=2e-5)


def test_margin_and_centering_are_in_the_loss(model, tmp_path):
    first = {}
    for name, rows, settings in (
        ("plain", pairs(4), {}),
        ("margin", [{**row, "margin": 2.0} for row in pairs(4)], {}),
        ("centred", pairs(4), {"reward_model__center_rewards_coefficient": 0.5}),
    ):
        trainer = make_learner(
            model, tmp_path / name, "rm", rows, trainer__total_training_steps=2, data__shuffle=False, **settings
        )
        losses = []
        trainer.callbacks = (lambda _, metrics, losses=losses: losses.append(metrics["train/loss"]),)
        trainer.fit()
        first[name] = losses
    # a fresh head scores everything 0: log 2, and -log s(-2) with a margin of 2; centering costs nothing there
    assert first["plain"][0] == pytest.approx(math.log(2), abs=1e-6)
    assert first["margin"][0] == pytest.approx(math.log(1 + math.exp(2.0)), abs=1e-5)
    assert first["centred"][0] == pytest.approx(math.log(2), abs=1e-6)
    assert first["centred"][1] > first["plain"][1]


def test_micro_batches_and_ranks_change_nothing(model, tmp_path, monkeypatch):
    runs = {}
    for name, settings in (("whole", {}), ("cut", {MICRO: 1}), ("two", {})):
        if name == "two":
            two_ranks(monkeypatch)
        trainer = make_learner(model, tmp_path / name, "rm", pairs(), stays_open=True, **SGD, **settings)
        metrics = trainer.fit()
        runs[name] = (metrics, weights(trainer))
        trainer.close()
    for name in ("cut", "two"):
        assert runs[name][0]["train/loss"] == pytest.approx(runs["whole"][0]["train/loss"], rel=1e-5)
        assert_equal(runs[name][1], runs["whole"][1], 2e-6)


def test_resuming_equals_never_having_stopped(model, tmp_path):
    settings = {"trainer__save_freq": 2, "trainer__total_training_steps": 4}
    whole = make_learner(model, tmp_path / "a", "rm", pairs(), **settings)
    whole.fit()
    half = make_learner(model, tmp_path / "b", "rm", pairs(), **settings)
    half.total_steps = 2
    half.fit()
    rest = make_learner(model, tmp_path / "b", "rm", pairs(), **settings)
    assert rest.global_steps == 2
    rest.fit()
    assert_equal(weights(whole), weights(rest))


@pytest.mark.parametrize("margin", ["much", None, True, float("nan")])
def test_a_margin_that_is_no_number_names_the_row(model, tmp_path, margin):
    rows = [{**row, "margin": 1.0} for row in pairs(4)]
    rows[2]["margin"] = margin
    with pytest.raises(DataError, match=r"row 2: margin must be a number"):
        make_learner(model, tmp_path, "rm", rows)


@pytest.mark.parametrize("normalize", ["none", "sigmoid"])
def test_ppo_is_scored_by_it(model, tmp_path, normalize):
    make_learner(model, tmp_path / "rm", "rm", pairs(), trainer__save_final=True).fit()
    folder = tmp_path / "rm" / "actor" / "global_step_3"
    values = {
        **SETTINGS,
        "algorithm.name": "ppo",
        "actor_rollout_ref.model.path": str(model),
        "trainer.default_local_dir": str(tmp_path / "ppo"),
        "reward_model.enable": True,
        "reward_model.model.path": str(folder),
        "reward_model.normalize": normalize,
    }
    trainer = Trainer(load_config(values=values), train_rows=arithmetic_task("train", 5))
    assert isinstance(trainer.roles.reward.function.fn, RewardModel)
    metrics = trainer.fit()
    low, high = metrics["critic/score/min"], metrics["critic/score/max"]
    assert low < high and metrics["reward/failed"] == 0
    assert (low > 0.4 and high < 0.6) == (normalize == "sigmoid")  # the scores themselves are around 0


def test_contradictions_are_told(model, tmp_path):
    with pytest.raises(ConfigError, match=r"reward_model.model.path"):
        make_learner(model, tmp_path, "ppo", arithmetic_task("train", 5), reward_model__enable=True)
    quantised = {"actor_rollout_ref__model__quantization": "int8", "actor_rollout_ref__model__lora_rank": 4}
    with pytest.raises(ConfigError, match="the base of a reward model is not quantised here"):
        make_learner(model, tmp_path, "rm", pairs(), **quantised)


def test_adapters_and_the_head_are_trained_saved_and_resumed(model, tmp_path):
    """The export is the merged model; base and adapter in peft score the same; the base has not moved."""
    from peft import PeftModel

    settings = {"actor_rollout_ref__model__lora_rank": 4, "trainer__save_final": True}
    trainer = make_learner(model, tmp_path / "run", "rm", pairs(), trainer__total_training_steps=2, **settings)
    before = weights(trainer)
    assert trainer.fit()["actor/grad_norm"] > 0
    moved = {name for name, value in weights(trainer).items() if not torch.equal(value, before[name])}
    assert "live/model.score.weight" in moved and any("lora_B" in name for name in moved)
    assert all(".lora_" in name or "score" in name for name in moved)
    folder = tmp_path / "run" / "global_step_2" / "actor"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(["1+1=2", "3+4=8, or so"], return_tensors="pt", padding=True)
    merged = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    base.config.pad_token_id = merged.config.pad_token_id
    adapted = PeftModel.from_pretrained(base, folder / "lora_adapter")
    with torch.no_grad():
        scores = merged(**ids).logits
        torch.testing.assert_close(adapted(**ids).logits, scores, atol=1e-5, rtol=1e-4)
    assert scores.abs().max() > 0
    straight = make_learner(model, tmp_path / "straight", "rm", pairs(), **settings)
    again = make_learner(model, tmp_path / "run", "rm", pairs(), **settings)
    assert again.global_steps == 2
    for each in (straight, again):
        each.fit()
    assert straight.global_steps == again.global_steps == 3
    assert_equal(weights(straight), weights(again))
    place = {"actor_rollout_ref__model__lora_adapter_path": str(folder / "lora_adapter")}
    from_adapter = make_learner(model, tmp_path / "next", "rm", pairs(), **place)
    start = weights(from_adapter)
    from_adapter.close()
    for name in moved:
        saved = trainer.roles.actor.state_dict()[name]
        torch.testing.assert_close(start[name], saved, rtol=0, atol=0)


def test_texts_are_templated_where_the_policy_templates_them(model, tmp_path):
    make_learner(
        model, tmp_path, "rm", pairs(), data__apply_chat_template="true", trainer__save_final=True,
        trainer__total_training_steps=1,
    ).fit()  # fmt: skip
    folder = str(tmp_path / "actor" / "global_step_1")
    scorer = RewardModel(folder, template_texts=True)
    text = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    assert scorer.tokenizer.decode(scorer.encode("1+1=", "?", "2")) == text
    assert scorer.tokenizer.decode(RewardModel(folder).encode("1+1=", "?", "2")) == "1+1=2"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_margin_that_one_file_has_counts_in_its_rows(model, tmp_path, order):
    files = []
    for number, extra in enumerate(({}, {"margin": 2.0})):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(json.dumps({**row, **extra}) + "\n" for row in pairs(4)))
        files.append(str(path))
    expected = [math.log(2), math.log(1 + math.exp(2.0))]
    trainer = make_learner(
        model, tmp_path / "run", "rm", None, data__train_files=[files[i] for i in order], data__shuffle=False,
        trainer__total_training_steps=2, actor_rollout_ref__actor__optim__lr=1e-9,
    )  # fmt: skip
    losses = []
    trainer.callbacks = (lambda _, metrics: losses.append(metrics["train/loss"]),)
    trainer.fit()
    assert losses == pytest.approx([expected[i] for i in order], abs=1e-4)
