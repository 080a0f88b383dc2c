"""The configuration's names of preference losses are those that are registered."""

from __future__ import annotations

from dataclasses import fields

from verl.algorithms.preference import PreferenceSettings, get_preference_loss, preference_loss_names
from verl.config import names
from verl.config.tree import Preference


def test_the_two_lists_agree():
    assert sorted(names.PAIR_LOSSES) == preference_loss_names("pair")
    assert sorted(names.LABEL_LOSSES) == preference_loss_names("sample")
    free = {name for name in preference_loss_names() if not get_preference_loss(name).needs_reference}
    assert free == names.REFERENCE_FREE


def test_every_setting_is_a_key_with_the_same_default():
    ours, keys = PreferenceSettings(), Preference()
    for item in fields(PreferenceSettings):
        assert getattr(keys, item.name) == getattr(ours, item.name), item.name
