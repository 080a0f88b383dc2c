"""DPO and its family end to end on a tiny model."""

from __future__ import annotations

import math

import pytest
import torch
from learning_helpers import answers, assert_equal, make_learner, pairs, two_ranks, weights
from tiny_models import make_tokenizer, sample_batch, save_tiny_model
from transformers import AutoModelForCausalLM

from verl.config.names import PAIR_LOSSES, REFERENCE_FREE
from verl.errors import CheckpointError, ConfigError, DataError, ModelError, TrainingError
from verl.models.squared_probs import log_probs_and_squares
from verl.notices import seen
from verl.train_engine.memory import MemoryShortageError

SGD = {"actor_rollout_ref__actor__optim__optimizer": "SGD", "actor_rollout_ref__actor__optim__weight_decay": 0.0}
NEEDS = {"exo_pair": {"preference__label_smoothing": 0.01}}
MICRO = "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("other"), seed=7)


def sums(network, rows) -> dict[str, torch.Tensor]:
    """(B,) summed log-probs of both sides, one plain forward pass a text."""
    tokenizer = make_tokenizer()
    found: dict[str, list[torch.Tensor]] = {"chosen": [], "rejected": []}
    for row in rows:
        for side in found:
            before = tokenizer(row["prompt"]).input_ids
            ids = torch.tensor([[*before, *tokenizer(row[side]).input_ids, tokenizer.eos_token_id]])
            log_probs = network(ids).logits[0, :-1].float().log_softmax(-1)
            picked = log_probs.gather(-1, ids[0, 1:, None])[:, 0]
            found[side].append(picked[len(before) - 1 :].sum())
    return {side: torch.stack(values) for side, values in found.items()}


def test_a_step_is_that_of_a_plain_implementation(model, other, tmp_path):
    rows = pairs(4)
    settings = {**SGD, "actor_rollout_ref__actor__grad_clip": 0, "preference__ref_model_path": str(other)}
    trainer = make_learner(model, tmp_path, "dpo", rows, trainer__total_training_steps=1, **settings)
    metrics = trainer.fit()
    network, reference = (AutoModelForCausalLM.from_pretrained(path) for path in (model, other))
    policy, frozen = sums(network, rows), {k: v.detach() for k, v in sums(reference, rows).items()}
    margin = 0.1 * ((policy["chosen"] - frozen["chosen"]) - (policy["rejected"] - frozen["rejected"]))
    loss = -torch.nn.functional.logsigmoid(margin).mean()
    loss.backward()
    assert metrics["train/loss"] == pytest.approx(float(loss), rel=1e-5)
    assert metrics["rewards/margins"] == pytest.approx(float(margin.mean()), rel=1e-4)
    assert metrics["logps/chosen"] == pytest.approx(float(policy["chosen"].mean()), rel=1e-5)
    after = weights(trainer)
    for name, p in network.named_parameters():
        assert torch.allclose(after[f"live/{name}"], p.detach() - 1e-3 * p.grad, atol=1e-6), name


@pytest.mark.parametrize("loss", PAIR_LOSSES)
def test_every_loss_trains_and_micro_batches_change_nothing(model, tmp_path, loss):
    settings = {**SGD, **NEEDS.get(loss, {}), "preference__loss_type": loss, "trainer__total_training_steps": 2}
    whole = make_learner(model, tmp_path / "a", "dpo", pairs(), **settings)
    before = weights(whole)
    first = whole.fit()
    cut = make_learner(model, tmp_path / "b", "dpo", pairs(), **settings, **{MICRO: 1})
    second = cut.fit()
    assert math.isfinite(first["train/loss"]) and first["actor/grad_norm"] > 0
    assert first["train/loss"] == pytest.approx(second["train/loss"], rel=2e-5, abs=1e-6)
    assert any(not torch.equal(before[name], value) for name, value in weights(whole).items())
    assert_equal(weights(whole), weights(cut), 2e-6)
    assert (whole.roles.reference is None) == (loss in REFERENCE_FREE)


@pytest.mark.parametrize("loss", ["sigmoid", "aot", "aot_unpaired", "bco_pair", "simpo"])
def test_two_ranks_equal_one(model, tmp_path, monkeypatch, loss):
    settings = {**SGD, "preference__loss_type": loss, "data__train_batch_size": 7}
    one = make_learner(model, tmp_path / "a", "dpo", pairs(), **settings)
    first = one.fit()
    two_ranks(monkeypatch)
    two = make_learner(model, tmp_path / "b", "dpo", pairs(), stays_open=True, **settings)
    second = two.fit()
    for name in ("train/loss", "rewards/margins", "rewards/accuracies"):
        assert first[name] == pytest.approx(second[name], rel=1e-4, abs=1e-6), name
    assert_equal(weights(one), weights(two), 2e-6)
    two.close()


def test_mini_batches_are_whole_pairs(model, tmp_path):
    trainer = make_learner(
        model, tmp_path, "dpo", pairs(), actor_rollout_ref__actor__ppo_mini_batch_size=2, **{MICRO: 1}
    )
    seen_rows = []
    worker = trainer.roles.actor.workers[0]
    plain = worker._pair_loss
    worker._pair_loss = lambda micro, *rest: (
        seen_rows.append(list(micro.non_tensor_batch["sample_id"])),
        plain(micro, *rest),
    )[1]
    trainer.fit()
    assert len(seen_rows) == 3 * 4
    for chosen, rejected in seen_rows:
        assert chosen.removesuffix("/chosen") == rejected.removesuffix("/rejected")


def test_the_first_loss_is_log_2_whatever_gives_the_reference(model, tmp_path):
    for number, settings in enumerate(
        (
            {},
            {"preference__precompute_ref_log_probs": True},
            {"actor_rollout_ref__model__lora_rank": 4},
            {"actor_rollout_ref__model__lora_rank": 4, "preference__precompute_ref_log_probs": True},
        )
    ):
        trainer = make_learner(
            model, tmp_path / str(number), "dpo", pairs(), trainer__total_training_steps=1, **settings
        )
        assert trainer.fit()["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert (trainer.roles.reference is None) == bool(settings)


def test_precomputed_log_probs_train_the_same(model, tmp_path):
    asked = make_learner(model, tmp_path / "a", "dpo", pairs(), validation=pairs(3), trainer__test_freq=3, **SGD)
    first = asked.fit()
    known = make_learner(
        model, tmp_path / "b", "dpo", pairs(), validation=pairs(3), trainer__test_freq=3, **SGD,
        preference__precompute_ref_log_probs=True,
    )  # fmt: skip
    second = known.fit()
    assert first["val/loss"] == pytest.approx(second["val/loss"], rel=1e-5)
    assert_equal(weights(asked), weights(known), 1e-6)
    assert "ref_logp" not in [node.name for node in known.flows.flow("train", 1).nodes]


def test_rpo_weighting_and_lengths_change_the_loss(model, tmp_path):
    losses = {}
    for number, settings in enumerate(
        (
            {},
            {"preference__rpo_alpha": 1.0},
            {"preference__use_weighting": True},
            {"preference__length_normalize": True},
            {"preference__ld_alpha": 0.5},
        )
    ):
        trainer = make_learner(model, tmp_path / str(number), "dpo", pairs(), **settings)
        losses[next(iter(settings), "plain")] = trainer.fit()["train/loss"]
    assert len({round(value, 6) for value in losses.values()}) == len(losses), losses


def test_the_sum_of_squared_probabilities(model):
    network = AutoModelForCausalLM.from_pretrained(model)
    batch = sample_batch([([5, 6, 7], [8, 9], [1, 1]), ([5, 6, 7], [10, 11], [0, 1]), ([9], [9], [1])])
    with torch.no_grad():
        log_prob, squares = log_probs_and_squares(network, batch, temperature=0.7)
        for row, (prompt, response, place) in enumerate(
            (([5, 6, 7], [8, 9], 1), ([5, 6, 7], [10, 11], 1), ([9], [9], 0))
        ):
            logits = network(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) + place - 1] / 0.7
            p = logits.softmax(-1)
            assert float(squares[row, place]) == pytest.approx(float(p.square().sum().log()), abs=1e-5)
            assert float(log_prob[row, place]) == pytest.approx(float(p[response[place]].log()), abs=1e-5)


def test_the_reference_follows_the_policy(model, tmp_path):
    settings = {"preference__sync_ref_model": True, "preference__ref_model_sync_steps": 2, **SGD}
    trainer = make_learner(
        model, tmp_path, "dpo", pairs(), preference__ref_model_mixup_alpha=0.25, trainer__save_final=True, **settings
    )
    start = weights(trainer)
    second_step = {}
    trainer.callbacks = (lambda t, metrics: second_step.update(weights(t)) if t.global_steps == 2 else None,)
    trainer.fit()
    reference = trainer.roles.reference.state_dict()
    for name, value in reference.items():
        mixed = 0.25 * second_step[f"live/{name}"] + 0.75 * start[f"live/{name}"]
        assert torch.allclose(value, mixed, atol=1e-7), name
    assert (tmp_path / "reference" / "global_step_3").exists() or list(tmp_path.glob("**/reference"))


@pytest.mark.parametrize(
    "settings",
    [
        {"preference__loss_type": "bco_pair"},
        {"preference__sync_ref_model": True, "preference__ref_model_sync_steps": 1},
        {"actor_rollout_ref__model__lora_rank": 4},
    ],
)
def test_resuming_equals_never_having_stopped(model, tmp_path, settings):
    settings = {**settings, "trainer__save_freq": 2, "trainer__total_training_steps": 4}
    whole = make_learner(model, tmp_path / "a", "dpo", pairs(), **settings)
    whole.fit()
    half = make_learner(model, tmp_path / "b", "dpo", pairs(), **settings)
    half.total_steps = 2
    half.fit()
    rest = make_learner(model, tmp_path / "b", "dpo", pairs(), **settings)
    assert rest.global_steps == 2
    rest.fit()
    assert_equal(weights(whole), weights(rest))
    assert whole.roles.actor.preference_state() == rest.roles.actor.preference_state()


def test_padding_changes_nothing(model, tmp_path):
    """A row that is much longer widens the batch; the other pairs' metrics stay as they are."""
    rows = pairs(3)
    long = {"prompt": "9" * 40, "chosen": "1" * 30, "rejected": "2" * 50}
    losses = []
    for number, more in enumerate(([], [long])):
        trainer = make_learner(
            model, tmp_path / str(number), "dpo", [*rows, *more], validation=[*rows, *more], trainer__val_only=True,
            data__max_length=128, data__train_batch_size=3, preference__loss_type="simpo",
        )  # fmt: skip
        losses.append(trainer.fit()["val/loss"])
    alone = make_learner(
        model, tmp_path / "alone", "dpo", [*rows, long], validation=[long], trainer__val_only=True,
        data__max_length=128, data__train_batch_size=3, preference__loss_type="simpo",
    ).fit()["val/loss"]  # fmt: skip
    assert losses[1] == pytest.approx((3 * losses[0] + alone) / 4, rel=1e-5)


def test_it_learns_to_prefer(model, tmp_path):
    rows = pairs(4)
    trainer = make_learner(
        model, tmp_path, "dpo", rows, validation=rows, trainer__total_training_steps=20, trainer__test_freq=20
    )
    metrics = trainer.fit()
    assert metrics["val/rewards/accuracies"] == 1.0 and metrics["val/loss"] < 0.1


def test_prompts_without_pairs_and_without_a_reward_name_the_columns(model, tmp_path):
    with pytest.raises(DataError, match=r"no column 'chosen' and no column 'rejected'.*its columns are prompt.*reward"):
        make_learner(model, tmp_path, "dpo", [{"prompt": "1+1="}] * 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preference__loss_type": "simpo", "preference__sync_ref_model": True}, "has no reference"),
        (
            {"preference__label_smoothing": 0.1, "preference__loss_type": "hinge"},
            "preference.label_smoothing=0.1 has no",
        ),
        ({"preference__loss_type": "exo_pair"}, "label_smoothing=0"),
        ({"preference__loss_type": "sigmoyd"}, "sigmoid"),
        ({"preference__beta": 0}, "preference.beta"),
        ({"preference__sync_ref_model": True, "actor_rollout_ref__model__lora_rank": 4}, "reference of its own"),
        ({"preference__sync_ref_model": True, "preference__precompute_ref_log_probs": True}, "keep one"),
    ],
)
def test_settings_that_cannot_work_are_told_before_a_model_loads(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        make_learner(tmp_path, tmp_path / "run", "dpo", pairs(), **settings)


def test_keys_of_ppo_are_told_to_be_unused(model, tmp_path):
    make_learner(model, tmp_path, "dpo", pairs(), algorithm__gamma=0.99, algorithm__kl_penalty=0.3)
    told = " ".join(seen())
    assert "algorithm.gamma is given and not used by dpo" in told and "0.3 is the beta of dpo" in told


@pytest.mark.parametrize(
    "changes",
    [
        {"actor_rollout_ref__actor__use_dynamic_bsz": True, "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 40},
        {"actor_rollout_ref__model__attn_implementation": "eager"},
        {"trainer__executor": "serial"},
    ],
)
def test_budgets_padding_and_executors_change_nothing(model, tmp_path, changes):
    plain = make_learner(model, tmp_path / "a", "dpo", pairs(), **SGD)
    first = plain.fit()
    other_way = make_learner(model, tmp_path / "b", "dpo", pairs(), **SGD, **changes)
    second = other_way.fit()
    assert first["train/loss"] == pytest.approx(second["train/loss"], rel=1e-5)
    assert_equal(weights(plain), weights(other_way), 2e-6)


def test_memory_that_runs_out_cuts_between_pairs_and_ends_with_one(model, tmp_path):
    plain = make_learner(model, tmp_path / "a", "dpo", pairs(), trainer__total_training_steps=1, **SGD)
    plain.fit()
    sizes = []

    def run(folder: str, most: int):
        trainer = make_learner(model, tmp_path / folder, "dpo", pairs(), trainer__total_training_steps=1, **SGD)
        engine = trainer.roles.actor.workers[0].engine
        train_step = engine.train_step

        def short_of_memory(micros, loss_of):
            sizes.append([len(micro) for micro in micros])
            for number, micro in enumerate(micros):
                if len(micro) > most:
                    raise MemoryShortageError(number)
            return train_step(micros, loss_of)

        engine.train_step = short_of_memory
        trainer.fit()
        return trainer

    trainer = run("b", most=4)
    assert sizes[0] == [8] and all(size in (2, 4) for size in sizes[-1]) and sum(sizes[-1]) == 8
    assert_equal(weights(plain), weights(trainer), 2e-6)
    with pytest.raises(TrainingError, match="a single sequence"):
        run("c", most=1)


def test_the_temperature_of_sampling_is_not_in_the_loss(model, other, tmp_path):
    losses = [
        make_learner(
            model, tmp_path / str(temperature), "dpo", pairs(), trainer__total_training_steps=1,
            preference__ref_model_path=str(other), actor_rollout_ref__rollout__temperature=temperature,
        ).fit()["train/loss"]
        for temperature in (1.0, 0.5)
    ]  # fmt: skip
    assert losses[0] == losses[1] != pytest.approx(0.693147, abs=1e-3)


def test_resuming_from_a_run_without_preferences_says_so(model, tmp_path):
    make_learner(model, tmp_path, "sft", answers(), trainer__total_training_steps=1, trainer__save_final=True).fit()
    with pytest.raises(CheckpointError, match="was made by sft, and this run is dpo"):
        make_learner(model, tmp_path, "dpo", pairs())


@pytest.mark.parametrize(
    ("kind", "shape", "settings", "message"),
    [
        ("llama", {"vocab_size": 120}, {}, "has vocab_size=120 and the policy .* has 96"),
        ("llama", {"num_hidden_layers": 1}, {"preference__sync_ref_model": True}, "has num_hidden_layers=1"),
        ("qwen2", {}, {"preference__sync_ref_model": True}, "has model_type=qwen2"),
    ],
)
def test_a_reference_that_cannot_serve_is_refused(model, tmp_path, kind, shape, settings, message):
    path = str(save_tiny_model(tmp_path / "reference", kind, **shape))
    with pytest.raises(ModelError, match=message):
        make_learner(model, tmp_path / "run", "dpo", pairs(), preference__ref_model_path=path, **settings)


def test_adapters_cannot_be_followed(model, other, tmp_path):
    settings = {"preference__sync_ref_model": True, "actor_rollout_ref__model__lora_rank": 4}
    with pytest.raises(ConfigError, match="takes over all weights"):
        make_learner(model, tmp_path, "dpo", pairs(), preference__ref_model_path=str(other), **settings)
