"""Old keys: every row of the tables, and the readings of the documents."""

from __future__ import annotations

import pytest

from verl import notices
from verl.config import LEAVES, load_config, needs_reference, validate
from verl.config.compat import MOVED_GROUPS, RENAMES, SHORT_FORMS, SPREADS, leaf_of, translate
from verl.config.compat_inert import INERT, find_inert
from verl.config.fields import get
from verl.config.overrides import VALUES, Setting
from verl.errors import ConfigError

AR = "actor_rollout_ref"


@pytest.fixture(autouse=True)
def fresh_notices():
    notices.reset()


def sample(key: str):
    """A value that the option takes and that is not its default."""
    leaf = LEAVES[key]
    if leaf.about.choices:
        return next(name for name in reversed(leaf.about.choices) if name != leaf.default)
    if key == "reward.reward_fn":
        return print
    if leaf.is_mapping:
        return {"x": 1}
    if key.endswith(".betas"):
        return [0.5, 0.6]
    kind = str(leaf.hint)
    if "list" in kind:
        return [7] if "int" in kind else ["some/text"]
    if "bool" in kind:
        return not leaf.default
    return 7 if "int" in kind else 0.5 if "float" in kind else "some/text"


@pytest.mark.parametrize("old", RENAMES)
def test_every_rename_sets_its_new_key_with_one_notice(old):
    new = RENAMES[old]
    if old in ("use_vllm", "device_map") or new.endswith("device_map"):
        assert new in SPREADS or find_inert(new)
        return
    value = "dapo" if new == "algorithm.name" else sample(new)
    config = load_config(values={old: value})
    assert get(config, new) == value and config.given(new)
    said = [text for text in notices.seen() if f"'{old}'" in text]
    assert len(said) == (0 if old in SHORT_FORMS else 1)
    assert all(new in text for text in said)


@pytest.mark.parametrize("old", MOVED_GROUPS)
def test_every_moved_group_carries_its_keys(old):
    new = MOVED_GROUPS[old]
    moved = [key for key in LEAVES if key.startswith(f"{new}.") and find_inert(old + key[len(new) :]) is None]
    assert moved
    for key in moved[:12]:
        if SPREADS.get(key) is None:
            assert get(load_config(values={old + key[len(new) :]: sample(key)}), key) == sample(key)


@pytest.mark.parametrize("key", INERT)
def test_every_inert_key_is_told_and_changes_nothing(key):
    from verl.config import Config, flatten

    inert = INERT[key]
    value = "x" if inert.harmless is None else False if callable(inert.harmless) else inert.harmless[0]
    config = load_config(values={key: value})
    assert flatten(config) == flatten(Config())
    assert not config.explicit
    (said,) = notices.seen()
    assert key in said and inert.why in said
    if inert.harmless is not None:
        with pytest.raises(ConfigError, match="is not available here"):
            load_config(values={key: "something else"})


def test_tables_do_not_hide_options_or_end_nowhere():
    for key in LEAVES:
        assert find_inert(key) is None, key
        assert key not in RENAMES and not any(key.startswith(f"{old}.") for old in MOVED_GROUPS), key
    for old, new in RENAMES.items():
        assert leaf_of(new) or new in SPREADS or find_inert(new), old
    for old, new in MOVED_GROUPS.items():
        assert any(key.startswith(f"{new}.") for key in LEAVES), old


@pytest.mark.parametrize("key", [key for key in SPREADS if key not in ("algorithm", "algorithm.kl_penalty")])
def test_every_spread_lands_on_options(key):
    done = translate([Setting(key, True, VALUES)])
    assert done.settings and not done.problems and len(done.notices) == 1
    assert all(setting.key in LEAVES for setting in done.settings)


def test_cpu_offload_and_offload_params():  # A3
    given = [f"++{AR}.fsdp_config.cpu_offload=true", f"++{AR}.fsdp_config.offload_params=true"]
    given += [f"{AR}.{role}.fsdp_config.param_offload=true" for role in ("actor", "ref")]
    parts = load_config(given).actor_rollout_ref
    assert parts.actor.optim.offload and parts.ref.param_offload
    assert len(notices.seen()) == len(given)
    assert sum("optim.offload" in text for text in notices.seen()) == 2
    assert sum("ref.param_offload" in text for text in notices.seen()) == 3


def test_what_would_train_something_else_is_refused():
    for text in ("reward.reward_manager.name=mine",):
        with pytest.raises(ConfigError, match="is not available here"):
            load_config([text])
    config = load_config(values={"reward": {"reward_model": {"enable": True, "model_path": "some/model"}}})
    assert config.reward_model.enable and config.reward_model.model.path == "some/model"
    load_config(["reward_model.enable=false", "critic.model.custom_cls.path=null", f"{AR}.actor.strategy=fsdp"])


@pytest.mark.parametrize("logger", ["console", "[console]", "['console','tensorboard']"])
def test_logger_is_a_name_or_a_list(logger):  # A3
    assert load_config([f"trainer.logger={logger}"]).trainer.logger[0] == "console"


def test_a_given_kl_coefficient_turns_the_kl_on():  # A8
    assert load_config(["algorithm.kl_ctrl.kl_coef=0.001"]).algorithm.use_kl_in_reward
    assert any("use_kl_in_reward=false" in text for text in notices.seen())
    off = ["algorithm.kl_ctrl.kl_coef=0.001", "algorithm.use_kl_in_reward=false"]
    assert not load_config(off).algorithm.use_kl_in_reward
    assert not load_config(["algorithm.kl_ctrl.kl_coef=0"]).algorithm.use_kl_in_reward
    in_loss = ["algorithm.kl_ctrl.kl_coef=0.001", f"{AR}.actor.use_kl_loss=true"]
    assert not load_config(in_loss).algorithm.use_kl_in_reward
    assert not load_config().algorithm.use_kl_in_reward


def test_numeric_kl_penalty():  # C5
    config = load_config(values={"algorithm": {"kl_penalty": 0.02}})
    assert config.algorithm.use_kl_in_reward and config.algorithm.kl_ctrl.kl_coef == 0.02
    assert config.algorithm.kl_penalty == "kl"
    config = load_config(["algorithm.kl_penalty=0", "algorithm.kl_ctrl.kl_coef=0.001"])
    assert not needs_reference(config)
    assert load_config(["algorithm.kl_penalty=low_var_kl"]).algorithm.kl_penalty == "low_var_kl"
    same = load_config(["algorithm.kl_penalty=0.1", "algorithm.kl_ctrl.kl_coef=0.1"])
    assert same.algorithm.kl_ctrl.kl_coef == 0.1
    with pytest.raises(ConfigError, match="contradict"):
        load_config(["algorithm.kl_penalty=0.1", "algorithm.kl_ctrl.kl_coef=0.2"])
    with pytest.raises(ConfigError, match="contradict"):
        load_config(["algorithm.kl_penalty=0", f"{AR}.actor.use_kl_loss=true"])
    with pytest.raises(ConfigError, match="at least 0"):
        validate(load_config(["algorithm.kl_penalty=-1"]), need_data=False, need_model=False)


def test_micro_batch_size_of_the_document():  # C5
    config = load_config(["trainer.micro_batch_size=4", f"{AR}.ref.log_prob_micro_batch_size_per_gpu=2"])
    parts = config.actor_rollout_ref
    assert parts.actor.ppo_micro_batch_size_per_gpu == config.critic.ppo_micro_batch_size_per_gpu == 4
    assert parts.rollout.log_prob_micro_batch_size_per_gpu == 4
    assert parts.ref.log_prob_micro_batch_size_per_gpu == 2


@pytest.mark.parametrize("key", ["use_vllm", "trainer.use_vllm"])
def test_use_vllm(key):  # C5
    assert load_config(values={key: True}).actor_rollout_ref.rollout.name == "vllm"
    assert load_config([f"{key}=false"]).actor_rollout_ref.rollout.name == "native"
    with pytest.raises(ConfigError, match="'maybe' does not exist"):
        validate(load_config([f"{key}=maybe"]), need_data=False, need_model=False)


def test_custom_reward_function_under_both_names():  # B56
    for key in ("custom_reward_function", "reward.custom_reward_function"):
        config = load_config([f"{key}.path=my.py", f"+{key}.reward_kwargs.k=2"])
        assert config.reward.custom_reward_function.path == "my.py"
        assert config.reward.custom_reward_function.reward_kwargs == {"k": 2}
    both = ["custom_reward_function.path=a.py", "reward.custom_reward_function.path=a.py"]
    assert load_config(both).reward.custom_reward_function.path == "a.py"
    with pytest.raises(ConfigError, match=r"'custom_reward_function.path' and 'reward.custom_reward_function.path'"):
        load_config([both[0], "reward.custom_reward_function.path=b.py"])


def test_dtype_spellings():  # C14
    for spelling in ("bf16", "bfloat16", "torch.bfloat16", "BFloat16"):
        assert load_config(values={"torch_dtype": spelling}).actor_rollout_ref.model.dtype == "bfloat16"
    load_config(values={"device_map": "auto"})
    assert any("trainer.device" in text for text in notices.seen())
    with pytest.raises(ConfigError, match=r"actor_rollout_ref.model.dtype.*bf17"):
        load_config([f"{AR}.model.dtype=bf17"])


def test_dapo_keys_of_public_scripts():
    config = load_config(
        [
            "reward_model.reward_manager=dapo",
            "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",
            "+reward_model.reward_kwargs.overlong_buffer_cfg.len=128",
            "+reward_model.reward_kwargs.overlong_buffer_cfg.log=False",
            "+reward_model.reward_kwargs.max_resp_len=512",
            "reward.overlong_buffer.penalty_factor=0.5",
        ]
    )
    buffer = config.reward.overlong_buffer
    assert (buffer.enable, buffer.len, buffer.penalty_factor) == (True, 128, 0.5)
    assert any("reward_model.reward_manager" in text for text in notices.seen())


def test_the_low_memory_script_of_the_documents(tmp_path, monkeypatch):  # A3, section 4.3
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("train", "test"):
        (tmp_path / f"data/gsm8k/fmt_rl/{name}.parquet").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"data/gsm8k/fmt_rl/{name}.parquet").write_bytes(b"")
    (tmp_path / "models/Qwen/Qwen2.5-0.5B-Instruct").mkdir(parents=True)
    script = f"""data.train_files=$HOME/data/gsm8k/fmt_rl/train.parquet
    data.val_files=$HOME/data/gsm8k/fmt_rl/test.parquet data.train_batch_size=1
    data.max_prompt_length=256 data.max_response_length=256
    {AR}.model.path=$HOME/models/Qwen/Qwen2.5-0.5B-Instruct {AR}.actor.optim.lr=1e-6
    {AR}.actor.ppo_mini_batch_size=1
    {AR}.actor.ppo_micro_batch_size_per_gpu=1 {AR}.rollout.name=vllm {AR}.rollout.log_prob_micro_batch_size_per_gpu=1
    {AR}.rollout.tensor_model_parallel_size=1 {AR}.rollout.gpu_memory_utilization=0.3
    {AR}.rollout.max_num_batched_tokens=512 ++{AR}.rollout.enable_chunked_prefill=false
    ++{AR}.fsdp_config.cpu_offload=true ++{AR}.fsdp_config.offload_params=true {AR}.rollout.max_num_seqs=1
    {AR}.ref.log_prob_micro_batch_size_per_gpu=1 critic.optim.lr=1e-5
    critic.model.path=$HOME/models/Qwen/Qwen2.5-0.5B-Instruct critic.ppo_micro_batch_size_per_gpu=1
    algorithm.kl_ctrl.kl_coef=0.001 trainer.logger=console trainer.val_before_train=False trainer.n_gpus_per_node=1
    trainer.nnodes=1 trainer.save_freq=10 trainer.test_freq=10 trainer.total_epochs=2"""
    config = load_config(script.split())
    validate(config)
    assert config.algorithm.use_kl_in_reward
    assert config.data.train_files == f"{tmp_path}/data/gsm8k/fmt_rl/train.parquet"
    assert len([text for text in notices.seen() if "param_offload=true" in text]) == 2
    assert config.actor_rollout_ref.actor.optim.offload
    assert config.actor_rollout_ref.rollout.gpu_memory_utilization == 0.3


def test_lora_of_the_critic_and_quantised_rollouts_are_refused_not_ignored():
    with pytest.raises(ConfigError) as caught:
        load_config(["critic.model.lora_rank=8", f"{AR}.rollout.quantization=fp8", "model_engine=megatron"])
    assert len(caught.value.problems) == 3
    load_config(["critic.model.lora_rank=0", f"{AR}.rollout.quantization=false", "model_engine=dp"])


def test_lora_targets_are_a_name_or_a_list():
    model = load_config(
        [f"{AR}.model.lora_rank=8", f"{AR}.model.target_modules=[q_proj,v_proj]"]
    ).actor_rollout_ref.model
    assert (model.lora_rank, model.target_modules) == (8, ["q_proj", "v_proj"])
    assert load_config([f"{AR}.model.target_modules=.*_proj"]).actor_rollout_ref.model.target_modules == ".*_proj"


def test_a_group_given_a_plain_value_lists_its_keys():
    with pytest.raises(ConfigError, match="is a group, set its keys: type, kl_coef"):
        load_config(["algorithm.kl_ctrl=0.1"])
    assert not load_config(values={"reward": {"custom_reward_function": None}}).explicit
