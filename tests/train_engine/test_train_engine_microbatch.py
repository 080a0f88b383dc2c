"""Micro-batches by computed tokens: a shared prompt counts once, nothing is lost, and packing agrees with the count."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import sample_batch

from verl.models.packing import computed_tokens, pack, rows_of
from verl.train_engine.microbatch import computed, micro_batches
from verl.workers.forward import RowCosts
from verl.workers.settings import Cut

rows_strategy = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=14)


def batch_of(rows):
    """Rows of four prompts (2, 4, 6, 8 tokens) with these (prompt, response length); length 0 has nothing to train."""
    prompts = [list(range(5, 7 + 2 * i)) for i in range(4)]
    return sample_batch([(prompts[p], list(range(20, 20 + n)), [1] * n) for p, n in rows])


@settings(deadline=None)  # busy machines
@given(rows=rows_strategy, budget=st.integers(1, 60), shares=st.booleans(), most=st.sampled_from([None, 3]))
def test_micro_batches_hold_every_row_once_and_keep_to_the_budget(rows, budget, shares, most):
    costs = RowCosts.of(batch_of(rows), shares_prompts=shares)
    parts = costs.cut(Cut(max_tokens=budget, max_rows=most))
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(rows)))
    for part in parts:
        assert most is None or len(part) <= most
        trained = [r for r in part if costs.lengths[r]]
        assert costs.tokens(part) <= budget or len(trained) == 1


@settings(deadline=None)  # busy machines
@given(rows=rows_strategy, shares=st.booleans())
def test_the_count_is_what_packing_computes(rows, shares):
    batch = batch_of(rows)
    costs = RowCosts.of(batch, shares_prompts=shares)
    packed = pack(batch, share_prompts=shares)
    assert costs.tokens(np.arange(len(rows))) == packed.num_tokens
    if shares:
        assert packed.num_tokens == computed_tokens(rows_of(batch))[0]


def test_sharing_lets_a_budget_hold_more_rows():
    rows = np.arange(8)
    lengths, groups, prompts = np.full(8, 110), np.zeros(8, np.int64), np.full(8, 100)
    assert [len(p) for p in micro_batches(rows, lengths, groups, max_tokens=220)] == [2, 2, 2, 2]
    assert [len(p) for p in micro_batches(rows, lengths, groups, shared=prompts, max_tokens=220)] == [8]
    assert computed(rows, lengths, groups, prompts) == 180 and computed(rows, lengths, groups) == 880


def test_a_group_that_is_cut_pays_its_prompt_again():
    lengths, groups, prompts = np.full(4, 110), np.zeros(4, np.int64), np.full(4, 100)
    parts = micro_batches(np.arange(4), lengths, groups, shared=prompts, max_tokens=120)
    assert [len(p) for p in parts] == [2, 2]
    assert [computed(p, lengths, groups, prompts) for p in parts] == [120, 120]
