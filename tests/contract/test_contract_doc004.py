"""Table C: the document about first steps."""

from __future__ import annotations

import inspect
import json
import math
import re

import pytest
import torch
from contract_blocks import ALPACA, COMPARE, CONFIG, MY_REWARD, TRAIN_MINIMAL
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl import RayDPOTrainer, RayPPOTrainer
from verl.data.rlhf_dataset import RLHFDataset
from verl.errors import ConfigError, DataError, RewardError
from verl.notices import seen
from verl.trainer.base import Trainer

MODEL = "Qwen/Qwen1.5-0.5B"
SECONDS = r"\d+\.\d\ds\)$"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The reader's working directory, with the data of section 2.2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    exec(compile(ALPACA, "data.py", "exec"), {})
    return tmp_path


def config_of(*, trainer=None, algorithm=None, **more):
    """The document's config, with short responses."""
    return {
        "trainer": {"n_gpus_per_node": 1, "nnodes": 1, "total_epochs": 1, **(trainer or {})},
        "actor_rollout": {"model_name": MODEL},
        "data": {"train_files": ["data/train.parquet"], "max_response_length": 8},
        "algorithm": algorithm or {},
        **more,
    }


def test_C1_C3_C6_train_minimal_as_typed(folder, run):
    done = run(folder, "train_minimal.py", TRAIN_MINIMAL)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("[INFO]")]
    assert lines[0] == "[INFO] Starting PPO training..."
    phases = [line for line in lines if "(timing/" in line]
    assert [re.sub(SECONDS, "N", line) for line in phases] == [
        "[INFO] Generating sequences... (timing/gen: N",
        "[INFO] Computing advantages... (timing/adv: N",
        "[INFO] Updating critic... (timing/update_critic: N",
        "[INFO] Updating actor... (timing/update_actor: N",
    ]
    assert lines[-1] == "[INFO] Training completed."
    assert "the training data has 3 rows, so data.train_batch_size is 3" in done.stdout
    if not torch.cuda.is_available():
        assert "trainer.n_gpus_per_node=1: there is no GPU that torch can use here, so one CPU process" in done.stdout
    assert AutoModelForCausalLM.from_pretrained(folder / "actor/global_step_1").config.model_type == "qwen2"


def test_C2_layouts_and_lengths(folder, hub_here):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.pad_token = tokenizer.eos_token
    lengths = {"max_prompt_length": 128, "max_response_length": 128}
    by_config = RLHFDataset(data_files="data/train.parquet", tokenizer=tokenizer, config=lengths)
    by_keywords = RLHFDataset(data_files="data/train.parquet", tokenizer=tokenizer, **lengths)
    assert by_config[1]["input_ids"].tolist() == by_keywords[1]["input_ids"].tolist()
    assert by_config[1]["input_ids"].shape == (128,)
    assert "解释量子纠缠" in tokenizer.decode(by_config[1]["input_ids"])
    assert by_config[0]["reward_model"]["ground_truth"].startswith("春山新绿")
    dolly = [{"instruction": "Say it.", "context": "c", "response": "r"}]
    assert RLHFDataset(dolly, tokenizer)[0]["reward_model"] == {"style": "reference", "ground_truth": "r"}
    assert RLHFDataset([{"text": "Hi"}], tokenizer, prompt_key="text")[0]["raw_prompt"] == "Hi"
    with pytest.raises(DataError, match=r"its columns are text; set data\.prompt_key"):
        RLHFDataset([{"text": "Hi"}], tokenizer)


def test_C3_references_score_by_overlap_and_nothing_is_an_error(folder, hub_here):
    metrics = RayPPOTrainer(config_of()).fit()
    assert 0 <= metrics["critic/score/mean"] < 1
    rows = [{"prompt": "Say something."}]
    with pytest.raises(RewardError, match="no built-in reward"):
        RayPPOTrainer(config_of(), train_rows=rows).fit()


def test_C4_reward_function_as_typed(folder, hub_here):
    names = {"tokenizer": AutoTokenizer.from_pretrained(MODEL)}
    exec(compile(MY_REWARD, "reward.py", "exec"), names)
    config = config_of(reward_fn=names["my_reward_fn"])
    config["data"]["max_response_length"] = 96
    metrics = RayPPOTrainer(config=config).fit()
    assert metrics["critic/score/max"] in (0.0, 0.5, 1.0, 1.5)

    def one_too_few(batch):
        return torch.zeros(2)

    with pytest.raises(RewardError, match=r"one_too_few.*returned 2 values, expected 3"):
        RayPPOTrainer(config_of(reward_fn=one_too_few)).fit()


def test_C5_the_three_switches(folder, hub_here):
    names = {}
    exec(compile(CONFIG, "config.py", "exec"), names)
    config = {**config_of(), **names["config"], "use_vllm": False, "max_colocate_count": 1}
    trainer = RayPPOTrainer(config)
    tree = trainer.config
    assert tree.algorithm.use_kl_in_reward and tree.algorithm.kl_ctrl.kl_coef == 0.01
    assert (tree.algorithm.gamma, tree.algorithm.lam) == (0.99, 0.95)
    assert tree.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == tree.critic.ppo_micro_batch_size_per_gpu == 4
    assert tree.trainer.save_freq == 10 and tree.actor_rollout_ref.rollout.name == "native"
    assert trainer.roles.reference is not None
    trainer.fit()
    assert (folder / "actor/global_step_2").is_dir(), "a final checkpoint is always written"


def test_C5_zero_is_no_reference_and_two_coefficients_are_one_too_many(folder, hub_here):
    trainer = RayPPOTrainer(config_of(algorithm={"kl_penalty": 0.0}, trainer={"save_final": False}))
    assert trainer.roles.reference is None
    trainer.fit()
    assert not (folder / "actor").exists(), "save_final=false"
    with pytest.raises(ConfigError, match=r"contradict each other.*0\.01.*0\.02"):
        RayPPOTrainer(config_of(algorithm={"kl_penalty": 0.01, "kl_ctrl": {"kl_coef": 0.02}}))
    defaults = RayPPOTrainer(config_of()).config.algorithm
    assert (defaults.gamma, defaults.lam) == (1.0, 1.0)


def test_C7_own_prompts_a_callback_and_validation(folder, hub_here, capsys):
    prompts = ["写一封辞职信", "解释区块链技术"]
    seen = []
    config = config_of(trainer={"total_epochs": 2, "sample_prompts": prompts, "sample_freq": 2, "save_final": False})
    config["data"]["val_files"] = "data/train.parquet"
    trainer = RayPPOTrainer(config, step_callback=lambda t: seen.append((t.global_steps, t._validate())))
    assert any(name.startswith("val-core/") for name in trainer._validate()), "before fit"
    trainer.fit()
    assert [step for step, _ in seen] == [1, 2] and all(len(metrics) for _, metrics in seen)
    assert len(trainer._validate()), "after fit"
    shown = capsys.readouterr().out
    assert all(prompt in shown for prompt in prompts)


def test_C8_compare_as_typed(folder, hub_here, run):
    (folder / "actor").symlink_to("runs/ppo-9/actor")  # of an earlier run
    config = config_of(trainer={"total_training_steps": 50, "save_freq": 50}, algorithm={"kl_penalty": 0.0})
    config["actor_rollout_ref"] = {"actor": {"optim": {"lr": 1e-2}}}
    config["data"]["max_response_length"] = 2
    RayPPOTrainer(config).fit()
    script = COMPARE if torch.cuda.is_available() else COMPARE.replace('"cuda"', '"cpu"')
    done = run(folder, "compare.py", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Base: ") == done.stdout.count("FT: ") == 2
    base, tuned = (
        AutoModelForCausalLM.from_pretrained(MODEL),
        AutoModelForCausalLM.from_pretrained("actor/global_step_50"),
    )
    assert not torch.equal(base.lm_head.weight, tuned.lm_head.weight)


def test_C8_a_folder_of_the_readers_own_is_left_alone(folder, hub_here, capsys):
    (folder / "actor").mkdir()
    RayPPOTrainer(config_of()).fit()
    assert list((folder / "actor").iterdir()) == []
    assert "./actor could not be linked" in capsys.readouterr().out
    assert (folder / "runs/ppo-1/actor/global_step_1/config.json").is_file()


def test_C9_too_long_a_prompt_is_named(folder, hub_here):
    config = config_of()
    config["data"]["max_prompt_length"] = 16
    with pytest.raises(DataError, match=r"train.parquet.*row.*prompt length \d+ > max_.*16"):
        RayPPOTrainer(config)


DPO_ROWS = [{"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": "no idea"} for n in range(4)]


def test_C12_dpo_in_place_of_ppo(folder, hub_here):
    with open("data/pairs.jsonl", "w") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in DPO_ROWS)
    config = config_of(algorithm={"kl_penalty": 0.2, "gamma": 0.99, "lam": 0.95})
    config["data"]["train_files"] = "data/pairs.jsonl"
    trainer = RayDPOTrainer(config)
    metrics = trainer.fit()
    assert metrics["train/loss"] == pytest.approx(math.log(2), abs=1e-3)  # the first step: policy and reference agree
    assert trainer.config.preference.beta == 0.2
    told = " ".join(seen())
    for text in (
        "0.2 is the beta of dpo",
        "algorithm.gamma is given and not used",
        "algorithm.lam is given and not used",
    ):
        assert text in told
    assert AutoModelForCausalLM.from_pretrained(folder / "actor/global_step_1").config.model_type == "qwen2"


def test_C12_without_pairs_a_reward_function_makes_it_online(folder, hub_here):
    def length(batch):
        return torch.tensor([float(len(text)) for text in batch["responses"]])

    trainer = RayDPOTrainer(config_of(reward_fn=length))
    metrics = trainer.fit()
    assert "critic/score/mean" in metrics and any("online DPO" in text for text in seen())


def test_C12_without_pairs_and_without_a_reward_the_columns_are_named(folder, hub_here):
    with pytest.raises(DataError, match=r"no column 'chosen' and no column 'rejected'.*columns are instruction"):
        RayDPOTrainer(config_of())


def test_C13_fit_is_short():
    assert len(inspect.getsource(Trainer.fit).splitlines()) < 60
    assert RayPPOTrainer.fit is Trainer.fit, "one loop"


def test_C14_torch_dtype_and_device_map(folder, hub_here, capsys):
    config = config_of(torch_dtype=torch.float32, device_map="auto", trainer={"save_final": False})
    trainer = RayPPOTrainer(config)
    assert trainer.config.actor_rollout_ref.model.dtype == "float32"
    assert "device_map" in capsys.readouterr().out
