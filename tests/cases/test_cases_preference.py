"""Public cases B81 to B91 as far as the losses go: DPO and KTO values, masks, classes."""

from __future__ import annotations

import math

import pytest
import torch

from verl.algorithms.preference import (
    PairLogps,
    PairRows,
    PreferenceSettings,
    UnpairedLogps,
    pair_logps,
    pair_loss,
    preference_loss_names,
    prepare,
    sequence_logps,
    unpaired_loss,
    with_margin,
)
from verl.algorithms.token_metrics import token_metrics
from verl.errors import ConfigError
from verl.metrics import Metrics


def pairs(chosen, rejected, ref_chosen=0.0, ref_rejected=0.0):
    return PairLogps(*(torch.tensor([float(x)]) for x in (chosen, rejected, ref_chosen, ref_rejected)))


def labelled(ratios, labels, kl=0.0):
    """Rows with these log-ratios; the mismatched responses have the mean log-ratio ``kl``."""
    zeros = torch.zeros(len(ratios))
    return UnpairedLogps(torch.tensor(ratios), zeros, torch.tensor(labels, dtype=torch.bool), zeros + kl, zeros)


def kto(ratios, labels, kl=0.0, rows=None, **settings):
    x, s = labelled(ratios, labels, kl), PreferenceSettings(loss_type="kto", **settings)
    stats, _ = prepare(x, s)
    return unpaired_loss(x, s, stats, rows)


def test_B81_a_mean_over_completion_tokens_whatever_the_padding():
    mask, values = torch.tensor([[1, 1, 0]]), torch.tensor([[1.0, 3.0, float("nan")]])
    narrow = token_metrics(mask, {"logits/chosen": values})
    wide = token_metrics(
        torch.nn.functional.pad(mask, (0, 5)), {"logits/chosen": torch.nn.functional.pad(values, (0, 5), value=9e9)}
    )
    assert narrow["logits/chosen"] == wide["logits/chosen"] == 2.0
    other = Metrics()
    other.merge(narrow).merge(token_metrics(torch.ones(1, 1), {"logits/chosen": torch.tensor([[8.0]])}))
    assert other["logits/chosen"] == 4.0  # three tokens, not two batches


def test_B82_dpo_at_the_start_and_after():
    loss, metrics = pair_loss(pairs(-5.0, -7.0, -5.0, -7.0), PreferenceSettings())
    assert float(loss) == pytest.approx(math.log(2), abs=1e-4)
    for name in ("chosen", "rejected", "margins", "accuracies"):
        assert metrics[f"rewards/{name}"] == 0.0
    loss, metrics = pair_loss(pairs(2.0, -1.0), PreferenceSettings(beta=0.1))
    assert float(loss) == pytest.approx(0.55436, abs=1e-5)
    assert metrics["rewards/chosen"] == pytest.approx(0.2) and metrics["rewards/rejected"] == pytest.approx(-0.1)
    assert metrics["rewards/accuracies"] == 1.0


@pytest.mark.parametrize("garbage", [0.0, math.nan, 1e9])
def test_B83_only_completion_tokens_of_both_halves_count(garbage):
    mask = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 1, 0]])  # three prompt tokens, then completions
    policy = torch.tensor([[garbage] * 3 + [-1.0, -2.0], [garbage] * 3 + [-4.0, garbage]], requires_grad=True)
    reference = torch.full((2, 5), garbage)
    reference[0, 3:], reference[1, 3] = -1.5, -3.0
    rows = PairRows.of(["p", "p"], ["chosen", "rejected"])
    x = pair_logps(policy, reference, mask, rows)
    assert x.policy_chosen.tolist() == [-3.0] and x.policy_rejected.tolist() == [-4.0]
    assert x.ref_chosen.tolist() == [-3.0] and x.ref_rejected.tolist() == [-3.0]
    loss, _ = pair_loss(x, PreferenceSettings())
    loss.backward()
    assert loss.isfinite() and policy.grad.isfinite().all() and policy.grad[mask == 0].eq(0).all()
    assert policy.grad[0, 3:].lt(0).all() and policy.grad[1, 3] > 0


@pytest.mark.parametrize("beta", [0.0, -0.1, math.nan, math.inf])
@pytest.mark.parametrize("name", preference_loss_names())
def test_B87_beta_must_be_positive(name, beta):
    smoothing = {"label_smoothing": 0.1} if name == "exo_pair" else {}
    with pytest.raises(ConfigError, match="beta="):
        PreferenceSettings(loss_type=name, beta=beta, **smoothing)


@pytest.mark.parametrize("labels", [[True, True], [False, False]])
def test_B89_one_class_only_is_finite_and_the_other_is_left_out(labels):
    loss, metrics = kto([1.0, -2.0], labels, kl=0.3)
    assert loss.isfinite()
    present, absent = ("chosen", "rejected") if labels[0] else ("rejected", "chosen")
    assert f"rewards/{present}" in metrics and f"rewards/{absent}" not in metrics
    assert "rewards/margins" not in with_margin(metrics)
    loss, _ = kto([], [], kl=0.0)
    assert float(loss) == 0.0


def test_B89_means_of_a_class_are_by_its_count_over_the_window():
    window = Metrics()
    for ratios, labels in (([10.0], [True]), ([1.0, 2.0, 3.0, 4.0], [True, True, True, False])):
        window.merge(kto(ratios, labels)[1])
    assert window["rewards/chosen"] == pytest.approx(0.1 * (10 + 1 + 2 + 3) / 4)
    assert with_margin(window)["rewards/margins"] == pytest.approx(0.4 - 0.4)


def test_B91_kto_values():
    for ratio, label in ((2.0, True), (-1.0, False)):
        loss, metrics = kto([ratio], [label], kl=0.5)
        assert float(loss) == pytest.approx(1 - 1 / (1 + math.exp(-0.15)), abs=1e-5) == pytest.approx(0.46257, abs=1e-5)
        assert metrics["kl"] == 0.5
    assert float(kto([0.0, 0.0], [True, False])[0]) == pytest.approx(0.5)
    assert kto([0.0], [True], kl=-3.0)[1]["kl"] == 0.0  # never below 0
    weighted, _ = kto([0.0, 0.0], [True, False], desirable_weight=2.0, undesirable_weight=0.5)
    assert float(weighted) == pytest.approx((2.0 * 0.5 + 0.5 * 0.5) / 2)
    share, _ = kto([0.0], [True], rows=4)
    assert float(share) == pytest.approx(0.5 / 4)  # the mean is over the rows of the global batch
    x = UnpairedLogps(*(torch.tensor([v], requires_grad=True) for v in (1.0, 0.0)), torch.tensor([True]),
                      *(torch.tensor([v], requires_grad=True) for v in (0.7, 0.2)))  # fmt: skip
    stats, _ = prepare(x, PreferenceSettings(loss_type="kto"))
    assert not stats["kl"].requires_grad and float(stats["kl"]) == pytest.approx(0.5)


def test_B83_sums_do_not_depend_on_padding():
    log_probs, mask = torch.tensor([[-1.0, -2.0]]), torch.tensor([[1, 1]])
    wide = sequence_logps(
        torch.nn.functional.pad(log_probs, (3, 2), value=math.nan), torch.nn.functional.pad(mask, (3, 2))
    )
    assert torch.equal(wide, sequence_logps(log_probs, mask))


def test_B81_the_trainers_own_logps_do_not_depend_on_the_padding(tiny_model_dir, tmp_path):
    """A whole DPO step over pairs, with a pair that is much longer beside them or not: of the pairs that both runs
    have, the sums of log-probs are those of the text alone."""
    from learning_helpers import make_learner, pairs
    from tiny_models import make_tokenizer
    from transformers import AutoModelForCausalLM

    network, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model_dir), make_tokenizer()

    def own(row, side):
        before = tokenizer(row["prompt"]).input_ids
        ids = torch.tensor([[*before, *tokenizer(row[side]).input_ids, tokenizer.eos_token_id]])
        with torch.no_grad():
            log_probs = network(ids).logits[0, :-1].log_softmax(-1)
        return float(log_probs.gather(-1, ids[0, 1:, None])[len(before) - 1 :].sum())

    narrow = pairs(3)
    wide = [*pairs(3), {"prompt": "9" * 40, "chosen": "1" * 30, "rejected": "2" * 45}]
    for name, rows in (("narrow", narrow), ("wide", wide)):
        trainer = make_learner(
            tiny_model_dir, tmp_path / name, "dpo", rows, trainer__total_training_steps=1,
            data__train_batch_size=len(rows),
        )  # fmt: skip
        metrics = trainer.fit()
        for side in ("chosen", "rejected"):
            right = sum(own(row, side) for row in rows) / len(rows)
            assert metrics[f"logps/{side}"] == pytest.approx(right, rel=1e-5)
