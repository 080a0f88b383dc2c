"""Estimators and losses of users: written as for verl, from a file, with clear errors."""

import textwrap

import numpy as np
import pytest
import torch

from verl import notices
from verl.algorithms.advantages import compute_advantage
from verl.algorithms.aggregation import GlobalCounts, use_counts
from verl.algorithms.registry import (
    get_adv_estimator_fn,
    get_policy_loss_fn,
    load_custom,
    register_adv_est,
    register_policy_loss,
    registered_names,
)
from verl.errors import ConfigError

torch.set_num_threads(1)

VERL_STYLE = """
    from enum import Enum

    import torch
    from verl.algorithms.core_algos import agg_loss, register_adv_est, register_policy_loss

    class Names(str, Enum):
        MINE = "{name}_adv"

    @register_adv_est(Names.MINE)
    def advantage(token_level_rewards, response_mask, config=None, index=None, **kwargs):
        assert index is not None and "values" in kwargs
        scores = (token_level_rewards * response_mask).sum(-1, keepdim=True) * config["bonus"]
        return scores * torch.ones_like(token_level_rewards), scores * response_mask

    @register_policy_loss("{name}_loss")
    def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config=None, rollout_is_weights=None):
        losses = -advantages * torch.exp(log_prob - old_log_prob)
        return agg_loss(loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode), {{"actor/mine": 2.0}}
"""


@pytest.fixture
def custom(tmp_path):
    """Write a file of algorithms; returns its path."""

    def write(text, name="algorithms.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


def test_a_verl_style_file_works(custom):
    path = custom(VERL_STYLE.format(name="style"))
    assert load_custom(path) == ["style_adv", "style_loss"]
    assert load_custom(path) == ["style_adv", "style_loss"]  # once is enough
    batch = {
        "token_level_rewards": torch.tensor([[0.0, 1.0, 7.0]]),
        "response_mask": torch.tensor([[1, 1, 0]]),
        "uid": np.array(["a"], dtype=object),
        "values": torch.zeros(1, 3),
    }
    found = compute_advantage("style_adv", batch, {"bonus": 2.0})
    assert found["advantages"].tolist() == [[16.0, 16.0, 0.0]]  # the reward at the masked token was moved, not lost


def test_custom_losses_divide_by_the_ambient_counts(custom):
    load_custom(custom(VERL_STYLE.format(name="counts")))
    loss_fn = get_policy_loss_fn("counts_loss")
    assert loss_fn.prepare is None
    ones = torch.ones(2, 2)
    with use_counts(GlobalCounts(tokens=8, sequences=4)):
        loss, metrics = loss_fn(ones, ones, ones, ones, "token-mean")
    assert float(loss) == -0.5
    assert metrics["actor/mine"] == 2.0


def test_what_is_wrong_with_a_file_is_said(custom, tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.py does not exist"):
        load_custom(tmp_path / "nowhere.py")
    with pytest.raises(ConfigError, match=r"broken\.py, line 2: .*syntax"):
        load_custom(custom("x = 1\ndef f(:\n", "broken.py"))
    with pytest.raises(ConfigError, match=r"raises\.py failed on import: ZeroDivisionError"):
        load_custom(custom("1 / 0\n", "raises.py"))


def test_a_failed_file_can_be_corrected_and_loaded_again(custom):
    text = """
        from verl.algorithms.registry import register_adv_est
        @register_adv_est("again")
        def f(token_level_rewards, response_mask):
            return token_level_rewards, token_level_rewards
    """
    with pytest.raises(ConfigError, match="NameError"):
        load_custom(custom(text + "\n        nonsense\n"))
    assert "again" not in registered_names()[0]
    assert load_custom(custom(text)) == ["again"]


def test_a_file_that_registers_nothing_gets_a_notice(custom):
    told = []
    remove = notices.add_sink(told.append)
    try:
        assert load_custom(custom("x = 1\n", "nothing.py")) == []
    finally:
        remove()
    assert "registers nothing" in told[0]


def test_unknown_names_get_the_nearest_one():
    with pytest.raises(ConfigError, match=r"adv_estimator='grpoo'.*did you mean 'grpo'"):
        get_adv_estimator_fn("grpoo")
    with pytest.raises(ConfigError, match=r"loss_mode='vanila'.*did you mean 'vanilla'"):
        get_policy_loss_fn("vanila")


def test_a_name_is_given_once():
    with pytest.raises(ConfigError, match=r"'grpo' of .* is already registered"):
        register_adv_est("grpo")(lambda token_level_rewards, response_mask: None)
    with pytest.raises(ConfigError, match=r"'gspo' of .* is already registered"):
        register_policy_loss("gspo")(lambda **inputs: None)


def test_a_loss_that_does_not_keep_the_contract_is_named():
    @register_policy_loss("contract_scalar")
    def scalar(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config=None):
        return log_prob.sum()

    ones = torch.ones(1, 1)
    with pytest.raises(ConfigError, match=r"contract_scalar.*must return"):
        get_policy_loss_fn("contract_scalar")(ones, ones, ones, ones)
    with pytest.raises(ConfigError, match=r"contract_scalar.*takes no rollout_is_weights"):
        get_policy_loss_fn("contract_scalar")(ones, ones, ones, ones, rollout_is_weights=ones)
