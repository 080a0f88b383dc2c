"""Reading a configuration: grammar, layers, types, suggestions, interpolation."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl import notices
from verl.config import LEAVES, PRESETS, Config, flatten, load_config, resolve, to_yaml, validate
from verl.config.coerce import coerce
from verl.config.fields import get
from verl.errors import ConfigError

MODEL = "actor_rollout_ref.model.path"


@pytest.fixture(autouse=True)
def fresh_notices():
    notices.reset()


def problems(*overrides: str, **more) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, **more)
    return caught.value.problems


def test_import_needs_no_torch_and_is_quick():
    code = (
        "import sys, time; t = time.process_time(); import verl.config; t = time.process_time() - t; "
        "verl.config.load_config(['data.train_batch_size=2']); "
        "bad = [m for m in ('torch', 'transformers', 'ray') if m in sys.modules]; print(t, bad)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    seconds, modules = output.strip().split(" ", 1)
    assert modules == "[]"
    assert float(seconds) < 0.8


def test_defaults_need_only_data_and_model(tmp_path):
    train = tmp_path / "train.jsonl"
    train.write_text("{}")
    (tmp_path / "model").mkdir()
    config = load_config([f"data.train_files={train}", f"{MODEL}={tmp_path}/model"])
    validate(config)
    assert config.explicit == {"data.train_files", MODEL}
    assert (config.actor_rollout_ref.rollout.name, config.trainer.device, config.trainer.logger) == (
        "auto",
        "auto",
        ["console"],
    )


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_prefixes_set_the_same_value(prefix):
    assert load_config([f"{prefix}data.max_prompt_length=77"]).data.max_prompt_length == 77


def test_values_of_the_grammar():
    config = load_config(
        [
            "data.train_files=[a.parquet,'b c.parquet']",
            "trainer.experiment_name=007",
            "trainer.project_name=2024_01_01",
            "actor_rollout_ref.actor.optim.lr=1e-5",
            "data.train_batch_size=1e2",
            "trainer.total_training_steps=null",
            "data.shuffle=False",
            "actor_rollout_ref.actor.clip_ratio=1",
            "+actor_rollout_ref.model.override_config.hidden.size=3",
            "actor_rollout_ref.model.override_config={dropout: 0.5, hidden: {layers: 2}}",
            'actor_rollout_ref.rollout.stop=["\\n", "a, b"]',
            "data.apply_chat_template=True",
            "data.seed=None",
        ]
    )
    assert config.data.train_files == ["a.parquet", "b c.parquet"]
    assert (config.trainer.experiment_name, config.trainer.project_name) == ("007", "2024_01_01")
    assert config.actor_rollout_ref.actor.optim.lr == 1e-5
    assert config.data.train_batch_size == 100 and isinstance(config.data.train_batch_size, int)
    assert config.data.shuffle is False and config.data.seed is None
    assert isinstance(config.actor_rollout_ref.actor.clip_ratio, float)
    assert config.actor_rollout_ref.model.override_config == {"hidden": {"size": 3, "layers": 2}, "dropout": 0.5}
    assert config.actor_rollout_ref.rollout.stop[1] == "a, b"
    assert config.data.apply_chat_template == "true"


def test_delete_goes_back_to_the_default():
    assert load_config(["data.val_files=x", "~data.val_files"]).data.val_files is None
    config = load_config(["~algorithm.kl_ctrl"], values={"algorithm": {"kl_ctrl": {"horizon": 5}}})
    assert config.algorithm.kl_ctrl.horizon == 10000 and not config.given("algorithm.kl_ctrl.horizon")
    assert "removes nothing" in problems("data.train_batch_size=3", "~data.train_batch_size=4")[0]
    config = load_config(["trainer.micro_batch_size=4", "~trainer.micro_batch_size"])
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu is None


def test_paths_are_expanded_even_where_the_grammar_has_no_word_for_them(monkeypatch):
    monkeypatch.setenv("HOME", "/home/her")
    monkeypatch.setenv("DATA", "/data")
    monkeypatch.delenv("NOWHERE", raising=False)
    config = load_config(["data.train_files=~/a b (1).parquet", "data.val_files=[$DATA/x.parquet]"])
    assert config.data.train_files == "/home/her/a b (1).parquet"
    assert config.data.val_files == ["/data/x.parquet"]
    assert load_config(values={"data": {"train_files": "${oc.env:HOME}/t.parquet"}}).data.train_files == (
        "/home/her/t.parquet"
    )
    assert "NOWHERE is not set" in problems("data.train_files=$NOWHERE/x")[0]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.train_batch_size=1,2", "sweep"),
        ("data.train_batch_size=range(1,3)", "sweep"),
        ("nonsense", "expected key=value"),
        ("data.prompt_key=a=b", "quotes"),
        ("actor@actor_rollout_ref.actor=dp_actor", "config group"),
    ],
)
def test_unreadable_overrides_say_what_to_do(override, words):
    (problem,) = problems(override)
    assert words in problem and override in problem


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("data.trainfiles", "data.train_files"),
        ("actor_rollout_ref.actor.lr", "actor_rollout_ref.actor.optim.lr"),
        ("critic.lr", "critic.optim.lr"),
        ("trainer.save_frequency", "trainer.save_freq"),
        ("algorithm.adv_estimater", "algorithm.adv_estimator"),
        ("actor_rollout.actor.ppo_minibatch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"),
        ("algorithm.kl_coef", "algorithm.kl_ctrl.kl_coef"),
    ],
)
def test_unknown_keys_name_the_nearest(wrong, right):
    (problem,) = problems(f"{wrong}=1")
    assert "is not a configuration key" in problem
    assert right in problem.split("did you mean ")[1]


def test_an_unknown_key_like_nothing_has_no_wild_guess():
    (problem,) = problems("zzz.qqqqqq=1")
    assert "did you mean" not in problem


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.train_batch_size=abc", "an integer"),
        ("data.train_batch_size=1.5", "an integer"),
        ("data.train_batch_size=true", "an integer"),
        ("data.train_batch_size=null", "an integer"),
        ("actor_rollout_ref.actor.optim.lr=fast", "a number"),
        ("data.shuffle=maybe", "true or false"),
        ("data.shuffle=2", "true or false"),
        ("data.prompt_key=[a]", "text"),
        ("actor_rollout_ref.rollout.stop_token_ids=[a]", "a list of integers"),
        ("actor_rollout_ref.model.override_config=3", "a mapping"),
        ("trainer.total_training_steps=soon", "an integer or null"),
        ("reward.reward_fn=abc", "a Python function"),
    ],
)
def test_wrong_types_name_key_value_and_type(override, expected):
    (problem,) = problems(override)
    key, _, value = override.partition("=")
    assert problem.startswith(key) and f"expected {expected}" in problem
    assert value.strip("[]").lower() in problem.lower() or value == "null"


def test_every_problem_is_reported_at_once():
    found = problems("data.train_batch_size=abc", "a.b=1", "x=1,2", "~data.seed=7", "critic.model.lora_rank=8")
    assert len(found) == 5


def test_layers_and_explicit_keys(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("data: {train_batch_size: 1, max_prompt_length: 1, seed: 1}\nactor_rollout_ref: {actor: null}\n")
    config = load_config(
        ["data.train_batch_size=3"], file=file, values={"data": {"train_batch_size": 2, "max_prompt_length": 2}}
    )
    assert (config.data.train_batch_size, config.data.max_prompt_length, config.data.seed) == (3, 2, 1)
    assert config.explicit == {"data.train_batch_size", "data.max_prompt_length", "data.seed"}


def test_a_stronger_layer_wins_whatever_the_spelling(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("actor_rollout_ref: {actor: {ppo_micro_batch_size: 4}}\n")
    config = load_config(["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"], file=file)
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 2


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("a: [1\n")
    assert "did you mean run.yaml" in problems(file="run.yml")[0]
    assert "cannot be read" in problems(file="run.yaml")[0]
    Path("list.yaml").write_text("- 1\n")
    assert "must be a mapping" in problems(file="list.yaml")[0]


def test_scientific_numbers_and_missing_marks_in_yaml(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("actor_rollout_ref:\n  actor: {optim: {lr: 2e-6}}\n  rollout:\n    name: ???\ndefaults: [x]\n")
    config = load_config(file=file)
    assert config.actor_rollout_ref.actor.optim.lr == 2e-6
    assert config.actor_rollout_ref.rollout.name == "auto"


def test_interpolation_sees_defaults_and_old_spellings():
    config = load_config(
        [
            "data.max_prompt_length=${data.max_response_length}",
            "trainer.default_local_dir=out/${trainer.project_name}/x",
            "critic.ppo_micro_batch_size_per_gpu=${actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu}",
            "actor_rollout_ref.actor.ppo_micro_batch_size=6",
            "data.val_files=[${data.prompt_key}.parquet]",
        ]
    )
    assert config.data.max_prompt_length == 512
    assert config.trainer.default_local_dir == "out/verl_examples/x"
    assert config.critic.ppo_micro_batch_size_per_gpu == 6
    assert config.data.val_files == ["prompt.parquet"]
    assert "data.nothing" in problems("data.seed=${data.nothing}")[0]


def test_python_functions_survive():
    class Scorer:
        model = object()

        def __call__(self, batch):
            return [0.0]

    scorer = Scorer()
    config = load_config(
        ["data.seed=${trainer.seed}"], values={"reward_fn": scorer, "trainer.total_epochs": 2, "trainer": {"seed": 5}}
    )
    assert config.reward.reward_fn is scorer and resolve(config).reward.reward_fn is scorer
    assert (config.data.seed, config.trainer.total_epochs) == (5, 2)
    assert "reward_fn: null  # the Python function" in to_yaml(config)


def test_every_option_has_documentation_and_a_default_of_its_type():
    for leaf in LEAVES.values():
        assert len(leaf.about.doc) > 10 or leaf.about.choices or leaf.about.low is not None, leaf.key
        assert leaf.about.doc.endswith("."), leaf.key
        assert coerce(leaf, leaf.default) == leaf.default, leaf.key


def test_yaml_reads_back_to_the_same_values(tmp_path):
    config = load_config(
        ["trainer.logger=console", "data.seed=3", "actor_rollout_ref.actor.optim.lr=3e-7", "preset=dapo"]
    )
    file = tmp_path / "resolved.yaml"
    for version in (config, resolve(config)):
        file.write_text(to_yaml(version))
        assert flatten(load_config(file=file)) == flatten(version)


_BY_TYPE = {
    int: st.integers(min_value=1, max_value=10**6),
    float: st.floats(min_value=1e-9, max_value=1e6),
    bool: st.booleans(),
}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_number_given_on_the_command_line_arrives(data):
    key = data.draw(st.sampled_from([k for k, leaf in LEAVES.items() if leaf.hint in _BY_TYPE and k not in _RELATED]))
    value = data.draw(_BY_TYPE[LEAVES[key].hint])
    assert get(load_config([f"{key}={value}"]), key) == value


_RELATED = {"algorithm.kl_ctrl.kl_coef"}  # tells the user something each time


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_and_lie_below_what_is_given(name):
    config = load_config([f"algorithm.name={name}", "actor_rollout_ref.actor.loss_agg_mode=token-sum"])
    validate(config, need_data=False, need_model=False)
    for key, value in PRESETS[name].items():
        expected = "token-sum" if key.endswith("loss_agg_mode") else value
        assert get(config, key) == expected
    assert config.explicit == {"algorithm.name", "actor_rollout_ref.actor.loss_agg_mode"}
    differs = {key for key, value in flatten(config).items() if value != LEAVES[key].default}
    assert differs - {"algorithm.name", "actor_rollout_ref.actor.loss_agg_mode"} <= set(PRESETS[name])


def test_unknown_preset_names_the_nearest():
    assert "did you mean 'dr_grpo'" in problems("preset=drgrpo")[0]


def test_a_configuration_can_be_copied_and_sent():
    config = load_config(["preset=dapo", "+critic.model.override_config.a=1"])
    for other in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert other == config and other.explicit == config.explicit
        other.critic.model.override_config["a"] = 2
        assert config.critic.model.override_config == {"a": 1}


def test_a_misspelled_attribute_in_python_is_an_error():
    with pytest.raises(AttributeError):
        Config().trainer.save_frequency = 3
