"""What a reward function may look like and what its answer means; loading one from a file."""

import functools
import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from verl.errors import RewardError
from verl.rewards import flatten_extra_info, inspect_function, load_reward_function, normalise_result, resolve_manager
from verl.rewards.batch_view import BatchView
from verl.rewards.contract import normalise_batch
from verl.rewards.rows import response_lengths, row_arguments


class Judge:
    def __call__(self, solution_str):
        return 1.0


class AsyncJudge:
    async def __call__(self, solution_str, **kwargs):
        return 1.0


async def judged(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


@pytest.mark.parametrize(
    ("fn", "style", "accepts", "is_async"),
    [
        (lambda data_source, solution_str, ground_truth, extra_info=None, **kw: 1, "row", None, False),
        (lambda solution_str, ground_truth: 1, "row", {"solution_str", "ground_truth"}, False),
        (lambda **kwargs: 1, "row", None, False),
        (judged, "row", {"data_source", "solution_str", "ground_truth", "extra_info"}, True),
        (functools.partial(judged, extra_info={}), "row", None, True),
        (Judge(), "row", {"solution_str"}, False),
        (AsyncJudge(), "row", None, True),
        (lambda batch: [1], "view", set(), False),
        (lambda b: [1], "view", set(), False),
        (lambda batch, scale=1.0: [1], "view", {"scale"}, False),
        (lambda batch=None: [1], "view", set(), False),
        (lambda data_sources, solution_strs, ground_truths, extra_infos, **kw: [1], "columns", None, False),
    ],
)
def test_signatures_are_recognised(fn, style, accepts, is_async):
    function = inspect_function(fn)
    assert (function.style, function.is_async) == (style, is_async)
    if accepts is not None:
        assert function.accepts == accepts


def test_only_accepted_parameters_are_passed():
    offered = {"data_source": "d", "solution_str": "s", "ground_truth": "g", "extra_info": {}}
    function = inspect_function(lambda solution_str, scale: 1, {"scale": 2})
    assert function.accepted(offered) == {"solution_str": "s"} and function.kwargs == {"scale": 2}
    assert inspect_function(lambda solution_str, **kw: 1).accepted(offered) == offered


@pytest.mark.parametrize(
    ("fn", "kwargs", "message"),
    [
        (lambda completion, answer: 1, {}, "'completion', 'answer'"),
        (lambda: 1, {}, "none at all"),
        (lambda solution_str, weight: 1, {}, "requires 'weight'"),
        (lambda solution_str, weight=1: 1, {"wieght": 2}, "did you mean 'weight'"),
        ("compute_score", {}, "must be callable"),
    ],
)
def test_unusable_functions_are_named(fn, kwargs, message):
    with pytest.raises(RewardError, match=re.escape(message)):
        inspect_function(fn, kwargs)


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (1, 1.0),
        (True, 1.0),
        (0.25, 0.25),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (np.int64(3), 3.0),
        (np.array(0.5), 0.5),
        (torch.tensor(0.5), 0.5),
        (torch.tensor(True), 1.0),
        (Fraction(1, 4), 0.25),
    ],
)
def test_numbers_become_floats(value, score):
    result = normalise_result(value)
    assert result.score == score and type(result.score) is float
    assert result.extra == {"acc": score} and result.error is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "not a finite"),
        (float("inf"), "not a finite"),
        (1e300, "not a finite"),
        (10**400, "not a finite"),
        (torch.tensor(float("nan")), "not a finite"),
        ("1.0", "str '1.0'"),
        ({"acc": 1}, "without the key 'score' (it has 'acc')"),
        ({}, "none at all"),
        ({"score": None}, "'score': is None"),
        ({"score": "1"}, "'score': returned str"),
        ((1.0, {}), "tuple"),
        ([1.0], "list"),
        (torch.ones(2), "Tensor"),
    ],
)
def test_anything_else_is_an_error(value, message):
    result = normalise_result(value)
    assert result.score is None and message in result.error


def test_none_is_no_opinion_and_only_builtin_scorers_may_return_tuples():
    assert normalise_result(None).score is None and normalise_result(None).error is None
    assert normalise_result((1.0, "why"), take_first=True).score == 1.0


def test_dict_keys_become_extra_info():
    result = normalise_result({"score": np.float32(0.5), "acc": torch.tensor(1.0), "pred": "7"})
    assert result.score == 0.5 and result.extra == {"score": 0.5, "acc": 1.0, "pred": "7"}


@pytest.mark.parametrize("value", [[1, 2], (1, 2), np.array([1, 2]), torch.tensor([1.0, 2.0]), [{"score": 1}, 2]])
def test_batch_functions_return_one_value_a_row(value):
    function = inspect_function(lambda batch: 0)
    assert [result.score for result in normalise_batch(function, value, 2)] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "1 values, expected 4"),
        ([1.0] * 3, "3 values, expected 4"),
        (torch.ones(4, 1), "shape (4, 1), expected 4"),
        (np.float32(1), "float32"),
        (1.0, "returned float"),
        (None, "returned NoneType"),
        ({"score": [1] * 4}, "returned dict"),
    ],
)
def test_wrong_numbers_of_values_are_errors_that_name_the_function(value, message):
    def my_reward(batch):
        return value

    with pytest.raises(RewardError, match="my_reward.*" + re.escape(message)):
        normalise_batch(inspect_function(my_reward), value, 4)


def test_lengths_come_from_the_last_sampled_token():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    assert response_lengths(mask).tolist() == [3, 3, 0, 4, 1]
    assert response_lengths(torch.zeros(2, 0, dtype=torch.long)).tolist() == [0, 0]


def test_row_arguments_pass_the_truth_unchanged(tokenizer, make_batch):
    truth = [{"a": [1]}, 42, None]
    batch = make_batch(
        ["good 1", "", "bad"],
        reward_model=[{"style": "rule", "ground_truth": t} for t in truth],
        extra_info=[None, {"index": 7}, {}],
        data_source=["a", "b", "c"],
        __num_turns__=[1, 2, 3],
    )
    rows = row_arguments(batch, tokenizer)
    assert [row["solution_str"] for row in rows] == ["good 1", "", "bad"]
    assert [row["ground_truth"] for row in rows] == truth and rows[0]["ground_truth"] is truth[0]
    assert [row["extra_info"] for row in rows] == [{"num_turns": 1}, {"index": 7, "num_turns": 2}, {"num_turns": 3}]
    assert batch.non_tensor_batch["extra_info"][1] == {"index": 7}
    assert row_arguments(make_batch(["good"], ground_truth=["x"]), tokenizer)[0]["ground_truth"] == "x"


def test_batch_view(tokenizer, make_batch):
    batch = make_batch(["good 1", "bad"], topic=["x", "y"], reward_model=[{"ground_truth": 1}, {"ground_truth": 2}])
    view = BatchView(batch, tokenizer)
    assert view["prompts"] == ["what is"] * 2 and view["responses"] == ["good 1", "bad"]
    assert view["topic"] == ["x", "y"] and view["ground_truth"] == [1, 2]
    assert view["generated_tokens"] is view["response_ids"] is view.batch["response_ids"]
    assert view["response_ids"].dtype == torch.long and view["response_ids"].shape == (2, 6)
    assert torch.equal(view["input_ids"], torch.cat([view["prompt_ids"], view["response_ids"]], 1))
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in view.batch["response_ids"]]
    assert texts == view["responses"] and len(view.batch["response_ids"]) == 2
    with pytest.raises(KeyError, match="no 'queries'; it has"):
        view["queries"]


def test_flatten_extra_info_fills_missing_keys(make_batch):
    batch = make_batch(["good", "bad"], reward_extra_info=[{"acc": 1.0, "pred": "x"}, {"acc": 0.0, "len": 3}])
    columns = flatten_extra_info(batch)
    assert {key: list(column) for key, column in columns.items()} == {
        "acc": [1.0, 0.0],
        "pred": ["x", None],
        "len": [None, 3],
    }
    with pytest.raises(RewardError, match="score it first"):
        flatten_extra_info(make_batch(["good"]))


def test_loading_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Box:\n    value: float = 1.0\n"
        "def compute_score(solution_str, ground_truth, scale=1):\n    return scale * Box().value\n"
        "def other(batch):\n    return [0]\n"
    )
    function = load_reward_function(str(file), reward_kwargs={"scale": 3})
    assert function.fn("s", "g", **function.kwargs) == 3.0 and function.style == "row"
    assert load_reward_function(file, "other").style == "view"
    with pytest.raises(RewardError, match=r"no 'compute_scor'.*did you mean 'compute_score'.*compute_score, other"):
        load_reward_function(file, "compute_scor")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ndef compute_score(:\n    pass\n", r"mine\.py, line 2: .*invalid syntax.*compute_score\("),
        ("x = 1\nimport not_there_at_all\n", r"mine\.py, line 2: ModuleNotFoundError.*not_there_at_all"),
        ("x = 1\n", "no 'compute_score': it defines nothing"),
    ],
)
def test_broken_files_are_one_sentence(tmp_path, text, message):
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(RewardError, match=message) as error:
        load_reward_function(file)
    assert "\n" not in str(error.value)


def test_missing_files_name_the_nearest(tmp_path):
    (tmp_path / "my_reward.py").write_text("")
    with pytest.raises(RewardError, match=r"did you mean .*my_reward\.py"):
        load_reward_function(tmp_path / "my_rewards.py")
    with pytest.raises(RewardError, match="is the folder"):
        load_reward_function(tmp_path)
    with pytest.raises(RewardError, match=re.escape(f"only {tmp_path} is there")):
        load_reward_function(tmp_path / "no" / "such" / "file.py")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(RewardError, match="not a Python file"):
        load_reward_function(tmp_path / "notes.txt")


def test_managers(said):
    assert resolve_manager("naive") == "naive" and resolve_manager("dapo") == "dapo" and not said
    assert resolve_manager("prime") == resolve_manager("batch") == "naive" and len(said) == 2
    with pytest.raises(RewardError, match="did you mean 'naive'"):
        resolve_manager("naiv")
