"""The reward runner on sample batches: scores, failures, pieces, and what it reports."""

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import torch
from rewards_toys import detailed, last_word

from verl.errors import RewardError
from verl.protocol import DataProto
from verl.rewards import RewardRunner, check_all_failed, load_reward_function


def score(runner, batch, limit=30):
    return runner.score(batch).result(timeout=limit)


def test_the_score_stands_at_the_last_response_token(tokenizer, make_batch):
    batch = make_batch(["good 1", "", "bad bad bad", "2"], ground_truth=["1", "1", "1", "2"])
    with RewardRunner(last_word, tokenizer, num_workers=1) as runner:
        result = score(runner, batch)
    expected = torch.zeros(4, 6)
    expected[0, 2] = 1.0  # two words and the end token
    expected[3, 1] = 1.0
    assert torch.equal(result.batch["token_level_scores"], expected)
    assert result.batch["token_level_scores"].dtype == torch.float32
    assert result.batch["score_valid"].tolist() == [True, False, True, True]
    assert list(result.non_tensor_batch["uid"]) == ["u0", "u1", "u2", "u3"]
    assert set(result.batch.keys()) == {"token_level_scores", "score_valid"}
    metrics = result.meta_info["metrics"].results()
    assert metrics["reward/failed"] == 0 and metrics["reward/timeouts"] == 0  # an empty response is no failure
    assert metrics["reward/acc/mean"] == pytest.approx(2 / 3) and metrics["reward/seconds_per_row"] >= 0


def test_a_row_that_fails_is_counted_shown_and_left_out(tokenizer, make_batch, said):
    batch = make_batch(["1", "crash", "crash 2", "2"], ground_truth=["1"] * 4, data_source=["toy"] * 4)
    with RewardRunner(last_word, tokenizer, num_workers=1) as runner:
        runner.begin_step()
        result = score(runner, batch)
        tally = runner.end_step()
    assert result.batch["score_valid"].tolist() == [True, False, False, True]
    assert result.batch["token_level_scores"].sum(1).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert result.meta_info["metrics"]["reward/failed"] == 2 == tally.failed and tally.rows == 4
    assert len(said) == 1 and "u1/0 of toy" in said[0] and "ValueError: cannot read this" in said[0]
    error = result.non_tensor_batch["reward_error"]
    assert error[0] is None and "line" in error[1] and "last_word" in error[1]


@pytest.mark.parametrize("bad", [None, float("nan"), "1.0", {"acc": 1}, (1.0, {})])
def test_answers_without_a_number_fail_the_row(tokenizer, make_batch, said, bad):
    def compute(solution_str):
        return bad if solution_str == "bad" else 1

    with RewardRunner(compute, tokenizer, num_workers=1) as runner:
        result = score(runner, make_batch(["bad", "good"], data_source=["toy"] * 2))
    assert result.batch["score_valid"].tolist() == [False, True] and "u0/0 of toy" in said[0]
    assert torch.isfinite(result.batch["token_level_scores"]).all()


def test_on_error_zero_and_raise(tokenizer, make_batch):
    batch = make_batch(["1", "crash"], ground_truth=["1", "1"])
    with RewardRunner(last_word, tokenizer, num_workers=1, on_error="zero") as runner:
        result = score(runner, batch)
    assert result.batch["score_valid"].tolist() == [True, True]
    assert result.meta_info["metrics"]["reward/failed"] == 1
    with RewardRunner(last_word, tokenizer, num_workers=1, on_error="raise") as runner:
        for _ in range(2):
            with pytest.raises(RewardError, match="u1/0") as error:
                score(runner, batch)
            assert "cannot read this" in str(error.value)


def test_failing_everywhere_in_a_step_is_an_error_with_the_traceback(tokenizer, make_batch):
    with RewardRunner(last_word, tokenizer, num_workers=1) as runner:
        runner.begin_step()
        score(runner, make_batch(["crash"], ground_truth=["1"]))
        score(runner, make_batch(["crash", ""], ground_truth=["1", "1"]))
        with pytest.raises(RewardError, match="all 2 rows") as error:
            runner.end_step()
        assert "Traceback" in str(error.value) and "cannot read this" in str(error.value)
        runner.begin_step()
        score(runner, make_batch(["crash"], ground_truth=["1"]))
        score(runner, make_batch(["1"], ground_truth=["1"]))
        check_all_failed(runner.end_step())
        runner.begin_step()
        score(runner, make_batch([""], ground_truth=["1"]))
        runner.end_step()  # nothing could be scored, so nothing failed


def test_mixed_answers_and_missing_keys(tokenizer, make_batch):
    batch = make_batch(["good", "bad", "good"], data_source=["plain", "rich", "rich"])
    with RewardRunner(detailed, tokenizer, num_workers=2) as runner:
        result = score(runner, batch)
    assert list(result.non_tensor_batch["reward_extra_info"]) == [
        {"acc": 0.5},
        {"score": 1.0, "acc": False, "pred": "bad"},
        {"score": 1.0, "acc": True, "pred": "good"},
    ]
    metrics = result.meta_info["metrics"].results()
    assert metrics["reward/acc/mean"] == 0.5 and metrics["reward/score/mean"] == 1.0
    assert "reward/pred/mean" not in metrics


def test_pieces_overlap_and_join_again(tokenizer, make_batch):
    def slow(solution_str):
        time.sleep(1.5)
        return 1.0

    with RewardRunner(slow, tokenizer, num_workers=4) as runner:
        assert runner.per_row
        score(runner, make_batch(["1"] * 4))  # all workers have started
        start = time.monotonic()
        futures = [runner.score(make_batch(["good"], uid=[f"p{k}"], sample_id=[f"p{k}/0"])) for k in range(4)]
        assert time.monotonic() - start < 1.2 and not futures[-1].done()
        whole = DataProto.concat([future.result(timeout=20) for future in futures])
        assert time.monotonic() - start < 5  # one after another they would take 6
    assert len(whole) == 4 and whole.batch["score_valid"].all()
    assert whole.meta_info["metrics"]["reward/acc/mean"] == 1.0


def test_default_rules_references_and_unknown_sources(tokenizer, make_batch):
    rules = [{"style": "rule", "ground_truth": "4"}, {"style": "reference", "ground_truth": "good 4"}]
    with RewardRunner(None, tokenizer, num_workers=1) as runner:
        batch = make_batch(["4", "good"], data_source=["verl/arithmetic", "local"], reward_model=rules)
        result = score(runner, batch)
        assert result.batch["token_level_scores"].sum(1).tolist() == pytest.approx([1.0, 2 / 3])
        assert batch.non_tensor_batch["data_source"][1] == "local"
        with pytest.raises(RewardError, match=r"'local'.*custom_reward_function\.path"):
            runner.score(make_batch(["4"], data_source=["local"]))


def test_a_function_from_a_file_with_kwargs(tokenizer, make_batch, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def _inner(solution_str, scale):\n    return scale\nscored = _inner\n")
    function = load_reward_function(file, "scored", {"scale": 3})
    with RewardRunner(function, tokenizer, num_workers=1) as runner:
        assert score(runner, make_batch(["good"])).batch["token_level_scores"].sum() == 3.0


def test_batch_functions_see_the_drivers_globals(tokenizer, make_batch):
    here = []

    def count_words(batch):
        here.append(threading.current_thread().name)
        return [len(tokenizer.decode(ids, skip_special_tokens=True).split()) for ids in batch["generated_tokens"]]

    with RewardRunner(count_words, tokenizer) as runner:
        assert not runner.per_row
        result = score(runner, make_batch(["good 1 2", "", "bad"]))
    assert result.batch["token_level_scores"].sum(1).tolist() == [3.0, 0.0, 1.0]
    assert result.batch["score_valid"].tolist() == [True, False, True] and len(here) == 1
    with RewardRunner(count_words, tokenizer, per_batch="piece") as runner:
        assert runner.per_row


def test_batch_functions_in_columns_async_and_with_kwargs(tokenizer, make_batch):
    def columns(solution_strs, ground_truths, scale):
        return [scale * (text == truth) for text, truth in zip(solution_strs, ground_truths, strict=True)]

    async def slowly(batch):
        await asyncio.sleep(0.01)
        return torch.ones(2)

    batch = make_batch(["1", "2"], ground_truth=["1", "1"])
    with RewardRunner(columns, tokenizer, kwargs={"scale": 2}) as runner:
        assert score(runner, batch).batch["token_level_scores"].sum(1).tolist() == [2.0, 0.0]
    with RewardRunner(slowly, tokenizer) as runner:
        assert score(runner, batch).batch["token_level_scores"].sum(1).tolist() == [1.0, 1.0]


def test_batch_functions_that_go_wrong(tokenizer, make_batch, said):
    behave = {"mode": "short"}
    release = threading.Event()

    def my_reward(batch):
        if behave["mode"] == "short":
            return [1.0]
        if behave["mode"] == "raise":
            raise ValueError("no scorer today")
        if behave["mode"] == "hang":
            release.wait(20)
        return [1.0, None]

    batch = make_batch(["1", "2"])
    with RewardRunner(my_reward, tokenizer, timeout_s=0.5) as runner:
        with pytest.raises(RewardError, match=r"my_reward' returned 1 values, expected 2"):
            score(runner, batch)
        behave["mode"] = "raise"
        runner.begin_step()
        assert score(runner, batch).meta_info["metrics"]["reward/failed"] == 2
        with pytest.raises(RewardError, match="no scorer today"):
            runner.end_step()
        behave["mode"] = "hang"
        assert score(runner, batch).meta_info["metrics"]["reward/timeouts"] == 1
        release.set()
        behave["mode"] = "none for one"
        assert score(runner, batch).batch["score_valid"].tolist() == [True, False]
    assert any("cannot be ended" in line for line in said)


def test_slow_batch_functions_are_pointed_out(tokenizer, make_batch, said):
    def sluggish(batch):
        time.sleep(0.25)
        return [1.0, 1.0]

    with RewardRunner(sluggish, tokenizer) as runner:
        score(runner, make_batch(["1", "2"]))
    assert any("ms a row" in line and "sluggish" in line for line in said)


def test_a_closure_that_cannot_be_sent_runs_here_with_a_notice(tokenizer, make_batch, said):
    lock = threading.Lock()

    def locked(solution_str):
        with lock:
            if solution_str == "hang":
                return threading.Event().wait()
            return os.getpid()

    with RewardRunner(locked, tokenizer, num_workers=2, timeout_s=0.5) as runner:
        assert any("cannot be sent" in line and "locked" in line for line in said)
        assert list(score(runner, make_batch(["1"])).non_tensor_batch["reward_extra_info"]) == [{"acc": os.getpid()}]
        start = time.monotonic()
        result = score(runner, make_batch(["hang"]))
        assert time.monotonic() - start < 20 and result.meta_info["metrics"]["reward/timeouts"] == 1


def test_bad_settings_and_closed_runners(tokenizer, make_batch):
    wrong = {"on_error": "ignore", "per_batch": "some", "num_workers": 0, "timeout_s": 0, "kwargs": {"nope": 1}}
    for name, value in wrong.items():
        with pytest.raises(RewardError):
            RewardRunner(last_word, tokenizer, **{name: value})
    runner = RewardRunner(lambda solution_str: time.sleep(30), tokenizer, num_workers=1)
    waiting = runner.score(make_batch(["1", "2"]))
    time.sleep(0.5)
    runner.close()
    runner.close()
    with pytest.raises(RewardError, match="closed"):
        waiting.result(timeout=5)
    with pytest.raises(RewardError, match="closed"):
        runner.score(make_batch(["1"]))


def test_a_batch_without_rows_or_width(tokenizer, make_batch):
    with RewardRunner(last_word, tokenizer, num_workers=1) as runner:
        assert score(runner, make_batch(["", ""], ground_truth=["1", "1"], width=0)).batch["score_valid"].sum() == 0


def test_values_do_not_depend_on_the_device_of_the_numbers_or_on_pieces(tokenizer, make_batch):
    texts = [f"{k} good" if k % 3 else "crash" for k in range(9)]
    batch = make_batch(texts, ground_truth=["good"] * 9)
    with RewardRunner(last_word, tokenizer, num_workers=2) as runner:
        whole = score(runner, batch)
        pieces = [score(runner, batch[start : start + 3]) for start in (0, 3, 6)]
    joined = DataProto.concat(pieces)
    assert torch.equal(joined.batch["token_level_scores"], whole.batch["token_level_scores"])
    assert np.array_equal(joined.non_tensor_batch["reward_extra_info"], whole.non_tensor_batch["reward_extra_info"])
    one, other = (m.meta_info["metrics"].results() for m in (joined, whole))
    assert one["reward/failed"] == other["reward/failed"] and one["reward/acc/mean"] == other["reward/acc/mean"]


def test_a_script_without_a_main_guard(tmp_path):
    """Its local function works, and the script's top level runs exactly once."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path.insert(0, {os.path.dirname(__file__)!r})
            from rewards_batches import WordDecoder, sample_batch
            from verl.rewards import RewardRunner
            print("TOP LEVEL", flush=True)
            bonus = 2.0
            class Rule:
                value = 0.5
            def rule(solution_str, ground_truth):
                return bonus + Rule().value
            runner = RewardRunner(rule, WordDecoder(), num_workers=2)
            result = runner.score(sample_batch(["good", "bad"], ground_truth=["1", "1"])).result(timeout=60)
            print("SCORES", result.batch["token_level_scores"].sum(1).tolist())
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("TOP LEVEL") == 1 and "SCORES [2.5, 2.5]" in done.stdout


def test_a_score_that_nobody_waits_for_any_more_ends_in_peace(tokenizer, make_batch, capfd):
    with RewardRunner(last_word, tokenizer, num_workers=1) as runner:
        given_up = runner.score(make_batch(["1", "2"], ground_truth=["1", "1"]))
        assert given_up.cancel()
        score(runner, make_batch(["1"], ground_truth=["1"]))
    assert "InvalidStateError" not in capfd.readouterr().err


def test_a_reward_file_that_ends_the_program_is_an_error(tmp_path):
    (tmp_path / "script.py").write_text("import sys\n\nsys.exit(3)\n")
    with pytest.raises(RewardError, match=r"script\.py, line 3: SystemExit while loading it: 3"):
        load_reward_function(tmp_path / "script.py")
