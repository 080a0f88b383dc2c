"""Dynamic sampling: every metric means what its name says, and the messages use the keys that one types."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from trainer_helpers import make_trainer

from verl.config import load_config, validate
from verl.errors import ConfigError, DataflowError
from verl.protocol import DataProto
from verl.trainer.nodes import filter_groups, shape_rewards

FILTER = "algorithm.filter_groups"
OVERLONG = ["reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=4", "data.max_response_length=6"]


def groups() -> DataProto:
    """Prompt "a": equal scores, one long answer; "b": scores that the penalty makes equal; "c": only acc differs."""
    rows = [("a", 1.0, 2, 1), ("a", 1.0, 6, 1), ("b", 1.0, 6, 1), ("b", 0.0, 2, 1), ("c", 0.5, 2, 0), ("c", 0.5, 2, 1)]
    mask = torch.tensor([[float(i < length) for i in range(6)] for _, _, length, _ in rows])
    scores = torch.zeros(len(rows), 6)
    for i, (_, score, length, _) in enumerate(rows):
        scores[i, length - 1] = score
    return DataProto.from_dict(
        tensors={
            "token_level_scores": scores,
            "response_mask": mask,
            "attention_mask": torch.cat([torch.ones(len(rows), 2), mask], dim=1),
            "score_valid": torch.ones(len(rows), dtype=torch.bool),
        },
        non_tensors={
            "uid": np.array([row[0] for row in rows], dtype=object),
            "sample_id": np.array([f"{row[0]}/{i}" for i, row in enumerate(rows)], dtype=object),
            "reward_extra_info": np.array([{"acc": row[3]} for row in rows], dtype=object),
        },
    )


def kept(metric: str, overrides: list[str]) -> str:
    found = filter_groups(groups(), metric=metric, config=load_config(overrides))
    return "".join(dict.fromkeys(found.non_tensor_batch["uid"]))


@pytest.mark.parametrize(
    ("metric", "without", "with_penalty"),
    [("score", "b", "b"), ("acc", "c", "c"), ("seq_reward", "b", "a"), ("seq_final_reward", "b", "a")],
)
def test_what_is_compared(metric, without, with_penalty):
    assert kept(metric, []) == without and kept(metric, OVERLONG) == with_penalty


def test_seq_reward_is_the_sum_of_the_rewards_that_train():
    config = load_config(OVERLONG)
    rewards = shape_rewards(groups(), config=config, kl_controller=None).batch["token_level_rewards"].sum(1)
    assert rewards.tolist() == [1, 0, 0, 0, 0.5, 0.5]


def test_the_final_reward_with_a_kl_is_refused_and_told_what_to_take():
    given = [f"{FILTER}.enable=true", f"{FILTER}.metric=seq_final_reward", "actor_rollout_ref.rollout.n=4"]
    validate(load_config(given), need_data=False, need_model=False)
    with pytest.raises(ConfigError, match=r"metric=seq_final_reward has the KL in it.*take metric=seq_reward"):
        validate(load_config([*given, "algorithm.use_kl_in_reward=true"]), need_data=False, need_model=False)


def test_the_limit_speaks_of_the_keys_of_the_configuration(tiny_model_dir, tmp_path):
    def equal(**_):
        return 1.0

    settings = {"algorithm__filter_groups__max_num_gen_batches": 1, "reward__reward_fn": equal}
    with pytest.raises(DataflowError) as caught:
        make_trainer(tiny_model_dir, tmp_path, algorithm="dapo", reward__overlong_buffer__len=2, **settings).fit()
    said = str(caught.value)
    for key in (f"{FILTER}.max_num_gen_batches", "data.gen_batch_size", f"{FILTER}.on_limit=smaller"):
        assert key in said
    assert "short" not in said
