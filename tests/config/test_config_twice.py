"""What one command line says twice: the last value with a notice, and two algorithms never."""

from __future__ import annotations

import pytest

from verl import notices
from verl.cli.main import main
from verl.config import load_config
from verl.config.overrides import with_algorithm
from verl.errors import ConfigError


def told() -> list[str]:
    return [text for text in notices.seen() if "given twice" in text]


@pytest.fixture(autouse=True)
def _fresh():
    notices.reset()


@pytest.mark.parametrize("signs", ["", "+", "++"])
def test_the_last_value_counts_and_both_are_named(signs):
    config = load_config(["trainer.seed=1", "data.max_length=9", f"{signs}trainer.seed=2"])
    assert config.trainer.seed == 2
    assert told() == ["trainer.seed is given twice, as 1 and as 2: the last one counts, 2"]


def test_an_old_name_given_twice():
    config = load_config(["optim.lr=1e-4", "optim.lr=1e-5"])
    assert config.actor_rollout_ref.actor.optim.lr == 1e-5 and "optim.lr is given twice" in told()[0]
    notices.reset()
    config = load_config(["algorithm.kl_penalty=0.3", "algorithm.kl_penalty=0"])
    assert not config.algorithm.use_kl_in_reward and len(told()) == 1
    assert not config.given("algorithm.kl_ctrl.kl_coef"), "the first value leaves nothing behind"


def test_no_notice_where_nothing_is_lost():
    model = "actor_rollout_ref.model"
    config = load_config(
        [
            *("trainer.seed=3", "trainer.seed=3", "data.max_length=8", "~data.max_length", "data.max_length=9"),
            *(f"{model}.override_config={{a: 1}}", f"{model}.override_config={{b: 2}}"),
            *("trainer.save_freq=1", "~trainer.save_freq=1", "trainer.save_freq=2"),
        ]
    )
    assert config.trainer.seed == 3 and config.data.max_length == 9 and config.trainer.save_freq == 2
    assert config.actor_rollout_ref.model.override_config == {"a": 1, "b": 2} and not told()
    load_config([f"{model}.override_config={{a: 1}}", f"{model}.override_config.a=2"])
    assert told() == [f"{model}.override_config.a is given twice, as 1 and as 2: the last one counts, 2"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["dpo", "algorithm.name=kto"],
        ["algorithm=kto", "dpo"],
        ["dpo", "+preset=kto"],
        ["dpo", "algorithm={name: kto, gamma: 1.0}"],
        ["sft", "algorithm.name=grpo"],
        ["sft", "algorithm.name=null"],
        ["dpo", "kto"],
    ],
)
@pytest.mark.parametrize("command", ["train", "plan", "profile"])
def test_two_algorithms_are_one_too_many(command, arguments, capsys):
    assert main([command, *arguments]) == 2
    assert "name two algorithms: give one of them" in capsys.readouterr().err


def test_the_same_algorithm_twice_is_none_too_many():
    assert load_config(with_algorithm(["dpo", "algorithm.name=dpo", "dpo"])).algorithm.name == "dpo"
    with pytest.raises(ConfigError, match="'zzz' is not a preset"):
        load_config(with_algorithm(["zzz"]))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--algorithm", "ppo", "algorithm=grpo"], "name two algorithms"),
        (["algorithm.name=dpo"], "cannot learn the quick start's sums"),
    ],
)
def test_the_quick_start_does_not_run_another_algorithm(argv, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["quickstart", *argv]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())
