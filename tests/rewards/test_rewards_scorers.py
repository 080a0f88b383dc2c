"""The rule scorers: every row of the public tables of cases, and properties."""

import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.errors import MissingDependencyError, RewardError
from verl.rewards import arithmetic, combine, gsm8k, overlap
from verl.rewards import math as math_rule
from verl.rewards.contract import RewardResult
from verl.rewards.router import check_data_sources, default_compute_score

GSM8K_STRICT = [
    ("#### 42", "42", 1.0),
    ("#### 42.", "42", 1.0),
    ("#### $42", "42", 1.0),
    ("####42", "42", 1.0),
    ("#### 42.0", "42", 1.0),
    ("#### 42.00", "42", 1.0),
    ("#### 1,234", "1234", 1.0),
    ("#### -5", "-5", 1.0),
    ("#### 42%", "42", 1.0),
    ("#### 42 dollars", "42", 1.0),
    ("#### 5 #### 42", "42", 1.0),
    ("#### 5 #### 42", "5", 0.0),
    ("#### 42" + " and so on" * 30, "42", 1.0),
    ("#### 5-3", "5", 1.0),
    ("#### 5-3", "42", 0.0),
    ("#### ,", "42", 0.0),
    ("#### .", "42", 0.0),
    ("", "42", 0.0),
    ("the answer is 42", "42", 0.0),
    ("#### 42", "42.", 1.0),
    ("#### 1234", "1,234", 1.0),
    ("#### 42", 42, 1.0),
    ("#### 42", 42.0, 1.0),
    ("#### 42", "so 40 + 2\n#### 42", 1.0),
    ("#### -$5", "-5", 1.0),
    ("#### $-5", "-5", 1.0),
    ("#### −5", "-5", 1.0),
    ("#### 5", "-5", 0.0),
    ("#### **42**", "42", 1.0),
    ("#### \\$42", "42", 1.0),
    ("#### 42\n#### The end", "42", 1.0),
    ("#### .5", "0.5", 1.0),
    ("#### 1,234,567.50", "1234567.5", 1.0),
]
GSM8K_FLEXIBLE = [
    ("it is 42, in total, ok", "42", 1.0),
    ("The answer is 1,234.", "1234", 1.0),
    ("#### 42" + " and so on" * 30, "42", 1.0),
    ("#### 5-3", "3", 1.0),
    ("#### 5-3", "-3", 0.0),
    ("8 - 3", "3", 1.0),
    ("x-3", "3", 1.0),
    ("(8)-3", "3", 1.0),
    ("so it is -3", "-3", 1.0),
    ("x = -$3.50", "-3.5", 1.0),
    ("-3", "-3", 1.0),
    ("#### ,", "42", 0.0),
    ("", "42", 0.0),
    ("no number", "0", 0.0),
]


@pytest.mark.parametrize(("text", "gold", "right"), GSM8K_STRICT)
def test_gsm8k_strict(text, gold, right):
    score = gsm8k.compute_score(text, gold)
    assert score == right and type(score) is float


@pytest.mark.parametrize(("text", "gold", "right"), GSM8K_FLEXIBLE)
def test_gsm8k_flexible(text, gold, right):
    score = gsm8k.compute_score(text, gold, method="flexible")
    assert score == right and type(score) is float


def test_gsm8k_wrong_number_gets_the_format_score_and_no_number_gets_nothing():
    assert gsm8k.compute_score("#### 7", "42", format_score=0.1, score=2.0) == 0.1
    assert gsm8k.compute_score("#### 42", "42", format_score=0.1, score=2.0) == 2.0
    for text in ("#### ,", "#### .", "", "42"):
        assert gsm8k.compute_score(text, "42", format_score=0.1) == 0.0
        assert gsm8k.extract_solution(text) is None


def test_gsm8k_extracts_plain_numbers():
    assert gsm8k.extract_solution("#### 5-3") == "5"
    assert gsm8k.extract_solution("#### $1,234.50") == "1234.50"
    assert gsm8k.extract_solution("8 -  3", "flexible") == "3"


def test_gsm8k_bad_gold_and_bad_method_are_errors():
    with pytest.raises(RewardError, match="holds no number"):
        gsm8k.compute_score("#### 1", "none")
    with pytest.raises(RewardError, match="'strict' or 'flexible'"):
        gsm8k.extract_solution("#### 1", "loose")


@given(st.integers(-(10**9), 10**9), st.sampled_from(["{}", "{:,}", "{}.", "{}.0", "{} apples"]), st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_gsm8k_any_way_of_writing_a_number_is_that_number(number, form, tail):
    text = "thus #### " + form.format(number) + "\n" + tail.replace("#", "")
    assert gsm8k.compute_score(text, str(number)) == 1.0
    assert gsm8k.compute_score(text, str(number + 1)) == 0.0


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_gsm8k_never_fails_on_any_text(text):
    assert gsm8k.compute_score(text, "42") in (0.0, 1.0)
    assert gsm8k.compute_score(text, "42", "flexible") in (0.0, 1.0)


MATH = [
    (r"so \boxed{42}", "42", 1.0),
    (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
    (r"\boxed{\frac12}", r"\frac{1}{2}", 1.0),
    (r"\boxed{5} no, \boxed{6}", "6", 1.0),
    (r"\boxed{5} no, \boxed{6}", "5", 0.0),
    (r"\boxed{\{1,2\}}", r"\{2,1\}", 1.0),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
    (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", 1.0),
    (r"\fbox{3}", "3", 0.0),
    (r"\boxed{3", "3", 0.0),
    (r"\boxed{}", "", 0.0),
    ("", "B", 0.0),
    ("", "", 0.0),
    ("I do not know", "B", 0.0),
    ("Answer: 7", "7", 1.0),
    ("The final answer is: $\\frac{3}{4}$", "0.75", 1.0),
    (r"\boxed{7}", r"\boxed{7}", 1.0),
    (r"\boxed{8}", 8, 1.0),
    (r"\boxed{2}", ["1", "2"], 1.0),
]


@pytest.mark.parametrize(("text", "gold", "right"), MATH)
def test_math(text, gold, right):
    assert math_rule.compute_score(text, gold) == right


def test_math_works_outside_the_main_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(math_rule.compute_score(r"\boxed{x+x}", "2x")))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_math_dapo_reports_prediction_and_scores_plus_or_minus_one():
    assert default_compute_score("aime2024", r"\boxed{33}", "33") == {"score": 1.0, "acc": True, "pred": "33"}
    assert default_compute_score("math_dapo", "no idea", "33") == {"score": -1.0, "acc": False, "pred": ""}


def test_math_without_its_package_says_what_to_install(tmp_path):
    code = (
        "import sys; sys.modules['math_verify'] = None\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'math_verify' else find(name, *a)\n"
        "from verl.rewards.router import check_data_sources\n"
        "check_data_sources(['openai/gsm8k'])\n"
        "check_data_sources(['openai/gsm8k', 'math'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert MissingDependencyError.__name__ in done.stderr and "pip install math-verify" in done.stderr


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        ("12", "12", 1.0),
        (" 12 \nand more", "12", 1.0),
        ("12", 12, 1.0),
        ("12.", "12", 0.0),
        ("it is 12", "12", 0.0),
        ("\n12", "12", 0.0),
        ("", "", 0.0),
    ],
)
def test_arithmetic(text, gold, right):
    assert arithmetic.compute_score(text, gold) == right


def test_overlap_values_and_limits():
    assert overlap.compute_score("The cat sat.", "the cat sat") == 1.0
    assert overlap.compute_score("the cat", "the cat sat down") == pytest.approx(2 * 1 * 0.5 / 1.5)
    assert overlap.compute_score("the the the", "the cat") == pytest.approx(2 * (1 / 3) * 0.5 / (1 / 3 + 0.5))
    assert overlap.compute_score("", "") == overlap.compute_score("!?", "!?") == 0.0
    assert overlap.compute_score("谢谢您", "谢谢") == pytest.approx(2 * (2 / 3) / (2 / 3 + 1))
    assert overlap.compute_score("cat", ["dog", "cat"]) == 1.0


@given(st.text(max_size=30), st.text(max_size=30))
def test_overlap_is_symmetric_and_within_bounds(one, two):
    score = overlap.overlap_f1(one, two)
    assert 0.0 <= score <= 1.0 and score == pytest.approx(overlap.overlap_f1(two, one))


def test_router_routes_and_names_what_it_does_not_know():
    assert default_compute_score("openai/gsm8k", "it is 42", "42", method="flexible", sandbox_fusion_url=None) == 1.0
    assert default_compute_score("verl/arithmetic", "4", "4") == 1.0
    for source in ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"):
        assert default_compute_score(source, r"\boxed{4}", "4", extra_info={}) == 1.0
    for source in ("hiyouga/geometry3k", None, "local"):
        with pytest.raises(RewardError, match=rf"{source!r}.*custom_reward_function\.path"):
            default_compute_score(source, "4", "4")
        with pytest.raises(RewardError, match=f"{source!r}"):
            check_data_sources(["openai/gsm8k", source])
    with pytest.raises(RewardError, match="no option 'methd'"):
        default_compute_score("openai/gsm8k", "4", "4", methd="flexible")


def test_combine_knows_no_opinion_from_failure():
    rows = combine(
        {
            "a": [RewardResult(1.0, {"acc": 1}), RewardResult(None), RewardResult(None), RewardResult(1.0)],
            "b": [RewardResult(0.5), RewardResult(0.5), RewardResult(None), RewardResult(None, error="ValueError: no")],
        },
        {"a": 1.0, "b": 2.0},
    )
    assert [row.score for row in rows] == [2.0, 1.0, None, None]
    assert rows[0].extra == {"a/acc": 1, "a/score": 1.0, "b/score": 0.5}
    assert rows[2].error is None and rows[3].error == "b: ValueError: no"
    with pytest.raises(RewardError, match="different numbers of rows"):
        combine({"a": [RewardResult(1.0)], "b": []}, {"a": 1, "b": 1})
    with pytest.raises(RewardError, match="weights are given"):
        combine({"a": []}, {"b": 1})
