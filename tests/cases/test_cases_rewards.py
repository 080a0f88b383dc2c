"""Public cases B52 to B60 and the GSM8K table: one row in, one score out, and what a score may be."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cases_toys import anything, awaited, by_source, raising, two
from rewards_batches import WordDecoder, sample_batch

from verl.algorithms.advantages import compute_advantage
from verl.config import load_config
from verl.errors import ConfigError, RewardError
from verl.rewards import RewardResult, RewardRunner, combine, load_reward_function, normalise_result
from verl.rewards.gsm8k import compute_score, extract_solution
from verl.rewards.math import compute_score as math_score


def score(function, responses, *, runner=None, **columns):
    with RewardRunner(function, WordDecoder(), num_workers=1, **(runner or {})) as scoring:
        return scoring.score(sample_batch(responses, **columns)).result(timeout=60)


def totals(result):
    return result.batch["token_level_scores"].sum(1).tolist()


@pytest.mark.parametrize("returned", [[1.0], [1.0, 2.0, 3.0], [], 0.5, torch.ones(4, 1), np.ones(5)])
def test_B52_a_batch_function_must_return_one_value_a_row(returned):
    def judge(batch):
        return returned

    with pytest.raises(RewardError, match=r"judge.*(expected 4|must return 4)"):
        score(judge, ["good"] * 4)


@pytest.mark.parametrize(
    ("returned", "right"),
    [
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (torch.tensor(2.0), 2.0),
        (np.array(3), 3.0),
        ({"score": 1, "x": None}, 1.0),
    ],
)
def test_B53_numbers_of_every_kind_are_scores(returned, right):
    result = normalise_result(returned)
    assert result.score == right and type(result.score) is float


@pytest.mark.parametrize(
    "returned", [None, math.nan, math.inf, "1.0", {"acc": 1}, {"score": None}, (1.0, {}), [1.0], 10**400, object()]
)
def test_B53_anything_else_fails_the_row_and_says_where(returned):
    from verl import notices

    def judge(batch):
        return [returned, 1.0]

    result = score(judge, ["bad", "good"], data_source=["toy", "toy"])
    assert result.batch["score_valid"].tolist() == [False, True] and totals(result) == [0.0, 1.0]
    assert result.meta_info["metrics"]["reward/failed"] == 1
    assert any("u0/0 of toy" in line for line in notices.seen())
    zero = score(judge, ["bad", "good"], runner={"on_error": "zero"})
    assert zero.batch["score_valid"].tolist() == [True, True] and zero.meta_info["metrics"]["reward/failed"] == 1
    with pytest.raises(RewardError, match="u0/0"):
        score(judge, ["bad", "good"], runner={"on_error": "raise"})


def test_B53_the_default_scorer_takes_the_first_of_a_tuple():
    assert normalise_result((1.0, {"why": "x"}), take_first=True).score == 1.0


def test_B54_sources_that_report_different_things():
    from verl.trainer.validation_metrics import validation_metrics

    result = score(by_source, ["1", "2", "3"], data_source=["A", "B", "A"])
    assert totals(result) == [1.0, 0.5, 1.0]
    extras = result.non_tensor_batch["reward_extra_info"]
    rows = [
        {"uid": f"u{k}", "data_source": source, "score": total, "valid": True, "extra": extra}
        for k, (source, total, extra) in enumerate(zip("ABA", totals(result), extras, strict=True))
    ]
    metrics = validation_metrics(rows)
    assert metrics["val-core/A/acc/mean@1"] == 1.0 and metrics["val-core/B/acc/mean@1"] == 1.0
    assert metrics["val-aux/B/reward/mean@1"] == 0.5
    assert result.meta_info["metrics"]["reward/acc/mean"] == pytest.approx(1.0)


def test_B55_abstaining_is_no_zero_and_all_abstaining_leaves_the_group():
    one = [RewardResult(1.0), RewardResult(None), RewardResult(None)]
    two = [RewardResult(0.5), RewardResult(2.0), RewardResult(None)]
    found = [result.score for result in combine({"one": one, "two": two}, {"one": 1.0, "two": 2.0})]
    assert found == [2.0, 4.0, None]
    batch = {
        "token_level_rewards": torch.tensor([[2.0], [4.0], [0.0]]),
        "response_mask": torch.ones(3, 1),
        "uid": np.array(["p"] * 3, dtype=object),
        "score_valid": torch.tensor([score is not None for score in found]),
    }
    advantages = compute_advantage("grpo", batch, {"norm_adv_by_std_in_grpo": False})["advantages"][:, 0]
    assert advantages.tolist() == [-1.0, 1.0, 0.0]  # the mean is 3, of two rows


def test_B55_a_failed_greedy_baseline_is_no_baseline_of_zero():
    from verl.protocol import DataProto
    from verl.trainer.nodes import baseline

    greedy = DataProto.from_dict(
        tensors={
            "token_level_scores": torch.tensor([[0.0, 0.5], [0.0, 0.0]]),
            "response_mask": torch.ones(2, 2),
            "score_valid": torch.tensor([True, False]),
        }
    )
    baselines = baseline(greedy).batch["reward_baselines"]
    batch = {
        "token_level_rewards": torch.tensor([[0.0, 1.0], [0.0, 1.0]]),
        "response_mask": torch.ones(2, 2),
        "reward_baselines": baselines,
    }
    assert compute_advantage("remax", batch)["advantages"].tolist() == [[0.5, 0.5], [0.0, 0.0]]


def test_B56_both_names_of_the_custom_function_work_and_must_agree(tmp_path, tiny_model_dir):
    from trainer_helpers import make_trainer

    file = tmp_path / "my.py"
    file.write_text("def compute_score(solution_str):\n    return 7.5\n")
    for key in ("custom_reward_function", "reward.custom_reward_function"):
        config = load_config([f"{key}.path={file}"])
        assert config.reward.custom_reward_function.path == str(file)
        trainer = make_trainer(
            tiny_model_dir, tmp_path / key, reward__reward_fn=None, trainer__total_training_steps=1,
            **{f"{key.replace('.', '__')}__path": str(file)},
        )  # fmt: skip
        assert trainer.fit()["critic/score/mean"] == 7.5
    with pytest.raises(ConfigError, match="contradict"):
        load_config([f"custom_reward_function.path={file}", "reward.custom_reward_function.path=other.py"])


@pytest.mark.parametrize("function", [two, anything, awaited, raising])
def test_B58_signatures_coroutines_and_one_bad_row(function):
    result = score(function, ["1", "2", "crash"], ground_truth=["1", "1", "x"], data_source=["toy"] * 3)
    assert totals(result) == [1.0, 0.0, 0.0]
    assert result.batch["score_valid"].tolist() == [True, True, function is not raising]
    if function is raising:
        assert "this one row" in result.non_tensor_batch["reward_error"][2]


def test_B58_a_function_that_cannot_be_called_is_refused_at_the_start(tmp_path):
    file = tmp_path / "f.py"
    file.write_text("def compute_score(solution_str, threshold):\n    return 1.0\n")
    with pytest.raises(RewardError, match="threshold"):
        load_reward_function(file)
    assert load_reward_function(file, reward_kwargs={"threshold": 1}).accepts == {"solution_str", "threshold"}


@pytest.mark.parametrize("gold", ["B", "", "\\boxed{}"])
@pytest.mark.parametrize("response", ["", "   ", "\\boxed{}", "Answer:", "#### "])
def test_B60_a_failed_extraction_equals_nothing(response, gold):
    from verl.rewards.arithmetic import compute_score as sums
    from verl.rewards.overlap import overlap_f1

    assert math_score(response, gold) == 0.0
    assert compute_score(response, "42") == 0.0
    assert sums("", gold) == sums("\n", gold) == overlap_f1("", gold) == overlap_f1(response, "") == 0.0
    with pytest.raises(RewardError, match="no number"):
        compute_score(response, gold)


GSM8K = [
    ("#### 42", "42", 1, 1),
    ("#### 42.", "42", 1, 1),
    ("#### $42", "42", 1, 1),
    ("####42", "42", 1, 1),
    ("#### 42.0", "42", 1, 1),
    ("#### 42.00", "42", 1, 1),
    ("#### 1,234", "1234", 1, 1),
    ("#### -5", "-5", 1, 1),
    ("#### 42%", "42", 1, 1),
    ("#### 42 dollars", "42", 1, 1),
    ("#### 5 #### 42", "42", 1, 1),
    ("#### 42" + " and so on, at some length" * 12, "42", 1, 1),
    ("... 42, in total, ok", "42", 0, 1),
    ("The answer is 1,234.", "1234", 0, 1),
    ("#### ,", "42", 0, 0),
    ("#### .", "42", 0, 0),
    ("", "42", 0, 0),
    ("#### 1234", "1,234", 1, 1),
    ("#### 42", "42.", 1, 1),
    ("#### 42", 42, 1, 1),
]


@pytest.mark.parametrize(("response", "gold", "strict", "flexible"), GSM8K)
def test_gsm8k_table(response, gold, strict, flexible):
    for method, right in (("strict", strict), ("flexible", flexible)):
        found = compute_score(response, gold, method=method)
        assert found == right and type(found) is float
        if response in ("", "#### ,", "#### ."):
            assert extract_solution(response, method) is None
            assert compute_score(response, gold, method=method, format_score=0.1) == 0.0


def test_gsm8k_a_difference_is_no_negative_number():
    assert extract_solution("#### 5-3", "strict") == "5"
    assert extract_solution("5-3", "flexible") == "3"
    assert extract_solution("it is -3", "flexible") == "-3"


def test_gsm8k_gold_of_the_preprocessing():
    from verl.data.preprocess import gsm8k_ground_truth

    assert gsm8k_ground_truth("so #### -1,234.50", "row 0") == "-1234.50"


@pytest.mark.parametrize("acc", ["yes", float("nan"), [1]])
def test_an_accuracy_that_is_no_number_is_told_by_the_group_filter(acc):
    from verl import notices
    from verl.protocol import DataProto
    from verl.trainer.nodes import filter_groups

    def scored(*accuracies):
        return DataProto.from_dict(
            tensors={
                "token_level_scores": torch.ones(2, 1),
                "response_mask": torch.ones(2, 1),
                "score_valid": torch.tensor([True, True]),
            },
            non_tensors={
                "uid": ["p", "p"], "sample_id": ["p/0", "p/1"], "reward_extra_info": [{"acc": a} for a in accuracies],
            },
        )  # fmt: skip

    assert len(filter_groups(scored(True, 0), metric="acc")) == 2
    assert len(filter_groups(scored(1, True), metric="acc")) == 0
    with pytest.raises(RewardError, match=r"filter_groups\.metric=acc"):
        filter_groups(scored(1.0, acc), metric="acc")
    assert not any("no 'acc'" in text for text in notices.seen())
    assert len(filter_groups(scored(None, None), metric="acc")) == 0  # by the scores, which are equal
    assert any("filter_groups.metric=acc: the reward function reports no 'acc'" in text for text in notices.seen())
