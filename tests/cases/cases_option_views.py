"""What a configuration leads to without a run: what a worker is given, what a dataset holds, which file appears.

Each view takes the values of a configuration and a folder with a model, and gives something to compare.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from learning_helpers import pairs
from trainer_rewards import digits_share

from verl.config import Config, load_config, processes, resolve
from verl.data import PreferenceDataset, SFTDataset, build_prompt_dataset, build_train_loader
from verl.hardware import Device, choose
from verl.models.loading import load_tokenizer
from verl.rollout.sglang.adapter import engine_arguments as sglang_arguments
from verl.rollout.vllm.adapter import engine_arguments
from verl.trainer import groups, roles, settings
from verl.trainer.placement import placement_of
from verl.trainer.sequences import read_sequences

CPU = choose(Device("cpu", "x"), "2.11.0", {})
PACKAGES = {"vllm": "0.24.0", "sglang": "0.5.23", "triton": "3.5.0"}
H200 = choose(Device("cuda", "NVIDIA H200", (9, 0), 141 << 30), "2.11.0", PACKAGES)
PROMPTS = [
    {"prompt": f"{k}+1=", "other": f"{k}-1=", "answer": str(k + 1), "gold": "7", "data_source": "toy", "kind": f"t{k}"}
    for k in range(5)
]
PROMPTS.append({**PROMPTS[0], "prompt": "12+345="})
ANSWERS = [
    {
        "messages": [{"role": "user", "content": f"{k}"}, {"role": "assistant", "content": "m"}],
        "chat": [{"role": "user", "content": f"{k}"}, {"role": "assistant", "content": "c" * 30}],
        "schemas": "no JSON",
    }
    for k in range(5)
]
PLAIN = [{"prompt": f"{k}", "response": "r", "text2": "longer", "more": "s" * (k + 1)} for k in range(5)]
TEXTS = [{"text": "one", "words": "another"}]


def config_of(values: dict[str, Any], model: Path) -> Config:
    given = {"actor_rollout_ref.model.path": str(model), "trainer.device": "cpu", **values}
    return resolve(load_config(values=given))


def comparable(value: Any) -> Any:
    """Settings as nested dicts, without the ``actor`` group itself: that a value stands in it is no effect."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: comparable(getattr(value, f.name)) for f in dataclasses.fields(value) if f.name != "loss"}
    return value


def actor(values, model):
    config = config_of(values, model)
    return comparable(settings.actor_settings(config, settings.hardware_for(config, CPU), 10))


def actor_on_gpu(values, model):
    config = config_of({**values, "trainer.device": "auto"}, model)
    return comparable(settings.actor_settings(config, settings.hardware_for(config, H200), 10))


def reference(values, model):
    config = config_of(values, model)
    return comparable(settings.reference_settings(config, settings.hardware_for(config, CPU)))


def reference_on_gpu(values, model):
    config = config_of({**values, "trainer.device": "auto"}, model)
    return comparable(settings.reference_settings(config, settings.hardware_for(config, H200)))


def critic(values, model):
    config = config_of(values, model)
    return comparable(settings.critic_settings(config, settings.hardware_for(config, CPU), 10))


def critic_on_gpu(values, model):
    config = config_of({**values, "trainer.device": "auto"}, model)
    return comparable(settings.critic_settings(config, settings.hardware_for(config, H200), 10))


def needs(values, model):
    """(who is trained, how many processes, where they live)."""
    config = config_of(values, model)
    return config.critic.enable, processes(config), placement_of(config), groups.cluster_address(config)


def vllm(values, model):
    config = config_of({**values, "trainer.device": "auto"}, model)
    found = settings.remote_settings(config, settings.hardware_for(config, H200))
    return None if found is None else (engine_arguments("folder", found, "cuda"), found.probe_tolerance)


def sglang(values, model):
    config = config_of({**values, "trainer.device": "auto"}, model)
    return sglang_arguments("folder", settings.remote_settings(config, settings.hardware_for(config, H200)), "cuda")


def vllm_server(values, model):
    config = config_of({**values, "trainer.device": "auto"}, model)
    found = settings.remote_settings(config, settings.hardware_for(config, H200))
    return found.server_url, found.server_weights_dir


def hardware(values, model):
    """What a machine without a GPU will use."""
    return comparable(settings.hardware_for(config_of(values, model), CPU))


def machine(values, model):
    """What this machine will use."""
    return comparable(settings.hardware_for(config_of(values, model)))


class ToyEnvironment:
    """Only named here."""


def other_reward(solution_str):
    return 0.5


def conversations(values, model):
    return comparable(settings.multi_turn_settings(config_of(values, model)))


def prompts(values, model, split="train", files=None):
    """Every item of the prompt dataset."""
    config = config_of(values, model)
    tokenizer = load_tokenizer(
        config.actor_rollout_ref.model.tokenizer_path, chat_template=config.actor_rollout_ref.model.custom_chat_template
    )
    rows = PROMPTS if files is None else files
    rows = build_prompt_dataset(
        config.data,
        tokenizer,
        split,
        files=rows,
        seed=3,
        chat_template=config.actor_rollout_ref.model.custom_chat_template,
    )
    return [{name: _plain(value) for name, value in rows[i].items()} for i in range(len(rows))]


def validation_prompts(values, model):
    return prompts(values, model, "validation")


def prompts_of_files(values, model):
    config = config_of(values, model)
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.tokenizer_path)
    return [
        [_plain(data[i]["prompt_ids"]) for i in range(len(data))]
        for data in (build_prompt_dataset(config.data, tokenizer, split) for split in ("train", "validation"))
    ]


def batches(values, model):
    """Row numbers of the batches of two epochs."""
    config = config_of(values, model)
    data = build_prompt_dataset(config.data, load_tokenizer(str(model)), files=PROMPTS[:5], seed=3)
    loader = build_train_loader(data, config.data, epochs=2, seed=3)
    return [batch.non_tensor_batch["index"].tolist() for batch in loader]


def _sequences(rows, kind=SFTDataset):
    def view(values, model):
        config = config_of(values, model)
        tokenizer = load_tokenizer(str(model))
        found = read_sequences(kind, config, tokenizer, "train", rows)
        return [{name: _plain(value) for name, value in found[i].items()} for i in range(len(found))]

    return view


answers, plain_answers, texts = _sequences(ANSWERS), _sequences(PLAIN), _sequences(TEXTS)
pair_rows = _sequences([*pairs(4), {"prompt": "x", "chosen": "", "rejected": ""}], PreferenceDataset)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def judge(values, model):
    return comparable(roles.make_judge(config_of(values, model)))


def reward(values, model):
    """What the reward runner is made with."""
    config = config_of({"reward.reward_fn": digits_share, "reward.num_workers": 1, **values}, model)
    seen: dict[str, Any] = {}

    class Runner:
        def __init__(self, function, tokenizer, **options):
            seen.update(
                options, function=getattr(function, "name", None) or function, kwargs=getattr(function, "kwargs", None)
            )

    kept, roles.RewardRunner = roles.RewardRunner, Runner
    try:
        roles.build_reward(config, None)
    finally:
        roles.RewardRunner = kept
    return seen


def scorer(values, model):
    """What the reward model is loaded with."""
    seen: list[Any] = []
    kept, roles.RewardModel = roles.RewardModel, lambda *a, **k: seen.append((a, k))
    try:
        roles.make_scorer(config_of(values, model))
    finally:
        roles.RewardModel = kept
    return seen


class Stopped(Exception):
    pass


def cluster(values, model):
    """What Ray is started with, what the pools and the processes of a run of two are told."""
    import verl.single_controller.ray as ray

    config = config_of({"trainer.n_gpus_per_node": 2, **values}, model)
    seen: list[Any] = []

    class Cluster:
        def __init__(self, given):
            seen.append(comparable(given))

        def close(self):
            pass

    def pool(*arguments, stall_after_s, **options):
        host = options["settings"]
        seen.append((stall_after_s, host.timeout_s, host.log_folder, {**host.setup.keywords, "loss": None}))
        raise Stopped

    kept = ray.Cluster, ray.RayResourcePool
    ray.Cluster, ray.RayResourcePool = Cluster, pool
    try:
        groups._Run(config, "cpu")
    except Stopped:
        pass
    finally:
        ray.Cluster, ray.RayResourcePool = kept
    return seen


def libraries(values, model):
    """What is imported."""
    names = groups.external_libraries(config_of(values, model))
    groups.import_libraries(names)
    return names
