"""Validation, derived values, names and the reference page."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl import notices
from verl.config import (
    LEAVES,
    Config,
    fit_batch_to_rows,
    flatten,
    job,
    load_config,
    micro_batching,
    needs_critic,
    needs_old_log_probs,
    needs_reference,
    optimizer_steps_per_rollout,
    resolve,
    samples_per_step,
    validate,
)
from verl.config import names as config_names
from verl.config.reference import render
from verl.config.suggest import near_path
from verl.errors import ConfigError

AR = "actor_rollout_ref"


@pytest.fixture(autouse=True)
def fresh_notices():
    notices.reset()


def check(*overrides: str, **more) -> list[str]:
    """The problems of a configuration, and [] if there are none."""
    config = load_config(overrides)
    try:
        validate(config, need_data=False, need_model=False, **more)
    except ConfigError as error:
        return error.problems
    return []


def test_defaults_are_valid_and_silent():
    assert check() == []
    assert notices.seen() == []


def test_required_keys():
    with pytest.raises(ConfigError) as caught:
        validate(Config())
    assert [problem.split(" ")[0] for problem in caught.value.problems] == ["data.train_files", f"{AR}.model.path"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("algorithm.adv_estimator=grop", "did you mean 'grpo'"),
        ("algorithm.adv_estimator=gdpo", "not available here"),
        (f"{AR}.actor.policy_loss.loss_mode=gpso", "did you mean 'gspo'"),
        (f"{AR}.actor.loss_agg_mode=token_mean", "did you mean 'token-mean'"),
        (f"{AR}.actor.kl_loss_type=k4", "low_var_kl"),
        (f"{AR}.actor.kl_loss_type=full", "not available here"),
        ("algorithm.kl_ctrl.type=adaptiv", "did you mean 'adaptive'"),
        (f"{AR}.rollout.name=trtllm", "not available here"),
        ("trainer.logger=[console,wandbb]", "did you mean 'wandb'"),
        ("data.train_batch_size=0", "at least 1"),
        ("algorithm.gamma=1.5", "at most 1"),
        (f"{AR}.actor.clip_ratio_c=1", "greater than 1"),
        (f"{AR}.actor.clip_ratio=nan", "must be a number"),
        (f"{AR}.rollout.top_p=0", "greater than 0"),
        (f"{AR}.rollout.min_p=1", "less than 1"),
        (f"{AR}.rollout.temperature=0", "greater than 0 in training"),
        (f"{AR}.rollout.val_kwargs.do_sample=true", "val_kwargs.temperature"),
        (f"{AR}.rollout.stop=['']", "holds an empty text"),
        (f"{AR}.rollout.min_tokens=9999", "more than an answer may have"),
        (f"{AR}.rollout.repetition_penalty=0", "greater than 0"),
        (f"{AR}.actor.optim.betas=[0.9]", "two numbers"),
        (f"{AR}.actor.optim.betas=[0.9,1.0]", "two numbers"),
        ("data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=16", "more than data.train_batch_size=8"),
        ("data.train_batch_size=8 critic.ppo_mini_batch_size=16", "critic.ppo_mini_batch_size=16"),
        ("algorithm.filter_groups.enable=true", "rollout.n above 1"),
        (f"{AR}.actor.policy_loss.clip_cov_lb=5", "must be below clip_cov_ub"),
        (f"{AR}.actor.policy_loss.clip_cov_ratio=0", "greater than 0"),
        ("critic.enable=false", "needs the value model"),
        ("reward.overlong_buffer.enable=true reward.overlong_buffer.len=513", "at most data.max_response_length=512"),
        ("trainer.resume_mode=resume_path", "needs trainer.resume_from_path"),
        ("trainer.resume_mode=resume_path trainer.resume_from_path=/tmp", "global_step_N"),
        ("trainer.save_freq=0", "-1 (never)"),
        ("trainer.val_only=true", "needs data.val_files"),
        ("trainer.keep_best=true", "trainer.test_freq"),
        ("trainer.sample_freq=2", "trainer.sample_prompts"),
        ("data.custom_cls.path=x.py", "both path"),
        (f"{AR}.actor.optim.lr_warmup_steps=3 {AR}.actor.optim.lr_warmup_steps_ratio=0.1", "not both"),
        ("algorithm.rollout_correction.rollout_rs=token_k9", "does not exist"),
        ("algorithm.rollout_correction.rollout_rs=token_k1", "one bound"),
        ("algorithm.rollout_correction.rollout_rs_threshold=2", "without"),
        (
            f"preset=dapo {AR}.rollout.n=4 algorithm.filter_groups.carry=true",
            "rollout_correction.bypass_mode=true or algorithm.rollout_correction.rollout_is",
        ),
        ("algorithm.rollout_correction.loss_type=reinforce", "bypass_mode=true"),
        (f"{AR}.rollout.strict=true", "auto has nothing to insist on"),
    ],
)
def test_each_mistake_is_one_sentence(overrides, words):
    found = check(*overrides.split())
    assert any(words in problem for problem in found), found
    assert all("\n" not in problem for problem in found)


def test_all_problems_at_once(tmp_path):
    config = load_config(
        [
            "algorithm.adv_estimator=x",
            "data.train_batch_size=-1",
            "trainer.device=tpu",
            f"data.train_files={tmp_path}/no.parquet",
        ]
    )
    with pytest.raises(ConfigError) as caught:
        validate(config)
    assert len(caught.value.problems) == 5  # and the missing model


def test_rules_that_are_right():
    rules = 'algorithm.rollout_correction.rollout_rs="token_k1,seq_mean_k3"'
    assert check(rules, 'algorithm.rollout_correction.rollout_rs_threshold="0.5_2.0,0.1"') == []
    assert (
        check(f"{AR}.rollout.top_k=0") == []
        and load_config([f"{AR}.rollout.top_k=0"]).actor_rollout_ref.rollout.top_k == -1
    )
    assert check("preset=dapo") == []


@pytest.mark.parametrize("correction", ["bypass_mode=true", "rollout_is=token"])
def test_groups_may_be_carried_where_their_age_is_corrected(correction):
    assert not Config().algorithm.filter_groups.carry
    carry = ["preset=dapo", "algorithm.filter_groups.carry=true", f"algorithm.rollout_correction.{correction}"]
    assert check(*carry) == []


def test_validation_rows_may_come_from_python():
    wanted = ["trainer.val_only=true", "trainer.keep_best=true", "trainer.test_freq=1"]
    assert len(check(*wanted)) == 2
    assert check(*wanted, has_validation=True) == []
    assert not any("trainer.test_freq" in text for text in notices.seen())
    assert check("trainer.test_freq=1", has_validation=False) == []
    assert any("trainer.test_freq" in text for text in notices.seen())


def test_values_put_in_by_python_are_checked_too():
    config = Config()
    config.data.train_batch_size = "many"
    config.actor_rollout_ref.rollout.n = 2.5
    with pytest.raises(ConfigError) as caught:
        validate(config, need_data=False, need_model=False)
    assert len(caught.value.problems) == 2


def test_custom_names(tmp_path):
    wanted = "algorithm.adv_estimator=mine"
    assert "algorithm.custom_path" in check(wanted)[0]
    assert check(wanted, custom_names=["mine"]) == []
    assert check(wanted, custom_names=["yours"]) != []
    file = tmp_path / "mine.py"
    file.write_text("")
    assert check(wanted, f"algorithm.custom_path={file}") == []


def test_missing_files_name_what_is_near(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/X").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.parquet").write_bytes(b"")
    (tmp_path / "score.py").write_text("")
    config = load_config(
        [
            "data.train_files=[data/trian.parquet,some/hub_set]",
            f"{AR}.model.path={tmp_path}/home/models/Qwen/X",
            "custom_reward_function.path=scores.py",
            "data.tokenizer=org/hub-model",
        ]
    )
    with pytest.raises(ConfigError) as caught:
        validate(config)
    data, model, reward = caught.value.problems
    assert "did you mean data/train.parquet" in data
    assert "did you mean models/X" in model
    assert "did you mean score.py" in reward


def test_near_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/Tiny-1B-Instruct").mkdir(parents=True)
    (tmp_path / "models/Tiny-1B.txt").write_text("")
    assert near_path("/nowhere/models/org/Tiny-1B-Instruct") == Path("models/Tiny-1B-Instruct")  # the same tail
    assert near_path("/nowhere/Tiny-1B-Instruc", folders=True) == Path("models/Tiny-1B-Instruct")
    assert near_path("models/Tiny-1B") == Path("models/Tiny-1B.txt")
    assert near_path("models/Tiny-1B", folders=True) == Path("models/Tiny-1B-Instruct")
    assert near_path(tmp_path / "models/Tiny-1B-Instruct", folders=True) is None  # never itself
    assert near_path("/nowhere/at/all/zzzz") is None
    assert near_path("/tmpp") is None and near_path("/hom/x", folders=True) is None  # the system's own folders


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("algorithm.adv_estimator=grpo", "nothing to compare"),  # B19
        ("algorithm.adv_estimator=rloo", "nothing to compare"),
        (f"preset=grpo {AR}.rollout.do_sample=false", "the same"),
        (f"data.train_batch_size=8 {AR}.actor.ppo_mini_batch_size=3", "the last one has 2 prompts"),
        ("data.gen_batch_size=8", "filter_groups"),
        ("algorithm.kl_ctrl.type=adaptive", "which is off"),
        ("preset=grpo trainer.critic_warmup=3", "without a value model"),
        ("trainer.test_freq=2", "without data.val_files"),
        (f"{AR}.actor.use_dynamic_bsz=true {AR}.actor.ppo_micro_batch_size_per_gpu=2", "is not used"),
    ],
)
def test_what_is_odd_but_allowed_is_told(overrides, words):
    assert check(*overrides.split()) == []
    assert any(words in text for text in notices.seen())


def test_clip_range_follows_clip_ratio():  # B10
    actor = resolve(load_config([f"{AR}.actor.clip_ratio=0.1"])).actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.1, 0.1)
    ratio, advantage = 1.15, 1.0
    clipped = min(max(ratio, 1 - actor.clip_ratio_low), 1 + actor.clip_ratio_high)
    assert max(-advantage * ratio, -advantage * clipped) == pytest.approx(-1.1)
    actor = resolve(
        load_config([f"{AR}.actor.clip_ratio=0.1", f"{AR}.actor.clip_ratio_high=0.3"])
    ).actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.1, 0.3)


def test_resolve_fills_followers_and_is_idempotent():
    config = load_config(
        ["data.train_batch_size=12", f"{AR}.actor.ppo_epochs=3", "trainer.seed=9", f"{AR}.model.path=m"]
    )
    before = flatten(config)
    done = resolve(config)
    assert flatten(config) == before
    assert flatten(resolve(done)) == flatten(done) and done.explicit == config.explicit
    assert done.actor_rollout_ref.actor.ppo_mini_batch_size == done.critic.ppo_mini_batch_size == 12
    assert done.critic.ppo_epochs == 3 and done.critic.model.path == done.actor_rollout_ref.model.tokenizer_path == "m"
    assert done.data.seed == done.actor_rollout_ref.rollout.seed == done.actor_rollout_ref.actor.data_loader_seed == 9
    assert done.trainer.default_local_dir == "checkpoints/verl_examples/gsm8k"
    assert not [key for key in flatten(done) if key.endswith("use_dynamic_bsz") and flatten(done)[key] is None]


def test_a_critic_of_its_own_does_not_take_the_policys_overrides():
    given = [f"+{AR}.model.override_config.a=1", f"{AR}.model.path=p"]
    assert resolve(load_config(given)).critic.model.override_config == {"a": 1}
    assert resolve(load_config([*given, "critic.model.path=q"])).critic.model.override_config == {}


def test_who_is_needed():
    assert needs_critic(Config()) and not needs_reference(Config())
    assert not needs_critic(load_config(["preset=grpo"]))
    assert needs_critic(load_config(["preset=grpo", "critic.enable=true"]))
    assert needs_reference(load_config([f"{AR}.actor.use_kl_loss=true"]))


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        ("", False),
        (f"+{AR}.model.override_config.attention_dropout=0.1", True),
        (f"+{AR}.model.override_config.attention_dropout=0.0", False),
        (f"{AR}.actor.ppo_epochs=2", True),
        (f"{AR}.actor.ppo_mini_batch_size=32", True),
        (f"{AR}.actor.use_kl_loss=true", False),
        ("algorithm.use_kl_in_reward=true", True),
        ("algorithm.rollout_correction.rollout_is=token", False),
        ("algorithm.rollout_correction.rollout_rs=token_k1", True),
        (f"algorithm.rollout_correction.bypass_mode=true {AR}.actor.ppo_epochs=2", False),
    ],
)
def test_when_old_log_probs_need_a_pass(overrides, needed):
    config = load_config(overrides.split())
    assert needs_old_log_probs(config) is needed
    assert needs_old_log_probs(resolve(config)) is needed


def test_counts():
    config = load_config(
        ["data.train_batch_size=10", f"{AR}.actor.ppo_mini_batch_size=4", f"{AR}.actor.ppo_epochs=2", "preset=grpo"]
    )
    assert samples_per_step(config) == 80
    assert optimizer_steps_per_rollout(config) == 6


def test_micro_batching():
    assert micro_batching(Config(), "actor").by == "memory"
    config = load_config(["trainer.micro_batch_size=4", f"{AR}.ref.log_prob_use_dynamic_bsz=true"])
    for step in ("actor", "old_log_prob", "critic", "critic_forward"):
        assert (micro_batching(config, step).by, micro_batching(config, step).rows) == ("rows", 4)
    ref = micro_batching(config, "ref")
    assert (ref.by, ref.rows, ref.tokens) == ("tokens", None, 16384)
    assert ref.key in LEAVES


def test_a_small_data_set_becomes_the_batch_unless_a_size_was_asked_for():  # B46, C3
    for config in (Config(), resolve(Config())):
        small = fit_batch_to_rows(config, 3)
        assert small.data.train_batch_size == 3
        assert resolve(small).actor_rollout_ref.actor.ppo_mini_batch_size == 3
        validate(small, need_data=False, need_model=False)
    assert "3 rows" in notices.seen()[0]
    given = load_config(["data.train_batch_size=8"])
    with pytest.raises(ConfigError, match="8 is more than the 7 rows"):
        fit_batch_to_rows(given, 7)
    assert fit_batch_to_rows(given, 9) is given
    short = load_config(["data.train_batch_size=8", "data.last_batch=short"])
    assert fit_batch_to_rows(short, 7) is short
    with pytest.raises(ConfigError, match="no rows"):
        fit_batch_to_rows(short, 0)


def test_job_prints_the_whole_or_a_part():
    assert job(Config(), "algorithm.kl_ctrl") == "type: fixed\nkl_coef: 0.001\nhorizon: 10000\ntarget_kl: 0.1\n"
    assert job(Config(), "data.prompt_key") == "prompt\n"
    assert "adv_estimator: gae" in job(Config())
    with pytest.raises(ConfigError, match="neither a group nor an option"):
        job(Config(), "nothing")


def test_names_agree_with_the_code_that_has_them():
    from verl.algorithms.registry import registered_names
    from verl.algorithms.rollout_rejection import MODES
    from verl.tracking.loggers import NAMES
    from verl.train_engine.schedule import SCHEDULES

    estimators, losses = registered_names()
    # Other tests may have registered names of their own in this process.
    assert set(config_names.ESTIMATORS) <= set(estimators)
    assert set(config_names.POLICY_LOSSES) <= set(losses)
    assert set(config_names.ROLLOUT_RS) == set(MODES)
    assert set(config_names.SCHEDULES) == set(SCHEDULES)
    assert set(config_names.LOGGERS) == set(NAMES)


def test_the_reference_page_is_up_to_date():
    page = Path(__file__).parents[2] / "docs" / "config.md"
    text = render()
    assert page.read_text(encoding="utf-8") == text, "run: python -m verl.config.reference > docs/config.md"
    for key in LEAVES:
        assert f"| `{key.rpartition('.')[2]}` |" in text


def test_what_is_named_is_of_the_right_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.yaml").write_text("")
    (tmp_path / "rewards").mkdir()
    paths = [f"{AR}.model.path=./models", "custom_reward_function.path=rewards", "data.train_files=hub_set"]
    with pytest.raises(ConfigError) as caught:
        validate(load_config(paths))
    model, reward = caught.value.problems
    assert model.startswith(f"{AR}.model.path=./models: no such folder (working directory")  # a file is no remedy
    assert reward == "reward.custom_reward_function.path=rewards is a folder: name the file in it"
    with pytest.raises(ConfigError, match=r"model\.path is not set"):
        validate(load_config([f"{AR}.model.path=", "data.train_files=hub_set"]))


@pytest.mark.parametrize("override", [f"{AR}.actor.optim.lr=inf", "algorithm.gamma=nan", f"trainer.seed={10**19}"])
def test_numbers_that_no_run_survives(override):
    with pytest.raises(ConfigError, match=override.partition("=")[0] + " must be"):
        validate(load_config([override]), need_data=False, need_model=False)
