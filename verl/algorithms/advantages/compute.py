"""The advantage node: find the estimator, give it what its signature asks for, keep the result clean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from verl.algorithms.masked import as_mask, upcast
from verl.algorithms.registry import accepted, get_adv_estimator_fn
from verl.algorithms.rewards_shaping import settle_rewards, usable_rows
from verl.algorithms.settings import setting
from verl.errors import ConfigError
from verl.metrics import Metrics

_STANDARD = ("index", "values", "reward_baselines", "score_valid")


def compute_advantage(name: str, batch: Mapping[str, Any], config: Any = None) -> dict[str, Any]:
    """``{"advantages": (B, R), "returns": (B, R), "metrics": Metrics}`` of the estimator registered as ``name``.

    ``batch`` holds token_level_rewards, response_mask, and by name whatever the estimator's parameters ask for
    (``index`` is the column uid; values, reward_baselines, old_log_probs, any dataset column ...); ``config`` is the
    ``algorithm`` section, whose keys fill parameters too (gamma, lam ...). A function with ``**kwargs`` also gets
    index, values, reward_baselines and score_valid where present. Run it once over the WHOLE batch, on the controller.

    Rewards are settled first: those that stand at masked positions move to the row's last trainable token. Where tokens
    were rejected after generation, ``batch["generation_mask"]`` is the mask before and ``response_mask`` the one after:
    rewards move by the former, and those at rejected tokens are dropped.

    Raises ConfigError if the batch lacks something that the estimator requires.
    """
    fn = get_adv_estimator_fn(name)
    mask = as_mask(batch["response_mask"])
    score_valid = batch.get("score_valid")
    generated = batch.get("generation_mask")
    rewards = batch["token_level_rewards"]
    if generated is not None:
        rewards = settle_rewards(rewards, generated, "move_to_last", score_valid)
    rewards = settle_rewards(rewards, mask, "move_to_last" if generated is None else "drop", score_valid)

    arguments = _arguments(name, fn, {**batch, "token_level_rewards": rewards}, config)
    advantages, returns = fn(**arguments)
    usable = mask & usable_rows(mask, score_valid).unsqueeze(-1)
    return {
        "advantages": upcast(advantages).detach().masked_fill(~usable, 0.0),
        "returns": upcast(returns).detach().masked_fill(~mask, 0.0),
        "metrics": _metrics(mask, usable),
    }


def _arguments(name: str, fn: Any, batch: dict[str, Any], config: Any) -> dict[str, Any]:
    parameters, required, takes_any = accepted(fn)
    available = dict(batch)
    if "uid" in batch:
        available["index"] = batch["uid"]  # the group id; a dataset column of that name is something else
    arguments = {"config": config} if "config" in parameters or takes_any else {}
    for parameter in parameters - {"config", "rewards_at_masked"}:
        value = available.get(parameter)
        value = setting(config, parameter, None) if value is None else value
        if value is not None:
            arguments[parameter] = value
    if takes_any:
        arguments.update({key: available[key] for key in _STANDARD if available.get(key) is not None})
    if missing := sorted(required - arguments.keys()):
        wanted = ", ".join("uid" if key == "index" else key for key in missing)
        raise ConfigError(
            f"algorithm.adv_estimator={name} needs {wanted} in the batch; there are {', '.join(sorted(batch))}"
        )
    return arguments


def _metrics(mask: Tensor, usable: Tensor) -> Metrics:
    """Rows left out, and whether there were too few tokens to normalise over (whitening then gives 0)."""
    rows = float(len(mask))
    metrics = Metrics()
    metrics.add("training/advantage_rows_excluded", rows - float(usable.any(dim=-1).sum()), reduce="sum")
    metrics.add("training/advantage_whiten_degenerate", float(int(usable.sum()) < 2), reduce="sum")
    return metrics
