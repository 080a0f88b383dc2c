"""Configurations of others as ours: what is carried, what is told, and that the result is read by our own loader."""

from __future__ import annotations

import json

import pytest
import yaml

from verl.cli.main import main
from verl.config import load_config, validate
from verl.config.tree import LEAVES
from verl.convert import convert_file
from verl.convert.trl import KINDS, convert_trl
from verl.convert.trl_rules import RULES
from verl.errors import ConfigError

# every field of GRPOConfig, RLOOConfig, DPOConfig, KTOConfig, SFTConfig, RewardConfig and ModelConfig of TRL 1.16
TRL_FIELDS = """
activation_offloading assistant_only_loss attn_implementation beta bnb_4bit_quant_storage bnb_4bit_quant_type
cache_implementation cast_lm_head_to_fp32 center_rewards_coefficient chat_template_kwargs chat_template_path
completion_only_loss dataset_kwargs dataset_num_proc dataset_text_field delta desirable_weight disable_dropout
discopop_tau ds3_gather_for_generation dtype entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min
entropy_target eos_token epsilon epsilon_high eval_packing f_alpha_divergence_coef f_divergence_type
generation_batch_size generation_kwargs importance_sampling_level label_smoothing ld_alpha learning_rate
load_in_4bit load_in_8bit log_completions log_completions_hub_repo log_multimodal log_unique_prompts lora_alpha
lora_dropout lora_modules_to_save lora_r lora_target_modules lora_target_parameters lora_task_type loss_type
loss_weights mask_truncated_completions max_completion_length max_length max_tool_calling_iterations min_p
model_init_kwargs model_name_or_path model_revision multi_objective_aggregation normalize_advantages
num_completions_to_print num_generations num_generations_eval num_iterations off_policy_mask_threshold packing
packing_strategy pad_to_multiple_of pad_token padding_free precompute_ref_batch_size precompute_ref_log_probs
ref_model_mixup_alpha ref_model_sync_steps remove_unused_columns repetition_penalty reward_clip_range reward_weights
router_aux_loss_coef sapo_temperature_neg sapo_temperature_pos scale_rewards shuffle_dataset steps_per_generation
sync_ref_model temperature top_entropy_quantile top_k top_p train_sampling_strategy
transformers_continuous_batching_config truncation_mode trust_remote_code undesirable_weight use_adaptive_entropy
use_bias_correction_kl use_bnb_nested_quant use_dora use_peft use_rslora use_transformers_continuous_batching
use_transformers_paged use_vllm use_weighting vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos
vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port vllm_importance_sampling_cap
vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min vllm_importance_sampling_correction
vllm_importance_sampling_mode vllm_max_model_length vllm_mode vllm_model_impl vllm_server_base_url vllm_server_host
vllm_server_port vllm_server_timeout vllm_structured_outputs_regex vllm_tensor_parallel_size
"""

TRL_YAML = """
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
dataset_name: owner/data
learning_rate: 1e-6
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
num_generations: 8
max_completion_length: 1024
beta: 0.04
epsilon_high: 0.28
loss_type: dr_grpo
scale_rewards: false
bf16: true
report_to: wandb
lr_scheduler_type: cosine
save_steps: 100
mask_truncated_completions: true
logging_steps: 1
nonsense_key: 4
"""

SCRIPT = r"""
#!/bin/bash
set -x
MODEL=${MODEL:-Qwen/Qwen2-7B-Instruct}
export N_GPUS=2
STAMP=$(date)
UNUSED=$(hostname)
train_files="['$HOME/data/train.parquet']"
max_prompt=512
tokens=$(((max_prompt + ${N_GPUS}) * 4 / 3))
python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_trainer' \
    algorithm.adv_estimator=grpo \
    data.train_files="$train_files" \
    # why this size
    data.train_batch_size=16 \
    actor_rollout_ref.model.path=$MODEL \
    +actor_rollout_ref.actor.ppo_micro_batch_size=4 \
    actor_rollout_ref.rollout.nme=vllm \
    actor_rollout_ref.rollout.temperature=hot \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$tokens \
    trainer.n_gpus_per_node=$N_GPUS trainer.nnodes=$NNODES trainer.experiment_name=$STAMP \
    trainer.logger='["console","wandb"]' $@
"""


def written(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return path


def loaded(result, tmp_path):
    """The converted file, read as `verl train --config` reads it."""
    return load_config(file=written(tmp_path, "ours.yaml", result.yaml()))


@pytest.mark.parametrize("key", TRL_FIELDS.split())
def test_every_field_of_trl_has_a_rule(key):
    assert key in RULES


def test_rules_that_name_a_key_name_a_real_one():
    assert {rule for rule in RULES.values() if isinstance(rule, str)} <= set(LEAVES)


def test_a_trl_yaml(tmp_path):
    result = convert_file(written(tmp_path, "grpo.yaml", TRL_YAML), processes=2)
    config = loaded(result, tmp_path)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert config.algorithm.name == "grpo" and config.algorithm.norm_adv_by_std_in_grpo is False
    assert (actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type) == (True, 0.04, "low_var_kl")
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, 0.28)
    assert actor.loss_agg_mode == "seq-mean-token-sum-norm"
    assert (actor.optim.lr, actor.optim.lr_scheduler_type, actor.optim.weight_decay) == (1e-6, "cosine", 0.0)
    # 8 rows x 4 x 2 processes are 64 answers, in groups of 8
    assert (config.data.train_batch_size, rollout.n, actor.ppo_micro_batch_size_per_gpu) == (8, 8, 8)
    assert config.trainer.n_gpus_per_node == 2 and config.trainer.total_epochs == 3 and config.trainer.save_freq == 100
    assert config.trainer.logger == ["console", "wandb"] and config.actor_rollout_ref.model.dtype == "bfloat16"
    assert [line.split("=")[0] for line in result.dropped] == ["mask_truncated_completions", "nonsense_key"]
    assert result.unneeded == ["logging_steps"]
    validate(config, need_data=False)


def test_steps_per_generation_are_mini_batches():
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 8}
    values = convert_trl({**given, "num_generations": 4}, "grpo", "x").values
    assert values["data.train_batch_size"] == 8 and values["actor_rollout_ref.actor.ppo_mini_batch_size"] == 2


def test_defaults_of_trl_are_written_where_ours_differ():
    values = convert_trl({}, "grpo", "x").values
    assert values["actor_rollout_ref.actor.optim.lr_scheduler_type"] == "linear"
    assert values["actor_rollout_ref.actor.loss_agg_mode"] == "token-mean"
    assert values["actor_rollout_ref.actor.use_kl_loss"] is False and values["actor_rollout_ref.rollout.n"] == 8
    rloo = convert_trl({}, "rloo", "x").values
    assert rloo["algorithm.use_kl_in_reward"] is True and rloo["algorithm.kl_ctrl.kl_coef"] == 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_gives_a_configuration_that_is_read(kind, tmp_path):
    given = {"learning_rate": 1e-5, "per_device_train_batch_size": 2, "model_name_or_path": "m/x", "seed": 3}
    config = loaded(convert_trl(given, kind, "x"), tmp_path)
    assert config.algorithm.name == kind and config.actor_rollout_ref.actor.optim.lr == 1e-5
    validate(config, need_data=False)


@pytest.mark.parametrize(
    ("kind", "given", "ours"),
    [
        ("dpo", {"loss_type": ["ipo"], "beta": 0.3}, {"preference.loss_type": "ipo", "preference.beta": 0.3}),
        ("dpo", {"max_length": 99, "truncation_mode": "keep_end"}, {"data.max_length": 99}),
        ("kto", {"desirable_weight": 2.0}, {"preference.desirable_weight": 2.0}),
        ("sft", {"use_peft": True, "lora_r": 8}, {"actor_rollout_ref.model.lora_rank": 8}),
        ("sft", {"max_steps": 7}, {"trainer.total_training_steps": 7}),
        ("grpo", {"importance_sampling_level": "sequence"}, {"actor_rollout_ref.actor.policy_loss.loss_mode": "gspo"}),
        ("grpo", {"use_vllm": True, "vllm_mode": "server", "vllm_server_port": 81},
         {"actor_rollout_ref.rollout.name": "vllm_server",
          "actor_rollout_ref.rollout.server_url": "http://localhost:81"}),
        ("grpo", {"top_k": 0}, {"actor_rollout_ref.rollout.top_k": 0}),
        ("grpo", {"delta": 5.0}, {"actor_rollout_ref.actor.clip_ratio_c": 5.0}),
        ("grpo", {"adam_beta2": 0.95}, {"actor_rollout_ref.actor.optim.betas": [0.9, 0.95]}),
        ("grpo", {"warmup_steps": 0.1}, {"actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.1}),
        ("grpo", {"repetition_penalty": 1.2}, {"actor_rollout_ref.rollout.repetition_penalty": 1.2}),
        ("grpo", {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
         {"actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine",
          "actor_rollout_ref.actor.optim.min_lr_ratio": 0.1}),
        ("sft", {"learning_rate": 4e-5, "lr_scheduler_kwargs": {"min_lr": 1e-5, "num_cycles": 1.5}},
         {"actor_rollout_ref.actor.optim.min_lr_ratio": 0.25, "actor_rollout_ref.actor.optim.num_cycles": 1.5}),
    ],
)  # fmt: skip
def test_single_keys(kind, given, ours, tmp_path):
    result = convert_trl(given, kind, "x")
    assert {key: result.values.get(key) for key in ours} == ours and result.dropped == []
    loaded(result, tmp_path)


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        ("grpo", {"loss_type": "vespo"}, "there is no such policy loss here"),
        ("grpo", {"scale_rewards": "batch"}, "scale_rewards=batch"),
        ("grpo", {"lr_scheduler_kwargs": {"power": 2}}, "lr_scheduler_kwargs.power=2"),
        ("grpo", {"lr_scheduler_type": "polynomial"}, "lr_scheduler_type=polynomial"),
        ("grpo", {"temperature": "hot"}, "temperature"),
        ("dpo", {"loss_type": ["sigmoid", "sft"]}, "one loss at a time"),
        ("dpo", {"f_divergence_type": "js_divergence"}, "the divergence is the reverse KL"),
        ("sft", {"deepspeed": "z.json"}, "there is no DeepSpeed here"),
    ],
)
def test_what_cannot_be_carried_is_told(kind, given, said, tmp_path):
    result = convert_trl(given, kind, "x")
    assert len(result.dropped) == 1 and said in result.dropped[0]
    assert f"#   {result.dropped[0]}" in result.yaml()
    loaded(result, tmp_path)


def test_a_python_script(tmp_path):
    source = """
from trl import GRPOConfig, GRPOTrainer
from datasets import load_dataset
MODEL = "Qwen/Qwen2.5-0.5B"
lr = 2e-6
args = GRPOConfig(output_dir="out", learning_rate=lr, num_generations=4, per_device_train_batch_size=4,
                  max_completion_length=compute_length())
trainer = GRPOTrainer(model=MODEL, reward_funcs=[reward_len], args=args,
                      train_dataset=load_dataset("o/d", split="train"),
                      peft_config=LoraConfig(r=8, lora_alpha=16, use_rslora=True))
"""
    result = convert_file(written(tmp_path, "train.py", source))
    config = loaded(result, tmp_path)
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen2.5-0.5B" and config.data.train_files == "o/d"
    assert config.actor_rollout_ref.actor.optim.lr == 2e-6 and config.actor_rollout_ref.model.lora_rank == 8
    assert any("max_completion_length=compute_length() is computed" in line for line in result.changed)
    assert any("reward_funcs=[reward_len]" in line for line in result.changed)
    assert any("use_rslora" in line for line in result.dropped)


def test_a_verl_script(tmp_path, monkeypatch):
    result = convert_file(written(tmp_path, "run.sh", SCRIPT))
    monkeypatch.setenv("NNODES", "1")
    monkeypatch.setenv("STAMP", "today")
    config = loaded(result, tmp_path)
    assert config.algorithm.adv_estimator == "grpo" and config.data.train_batch_size == 16
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen2-7B-Instruct" and config.trainer.nnodes == 1
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 4 and config.trainer.n_gpus_per_node == 2
    assert config.trainer.logger == ["console", "wandb"]
    dropped = " ".join(result.dropped)
    assert len(result.dropped) == 2 and "rollout.nme" in dropped and "temperature" in dropped
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 685
    assert result.unneeded == ["--config-path=config", "--config-name=ppo_trainer"]
    assert any("$NNODES is not set" in line for line in result.changed)
    assert any("$STAMP is the output of a command: its place is" in line for line in result.changed)
    assert not any("UNUSED" in line for line in result.changed)


def test_a_verl_yaml(tmp_path):
    text = "actor_rollout_ref:\n  rollout: {n: 4}\n  actor: {ppo_micro_batch_size: 2}\ntrainer: {foo: 1}\n"
    result = convert_file(written(tmp_path, "verl.yaml", text))
    assert result.values == {
        "actor_rollout_ref.rollout.n": 4, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2
    }  # fmt: skip
    assert "trainer.foo" in result.dropped[0]


def test_json_and_kinds(tmp_path):
    path = written(tmp_path, "c.json", json.dumps({"learning_rate": 1e-5, "beta": 0.2}))
    with pytest.raises(ConfigError, match="does not show which trainer it is for: give --kind"):
        convert_file(path)
    assert convert_file(path, kind="dpo").values["preference.beta"] == 0.2


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.py", "x = 1", "makes no TRL config"),
        ("a.py", "x = (", "is not Python"),
        ("a.sh", "echo hi", "starts no trainer of verl"),
        ("a.sh", "python -m openrlhf.cli.train_ppo_ray --x 1", "OpenRLHF stand in docs/coming_from.md"),
        ("a.yaml", "- 1", "holds no configuration"),
        ("a.yaml", "a: [", "cannot be read"),
        ("a.toml", "a = 1", "is a .yaml, .json, .py or .sh file"),
    ],
)
def test_files_that_cannot_be_converted(name, text, said, tmp_path, capsys):
    assert main(["convert-config", str(written(tmp_path, name, text))]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1


def test_the_command(tmp_path, capsys):
    source = written(tmp_path, "grpo.yaml", TRL_YAML)
    assert main(["convert-config", str(source)]) == 0
    out, err = capsys.readouterr()
    assert yaml.safe_load(out)["algorithm"]["name"] == "grpo" and "[not carried] nonsense_key=4" in err
    assert main(["convert-config", str(source), "--output", str(tmp_path / "o" / "ours.yaml")]) == 0
    assert "verl train --config" in capsys.readouterr().out
    assert main(["train", "--config", str(tmp_path / "o" / "ours.yaml"), "--cfg", "job"]) == 0
    assert "num_generations" not in capsys.readouterr().out
    assert main(["convert-config", str(tmp_path / "grop.yaml")]) == 2
    assert "grpo.yaml" in capsys.readouterr().err  # the near match
