"""A model that vLLM can run on a CPU, and short runs over it."""

from __future__ import annotations

# vLLM's CPU attention has no kernel for heads as narrow as those of the other tests' models
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


def grpo_config(model, out, **values):
    """Few short rows, a learning rate that moves every weight visibly."""
    from verl.config import load_config

    rollout = "actor_rollout_ref.rollout"
    return load_config(values={
        "algorithm.name": "grpo", "actor_rollout_ref.model.path": str(model), "trainer.default_local_dir": str(out),
        f"{rollout}.name": "vllm", f"{rollout}.strict": True, f"{rollout}.n": 4, f"{rollout}.max_num_seqs": 16,
        f"{rollout}.temperature": 0.9, "data.train_batch_size": 4, "data.max_prompt_length": 32,
        "data.max_response_length": 16, "trainer.total_training_steps": 3, "trainer.device": "cpu",
        "actor_rollout_ref.model.dtype": "float32", "actor_rollout_ref.actor.optim.lr": 3e-3,
        "reward.reward_fn": letters, "trainer.logger": ["jsonl"], **values,
    })  # fmt: skip


def letters(data_source, solution_str, ground_truth, extra_info=None):
    return sum(character.isalpha() for character in solution_str) / 16


def rows():
    return [
        {
            "prompt": [{"role": "user", "content": f"{i}+{i}="}],
            "data_source": "sums",
            "reward_model": {"style": "rule", "ground_truth": "1"},
        }
        for i in range(8)
    ]


def train(config, **more):
    """(trainer, the metrics of each step)."""
    from verl import Trainer

    seen = []
    watch = more.pop("watch", lambda trainer, metrics: None)
    callbacks = (lambda trainer, metrics: seen.append(metrics), watch)
    trainer = Trainer(config, train_rows=rows(), callbacks=callbacks, **more)
    trainer.fit()
    return trainer, seen


def actor_of(trainer):
    return trainer.roles.actor.workers[0]
