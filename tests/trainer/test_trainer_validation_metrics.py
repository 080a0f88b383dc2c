"""Validation numbers: by hand, against enumeration of all draws, and their invariances."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.metrics import Metrics
from verl.trainer.validation_metrics import headline, majority_of_k, validation_metrics


def row(uid: str, score: float, /, source: str = "gsm8k", valid: bool = True, **extra):
    return {"uid": uid, "data_source": source, "score": score, "valid": valid, "extra": extra}


def numbers(*rows) -> dict[str, float]:
    return validation_metrics(rows).results()


def test_one_sample_a_prompt():
    assert numbers(row("a", 1.0), row("b", 0.0)) == {
        "val-core/gsm8k/reward/mean@1": 0.5,
        "val-aux/gsm8k/rows": 2,
        "val-aux/gsm8k/failed": 0,
    }


def test_equal_texts_asked_twice_are_two_prompts():
    """The uid tells draws apart; the text is not looked at."""
    found = numbers(row("draw-1", 1.0, prompt="2+2?"), row("draw-2", 0.0, prompt="2+2?"))
    assert found["val-core/gsm8k/reward/mean@1"] == 0.5 and not any("@2" in name for name in found)


def test_one_correct_of_four():
    found = numbers(*[row("a", float(i == 0), acc=i == 0) for i in range(4)])
    assert found["val-core/gsm8k/acc/mean@4"] == 0.25
    assert found["val-core/gsm8k/acc/best@4/mean"] == 1.0
    assert found["val-aux/gsm8k/acc/best@2/mean"] == pytest.approx(0.5)
    assert found["val-aux/gsm8k/acc/worst@4/mean"] == 0.0
    assert found["val-aux/gsm8k/acc/std@4"] == pytest.approx(math.sqrt(3) / 4)
    assert found["val-aux/gsm8k/reward/mean@4"] == 0.25  # with an accuracy, the reward is not the core
    assert {name for name in found if name.startswith("val-core")} == {
        "val-core/gsm8k/acc/mean@4",
        "val-core/gsm8k/acc/best@4/mean",
    }


def test_majority_of_three():
    found = numbers(
        row("a", 1.0, acc=1.0, pred="42"), row("a", 1.0, acc=1.0, pred="42"), row("a", 0.0, acc=0.0, pred="41")
    )
    assert found["val-core/gsm8k/acc/maj@3/mean"] == 1.0
    assert found["val-aux/gsm8k/acc/maj@2/mean"] == pytest.approx(1 / 3 + 2 / 3 * 0.5)
    assert not any("/pred/" in name for name in found)


def test_no_vote_without_every_answer():
    found = numbers(row("a", 1.0, pred="1"), row("a", 1.0, pred=None))
    assert not any("maj@" in name for name in found)


def test_powers_of_two_below_the_number_of_samples():
    found = numbers(*[row("a", float(i)) for i in range(6)])
    assert {name.rsplit("/", 2)[1] for name in found if "best@" in name} == {"best@2", "best@4", "best@6"}


def test_failed_rows_are_counted_and_left_out():
    good = [row("a", 1.0), row("a", 0.0), row("a", 1.0), row("b", 0.0), row("b", 0.0), row("b", 0.0)]
    failed = [row("a", 0.0, valid=False, acc=5.0), row("b", 99.0, valid=False)]
    found = numbers(*good, *failed)
    assert found["val-aux/gsm8k/failed"] == 2 and found["val-aux/gsm8k/rows"] == 6
    assert found["val-core/gsm8k/reward/mean@4"] == pytest.approx(1 / 3)
    assert found["val-aux/gsm8k/reward/best@2/mean"] == pytest.approx(0.5)
    assert not any("best@4" in name or "best@3" in name or "/acc/" in name for name in found)


def test_a_source_whose_rewards_all_failed():
    found = validation_metrics([row("a", 0.0, valid=False), row("b", 1.0, source="math")])
    assert found.results() == {
        "val-aux/gsm8k/rows": 0,
        "val-aux/gsm8k/failed": 1,
        "val-core/math/reward/mean@1": 1.0,
        "val-aux/math/rows": 1,
        "val-aux/math/failed": 0,
    }
    assert headline(found) == 1.0


def test_other_values():
    found = numbers(
        row("a", 1.0, length=10, ok=True, why="text", missing=None, score=1.0, np_ok=np.bool_(True)),
        row("b", 0.0, length=np.float32(20), ok=False, why=3, list=[1], score=0.0, np_ok=np.int64(0)),
    )
    assert found["val-aux/gsm8k/length/mean@1"] == 15 and found["val-aux/gsm8k/ok/mean@1"] == 0.5
    assert found["val-aux/gsm8k/np_ok/mean@1"] == 0.5 and found["val-aux/gsm8k/score/mean@1"] == 0.5
    assert found["val-aux/gsm8k/why/mean@1"] == 3  # the only number among its values
    assert not any("missing" in name or "list" in name for name in found)


def test_the_reward_is_the_score_whatever_a_function_reports_under_that_name():
    assert numbers(row("a", 1.0, reward=7.0))["val-core/gsm8k/reward/mean@1"] == 1.0


def test_unequal_numbers_of_samples():
    found = numbers(row("a", 1.0), row("b", 0.0), row("b", 0.0))
    assert found["val-core/gsm8k/reward/mean@2"] == 0.0 and found["val-aux/gsm8k/reward/mean@1"] == 1.0


def test_sources_apart():
    found = numbers(row("a", 1.0, source="openai/gsm8k"), row("a", 0.0, source="math"))
    assert found["val-core/openai/gsm8k/reward/mean@1"] == 1.0 and found["val-core/math/reward/mean@1"] == 0.0


def test_nothing():
    assert len(validation_metrics([])) == 0 and headline({}) is None
    assert headline(validation_metrics([row("a", 1.0, valid=False)])) is None


def test_headline_weighs_sources_by_rows():
    rows = [row(f"a{i}", 1.0, source="a/b") for i in range(3)] + [row("b", 0.0, source="a", acc=0.5)]
    metrics = validation_metrics(rows)
    assert headline(metrics) == pytest.approx((3 * 1.0 + 0.5) / 4)
    assert headline(metrics.results()) == headline(metrics)  # as read from a file
    assert headline({**metrics.results(), "val-core/a/acc/best@1/mean": 9.0, "actor/lr": 3.0}) == headline(metrics)


def test_merging_parts_equals_the_whole():
    rows = [row(f"p{i // 2}", float(i % 3 == 0), acc=i % 3 == 0, pred=str(i % 3)) for i in range(12)]
    whole = validation_metrics(rows).results()
    parts = Metrics.merged([validation_metrics(rows[:4]), validation_metrics(rows[4:])]).results()
    assert parts == pytest.approx(whole)


scored = st.lists(st.tuples(st.sampled_from([0.0, 0.25, 1.0]), st.sampled_from("abcd")), min_size=1, max_size=7)


def winner_by_hand(draw) -> float:
    counts = Counter(vote for _, vote in draw)
    top = [vote for vote, count in counts.items() if count == max(counts.values())]
    means = [np.mean([value for value, other in draw if other == vote]) for vote in top]
    return float(np.mean(means))


@given(scored, st.data())
def test_majority_equals_the_mean_over_all_draws(pairs, data):
    k = data.draw(st.integers(1, len(pairs)))
    by_hand = np.mean([winner_by_hand(draw) for draw in combinations(pairs, k)])
    assert majority_of_k(pairs, k) == pytest.approx(by_hand)


@given(scored)
def test_majority_of_one_is_the_mean(pairs):
    assert majority_of_k(pairs, 1) == pytest.approx(np.mean([value for value, _ in pairs]))


def test_a_vote_among_many_samples_is_quick_and_sure():
    pairs = [(1.0, "right")] * 24 + [(0.0, f"wrong {i % 13}") for i in range(40)]
    assert majority_of_k(pairs, 64) == 1.0
    assert 0.9 < majority_of_k(pairs, 32) < 1.0
    assert majority_of_k(pairs, 1) == pytest.approx(24 / 64)


@given(st.permutations(range(12)))
def test_the_order_of_rows_does_not_matter(order):
    generator = random.Random(0)
    rows = [row(f"p{i % 3}", generator.random(), acc=generator.random(), pred=str(i % 2)) for i in range(12)]
    shuffled = validation_metrics([rows[i] for i in order]).results()
    assert shuffled == pytest.approx(validation_metrics(rows).results())
