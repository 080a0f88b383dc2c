"""Recognising a run that goes wrong while it runs, from its metrics alone: what is seen, and what helps.

A :class:`Watch` looks at the metrics of each step. It knows nothing but numbers, so it can be run over any recorded
``metrics.jsonl`` too. Each finding is told once a run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

FLAT_STEPS = 10
"""Steps in a row of which nothing could be learnt before that is said."""
TRUNCATED_STEPS, TRUNCATED_SHARE = 5, 0.98
KL_STEPS, KL_HIGH, KL_GROWTH = 3, 1.0, 10.0
"""Nats a token; a policy that trains well stays far below one."""
SPREAD_STEPS, SPREAD_HIGH, SPREAD_GROWTH = 3, 20.0, 10.0
EARLY_STEPS = 5
"""The first steps, with whose smallest value growth is compared."""

_KL = ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl")
_FLAT_GROUPS = "training/zero_std_group_ratio"
_SCORE = ("critic/score/min", "critic/score/max")
_TRUNCATED = "response_length/clip_ratio"


@dataclass(frozen=True)
class Finding:
    """``name``: what it is called; ``text``: one line for the user, with the remedy."""

    name: str
    text: str


class Watch:
    """Sees the metrics of one step after the other.

    Args:
        ignore: names of findings that are not wanted.
    """

    def __init__(self, ignore: Iterable[str] = ()):
        checks: tuple[_Check, ...] = (_FlatReward(), _KlExplosion(), _SpreadExplosion(), _Truncated())
        self._checks = [check for check in checks if check.name not in set(ignore)]

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """What this step shows for the first time. Steps without training (validation alone) change nothing."""
        found = []
        for check in list(self._checks):
            text = check.look(step, metrics)
            if text is not None:
                found.append(Finding(check.name, text))
                self._checks.remove(check)
        return found


class _Check:
    """One kind of trouble. ``look`` returns the line to tell, once it is sure."""

    name: str

    def look(self, step: int, metrics: Mapping[str, float]) -> str | None:
        raise NotImplementedError


class _InARow:
    """How many steps in a row something has been so."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, is_so: bool) -> int:
        self.count = self.count + 1 if is_so else 0
        return self.count


class _FlatReward(_Check):
    name = "flat reward"

    def __init__(self) -> None:
        self._row = _InARow()
        self._values: deque[float] = deque(maxlen=FLAT_STEPS)

    def look(self, step: int, metrics: Mapping[str, float]) -> str | None:
        low, high = (metrics.get(name) for name in _SCORE)
        ratio = metrics.get(_FLAT_GROUPS)
        if ratio is None and (low is None or high is None):
            return None  # nothing was scored in this step
        same_score = low is not None and low == high
        if high is not None:
            self._values.append(high)
        if self._row.add(same_score if ratio is None else ratio >= 1) < FLAT_STEPS:
            return None
        begin = (
            f"Flat reward: for {FLAT_STEPS} steps (up to step {step}) all responses to a prompt have had one and the "
            "same score, so nothing is learnt."
        )
        if same_score and len(set(self._values)) == 1:
            return (
                f"{begin} Every score is {high:g}: see samples.jsonl and try the reward function on a right answer; "
                "if it works, take easier prompts, more responses a prompt (rollout.n) or a reward for part of the way."
            )
        return (
            f"{begin} The prompts are too easy or too hard for this model: take others, sample more responses "
            "(rollout.n), raise rollout.temperature, or use algorithm.filter_groups.enable=true."
        )


class _KlExplosion(_Check):
    name = "KL explosion"

    def __init__(self) -> None:
        self._row: dict[str, _InARow] = {}
        self._early: dict[str, list[float]] = {}

    def look(self, step: int, metrics: Mapping[str, float]) -> str | None:
        for name in _KL:
            value = metrics.get(name)
            if value is None:
                continue
            early = self._early.setdefault(name, [])
            usual = min(early, default=0.0)  # a run may start away from its reference
            if len(early) < EARLY_STEPS and math.isfinite(value):
                early.append(abs(value))
            exploded = not math.isfinite(value) or (abs(value) > KL_HIGH and abs(value) > KL_GROWTH * usual)
            if self._row.setdefault(name, _InARow()).add(exploded) >= KL_STEPS:
                return self._text(name, value, step)
        return None

    @staticmethod
    def _text(name: str, value: float, step: int) -> str:
        if name == "actor/ppo_kl":
            return (
                f"KL explosion: within one step the policy moves {value:.3g} nats a token away from itself ({name}, "
                f"step {step}): lower actor.optim.lr, use fewer ppo_epochs, or a smaller actor.clip_ratio."
            )
        return (
            f"KL explosion: the policy is {value:.3g} nats a token away from the reference ({name}, step {step}) and "
            "likely to write nonsense: lower actor.optim.lr, raise the KL coefficient (algorithm.kl_ctrl.kl_coef or "
            "actor.kl_loss_coef), and go on from an earlier checkpoint (trainer.resume_mode=resume_path)."
        )


class _SpreadExplosion(_Check):
    name = "reward spread explosion"

    def __init__(self) -> None:
        self._row = _InARow()
        self._early: list[float] = []

    def look(self, step: int, metrics: Mapping[str, float]) -> str | None:
        low, high = (metrics.get(name) for name in _SCORE)
        if low is None or high is None:
            return None
        spread = high - low
        usual = min(self._early, default=None)
        if len(self._early) < EARLY_STEPS and math.isfinite(spread) and spread > 0:
            self._early.append(spread)
        grown = not math.isfinite(spread) or (
            usual is not None and spread > SPREAD_HIGH and spread > SPREAD_GROWTH * usual
        )
        if self._row.add(grown) < SPREAD_STEPS:
            return None
        before = "" if usual is None else f", {usual:.3g} in the first steps"
        return (
            f"Reward spread explosion: scores reach from {low:.3g} to {high:.3g} (step {step}{before}). Raw logits of "
            'a reward model grow without bound: use RewardModel(..., normalize="sigmoid"), or clip your reward.'
        )


class _Truncated(_Check):
    name = "all answers truncated"

    def __init__(self) -> None:
        self._row = _InARow()

    def look(self, step: int, metrics: Mapping[str, float]) -> str | None:
        share = metrics.get(_TRUNCATED)
        if share is None:
            return None
        mean, best = metrics.get("critic/score/mean"), metrics.get("critic/score/max")
        # short answers that need no end, and are mostly right
        solved = mean is not None and best is not None and mean >= best / 2 > 0
        if self._row.add(share >= TRUNCATED_SHARE and not solved) < TRUNCATED_STEPS:
            return None
        length = metrics.get("response_length/max")
        limit = "" if length is None else f" of {length:.0f} tokens"
        return (
            f"All answers truncated: for {TRUNCATED_STEPS} steps (up to step {step}) {share:.0%} of the responses have "
            f"hit the limit{limit} before they ended, and an answer at their end is never seen: raise "
            "data.max_response_length, give a rollout.stop text, or use a model that writes its end token (a base "
            "model without a chat template rarely does)."
        )
