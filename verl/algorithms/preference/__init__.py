"""Losses that learn from preferences: DPO and its family, KTO, reward models.

One loss a row, from the log-probs of whole responses; statistics over rows are computed once for the whole mini-batch
(`prepare`), so that the losses of micro-batches add up to that of the mini-batch. ``docs/preference.md`` has the table.
"""

from verl.algorithms.preference.compute import pair_loss, prepare, unpaired_loss, with_margin
from verl.algorithms.preference.inputs import PairLogps, PairRows, RunningMean, UnpairedLogps
from verl.algorithms.preference.registry import PreferenceLoss, get_preference_loss, preference_loss_names
from verl.algorithms.preference.reward_model import bradley_terry, reward_model_loss
from verl.algorithms.preference.sequences import pair_logps, sequence_logps, wpo_weights
from verl.algorithms.preference.settings import PreferenceSettings

__all__ = [
    "PairLogps",
    "PairRows",
    "PreferenceLoss",
    "PreferenceSettings",
    "RunningMean",
    "UnpairedLogps",
    "bradley_terry",
    "get_preference_loss",
    "pair_logps",
    "pair_loss",
    "preference_loss_names",
    "prepare",
    "reward_model_loss",
    "sequence_logps",
    "unpaired_loss",
    "with_margin",
    "wpo_weights",
]
