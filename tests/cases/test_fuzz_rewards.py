"""Reward functions of users: whatever they do, every row has its own score or a cause, and the runner goes on."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from cases_fuzz import fuzz, refused, texts, values
from hypothesis import given
from hypothesis import strategies as st
from rewards_batches import WordDecoder, sample_batch
from rewards_toys import misbehave

from verl.errors import RewardError
from verl.rewards import RewardRunner, default_compute_score, inspect_function, normalise_result
from verl.rewards.gsm8k import compute_score, extract_solution
from verl.rewards.math import extract_solution as extract_math


class Odd:
    def __float__(self):
        raise ValueError("no float of mine")

    def __repr__(self):
        return "x" * 10_000


rubbish = st.one_of(
    values,
    st.sampled_from(
        [Odd(), 10**400, Fraction(1, 3), 1 + 2j, b"1", {1}, math.nan, -math.inf, np.float16(1), np.bool_(True)]
    ),
    st.floats(width=32).map(np.float32),
    st.lists(st.floats(width=32), max_size=3).map(np.array),
    st.floats(width=32).map(torch.tensor),
    st.dictionaries(st.sampled_from(["score", "acc", "pred"]) | texts, values, max_size=3),
    st.tuples(st.floats(), values),
)


def number_of(value):
    """The score that a value means, by the rule of the documentation; None where it means none."""
    if isinstance(value, dict):
        value = value.get("score")
        if isinstance(value, dict):
            return number_of(value)
    if isinstance(value, (np.generic, np.ndarray, torch.Tensor)):
        value = value.item() if value.ndim == 0 else None
    if isinstance(value, Fraction):
        value = float(value)
    if not isinstance(value, (bool, int, float)) or value != value or abs(value) > 3.4e38:
        return None
    return float(value)


@given(value=rubbish)
@fuzz(300)
def test_any_returned_value_is_its_number_or_an_error(value):
    result = normalise_result(value)
    assert result.score == number_of(value)
    assert (result.score is None) == (value is None or result.error is not None)
    if result.error:
        assert len(result.error) < 1000


@given(drawn=st.lists(rubbish | st.floats(0, 1), min_size=1, max_size=5), extra=st.integers(-1, 1))
@fuzz(60)
def test_rows_of_a_batch_function_keep_their_own_scores(drawn, extra):
    returned = drawn[:extra] if extra < 0 else drawn + [1.0] * extra

    def judge(batch):
        return returned

    with RewardRunner(judge, WordDecoder()) as runner:
        result, message = refused(lambda: runner.score(sample_batch(["good"] * len(drawn))).result(timeout=60))
    if extra:
        assert message is not None and f"expected {len(drawn)}" in message
        return
    scores = result.batch["token_level_scores"].sum(1).tolist()
    for row, value in enumerate(drawn):
        right = number_of(value)
        assert bool(result.batch["score_valid"][row]) == (right is not None)
        assert scores[row] == pytest.approx(right or 0.0, rel=1e-6)
    assert torch.isfinite(result.batch["token_level_scores"]).all()


ACTS = ["", "sleep", "spin", "exit", "sys.exit", "segfault", "print", "fork", "unsendable", "recursion"]
RIGHT = {"", "print", "fork"}


@given(acts=st.permutations(ACTS))
@fuzz(1)
def test_functions_that_hang_crash_print_and_fork_cost_only_their_own_row(acts):
    batch = sample_batch(["good"] * len(acts), extra_info=[{"act": act} for act in acts])
    with RewardRunner(misbehave, WordDecoder(), num_workers=2, timeout_s=1.0) as runner:
        result = runner.score(batch).result(timeout=120)
    assert list(result.non_tensor_batch["uid"]) == list(batch.non_tensor_batch["uid"])
    for row, act in enumerate(acts):
        assert bool(result.batch["score_valid"][row]) == (act in RIGHT), act
        assert float(result.batch["token_level_scores"][row].sum()) == float(act in RIGHT)
        assert (result.non_tensor_batch["reward_error"][row] is None) == (act in RIGHT)
    metrics = result.meta_info["metrics"]
    assert metrics["reward/failed"] == len(acts) - len(RIGHT) and metrics["reward/timeouts"] == 2


names = st.sampled_from(
    ["solution_str", "ground_truth", "data_source", "extra_info", "batch", "solution_strs", "x", "self"]
)


@given(
    given_names=st.lists(names, max_size=4, unique=True),
    defaults=st.integers(0, 4),
    star=st.sampled_from(["", "*args", "**kwargs", "*args, **kwargs"]),
    kwargs=st.dictionaries(names, st.integers(), max_size=2),
)
@fuzz(150)
def test_any_signature_is_understood_or_refused_before_it_is_called(given_names, defaults, star, kwargs):
    plain = given_names[: max(len(given_names) - defaults, 0)]
    parameters = [*plain, *(f"{name}=None" for name in given_names[len(plain) :]), *([star] if star else [])]
    space: dict = {}
    exec(f"def judge({', '.join(parameters)}):\n    return 1.0", space)
    function, message = refused(lambda: inspect_function(space["judge"], kwargs))
    if function is None:
        assert "judge" in message
        return
    offered = {"row": dict.fromkeys(["data_source", "solution_str", "ground_truth", "extra_info"])}.get(
        function.style, {}
    )
    if function.style == "columns":
        offered = dict.fromkeys(["data_sources", "solution_strs", "ground_truths", "extra_infos"])
    first = (None,) if function.style == "view" else ()
    assert function.fn(*first, **{**function.accepted(offered), **function.kwargs}) == 1.0


numbers = st.integers(-(10**6), 10**6)
noise = st.text(alphabet=st.sampled_from("#$ .,-−*\\boxed{}:=\n0123456789abc%答"), max_size=30)


@given(number=numbers, before=noise.map(lambda t: t.replace("#", "")), after=st.text(alphabet="abc. \n", max_size=9))
@fuzz(150)
def test_gsm8k_finds_the_number_after_the_last_marker(number, before, after):
    shown = [str(number), f"{number:,}", f"{number}.0", f"{number}.00"]
    for text in shown + ([f"${number}"] if number >= 0 else []):
        answer = f"{before}#### {text}{' ' + after if after else ''}"
        assert compute_score(answer, str(number)) == 1.0, answer
        assert compute_score(answer, f"{number:,}") == 1.0
        assert compute_score(answer, str(number + 1)) == 0.0


@given(
    response=noise | texts,
    gold=values,
    source=st.sampled_from(["openai/gsm8k", "verl/arithmetic", "verl/reference", "alien"]) | values,
)
@fuzz(200)
def test_the_rule_scorers_give_a_number_from_0_to_1_or_a_message(response, gold, source):
    found, message = refused(lambda: default_compute_score(source, response, gold))
    assert message is not None or (type(found) is float and 0.0 <= found <= 1.0)
    extract_math(response)
    for method in ("strict", "flexible"):
        extracted = extract_solution(response, method)
        assert extracted is None or float(extracted) == float(extracted)


@pytest.mark.parametrize("source", [["a", "list"], {"a": "dict"}, None, 3, "nobody's"])
def test_a_data_source_without_a_rule_is_named_whatever_its_type(source):
    batch = sample_batch(["good"], data_source=[source], ground_truth=["1"])
    with (
        RewardRunner(None, WordDecoder(), num_workers=1) as runner,
        pytest.raises(RewardError, match=r"no built-in reward"),
    ):
        runner.score(batch)


@pytest.mark.parametrize("gold", [True, False, math.nan, math.inf, None, [], "", "none"])
def test_a_gold_answer_that_is_no_number_is_named(gold):
    with pytest.raises(RewardError, match="holds no number"):
        compute_score("#### 1", gold)
