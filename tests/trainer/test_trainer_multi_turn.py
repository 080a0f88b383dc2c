"""Whole steps over conversations: what the environment says is seen by the policy, and not trained."""

from __future__ import annotations

import pytest
import torch
from trainer_helpers import make_trainer, weights

from verl.config import load_config, validate
from verl.errors import ConfigError

STOPS = list("0123456789abcdefghijklmnopqrst")  # a random model ends its turns soon
SEVERAL = {
    "data__max_response_length": 24,
    "actor_rollout_ref__rollout__stop": STOPS,
    "actor_rollout_ref__rollout__multi_turn__enable": True,
    "actor_rollout_ref__rollout__multi_turn__max_assistant_turns": 3,
}
SAID = "no, again: "


def environment(messages, row):
    """Argues twice with each even problem."""
    assert messages[0]["role"] == "user" and row["data_source"] == "verl/arithmetic"
    return [{"role": "user", "content": SAID}] if int(str(row["index"])) % 2 == 0 else None


def turns_share(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(SAID.strip() in solution_str) + 0.1 * len(solution_str), "turns": extra_info["num_turns"]}


def one_run(tiny_model_dir, folder, **changes):
    trainer = make_trainer(
        tiny_model_dir,
        folder,
        **{
            **SEVERAL,
            "actor_rollout_ref__rollout__multi_turn__environment": environment,
            "reward__reward_fn": turns_share,
            **changes,
        },
    )
    kept = []
    run_flow = trainer.run_flow

    def keeping(*args, **kwargs):
        kept.append(run_flow(*args, **kwargs))
        return kept[-1]

    trainer.run_flow = keeping
    trainer.fit()
    return trainer, kept


def test_steps_over_conversations(tiny_model_dir, tmp_path):
    trainer, steps = one_run(tiny_model_dir, tmp_path / "a")
    samples = steps[0].frames["sample"]
    attention = samples.batch["attention_mask"][:, samples.batch["prompts"].shape[1] :].bool()
    sampled = samples.batch["response_mask"].bool()
    given = attention & ~sampled
    assert given.any() and not (sampled & ~attention).any()
    for row in range(len(samples)):
        texts = trainer.tokenizer.decode(samples.batch["responses"][row][given[row]])
        turns = samples.non_tensor_batch["__num_turns__"][row]
        assert texts == SAID * (turns // 2)
    assert (samples.batch["rollout_log_probs"][given] == 0).all()
    assert (samples.batch["advantages"][given] == 0).all()
    metrics = trainer.metrics
    assert metrics["num_turns/min"] == 1 and metrics["num_turns/max"] > 1
    assert metrics["reward/turns/mean"] == pytest.approx(metrics["num_turns/mean"])
    # the rollout's log-probs of a turn are those of training, with all that was said before it
    assert metrics["training/rollout_probs_diff_max"] < 1e-4
    assert metrics["actor/grad_norm"] > 0


def test_serial_and_concurrent_executors_agree(tiny_model_dir, tmp_path):
    results = []
    for executor in ("serial", "concurrent"):
        trainer, _ = one_run(tiny_model_dir, tmp_path / executor, trainer__executor=executor)
        results.append(weights(trainer))
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_what_is_wrong_is_told_before_anything_loads(tmp_path):
    key = "actor_rollout_ref.rollout.multi_turn"
    base = {"actor_rollout_ref.model.path": "m", "data.train_files": "x", f"{key}.enable": True}
    for values, message in (
        ({}, "needs .*tool_config_path"),
        ({f"{key}.environment_path": "missing.py:f"}, "must name a function of a file"),
        (
            {f"{key}.environment": environment, f"{key}.tool_config_path": "t.py"},
            "tool_config_path and environment are given",
        ),
        ({f"{key}.environment": environment, "algorithm.adv_estimator": "remax"}, "of one turn"),
    ):
        with pytest.raises(ConfigError, match=message):
            validate(load_config(values={**base, **values}))


def test_own_prompts_are_told_of_the_tools_as_training_prompts_are(tiny_model_dir, tmp_path):
    tools = tmp_path / "tools.py"
    tools.write_text(
        'def add(a: int, b: int) -> int:\n    """Sum.\n\n    Args:\n        a: One.\n        b: Two.\n    """\n'
    )
    template = (
        "{% for tool in tools or [] %}{{ tool.function.name }}={% endfor %}"
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    trainer = make_trainer(
        tiny_model_dir,
        tmp_path / "run",
        **SEVERAL,
        data__apply_chat_template="true",
        actor_rollout_ref__rollout__multi_turn__tool_config_path=str(tools),
        actor_rollout_ref__model__custom_chat_template=template,
        trainer__sample_prompts=["2+2="],
        trainer__sample_freq=1,
    )
    trained = trainer.tokenizer.decode(trainer.plan.train[0]["prompt_ids"])
    shown = trainer.tokenizer.decode(trainer.evaluation.prompts.non_tensor_batch["prompt_ids"][0])
    trainer.close()
    assert trained.startswith("add=") and shown == "add=2+2="
