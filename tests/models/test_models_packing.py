"""Packed forward passes give the log-probs of plain ones, for every family, whatever the padding and sharing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, make_model, sample_batch

from verl import notices
from verl.models.attention import NAME
from verl.models.backbone import may_share_prompts, use_packed_attention
from verl.models.loading import enable_gradient_checkpointing
from verl.models.packing import pack, packed_lengths, rows_of
from verl.models.policy import log_probs
from verl.protocol import DataProto

ROWS = [
    ([5, 6, 7, 8], [9, 10, 11], [1, 1, 1]),
    ([5, 6, 7, 8], [12, 13, 14, 15, 16, 17, 18], [1, 1, 1, 1, 1, 1, 1]),
    ([5, 6, 7, 8], [19], [1]),
    ([20, 21, 22, 23, 24, 25, 26, 27, 28], [29, 30, 31, 32], [1, 0, 0, 1]),
    ([40, 41], [], []),
    ([5, 6, 7, 8], [33, 34, 35], [0, 1, 0]),
]


def plain_log_probs(model, rows, width, temperature=1.0):
    """One row at a time through the model's own attention and full logits."""
    grid = torch.zeros(len(rows), width, dtype=torch.float64)
    for i, (prompt, response, mask) in enumerate(rows):
        if not response:
            continue
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0].double() / temperature
        for j, token in enumerate(response):
            if mask[j]:
                grid[i, j] = torch.log_softmax(logits[len(prompt) + j - 1], -1)[token]
    return grid


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_log_probs_equal_plain_ones(family):
    model = make_model(family)
    expected = plain_log_probs(model, ROWS, 7, temperature=0.7)
    assert use_packed_attention(model) == NAME, notices.seen()
    got, _ = log_probs(model, sample_batch(ROWS), temperature=0.7)
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=1e-4)


def test_padding_width_sharing_and_order_change_nothing():
    model = make_model("gpt2", dtype=torch.float64)
    use_packed_attention(model)
    reference, _ = log_probs(model, sample_batch(ROWS))
    wide, _ = log_probs(model, sample_batch(ROWS, extra_prompt=5, extra_response=3))
    torch.testing.assert_close(wide[:, :7], reference, atol=1e-12, rtol=0)
    order = [3, 0, 5, 4, 2, 1]
    shuffled, _ = log_probs(model, sample_batch([ROWS[i] for i in order]))
    torch.testing.assert_close(shuffled, reference[order], atol=1e-12, rtol=0)
    grids = [log_probs(model, sample_batch([row]))[0] for row in ROWS if row[1]]
    alone = torch.cat([torch.nn.functional.pad(grid, (0, 7 - grid.shape[1])) for grid in grids])
    torch.testing.assert_close(alone, reference[[0, 1, 2, 3, 5]], atol=1e-12, rtol=0)


def test_a_prompt_is_computed_once_and_the_last_token_never():
    packed = pack(sample_batch(ROWS))
    # prompt 5..8 once (4) + fed responses 2 + 6 + 0 + 1, and the row of its own 9 + 3
    assert packed.num_tokens == 4 + 2 + 6 + 0 + 1 + 9 + 3
    assert len(packed.target) == 3 + 7 + 1 + 2 + 1
    unshared = pack(sample_batch(ROWS), share_prompts=False)
    assert unshared.num_tokens == 4 * 4 + 2 + 6 + 0 + 1 + 9 + 3


def test_prompts_are_not_shared_under_dropout():
    assert may_share_prompts(make_model("llama").train())
    dropping = make_model("llama", attention_dropout=0.1)
    assert not may_share_prompts(dropping.train()) and may_share_prompts(dropping.eval())


def test_a_family_without_packed_attention_runs_padded_with_a_notice():
    model = _bloom()
    expected = plain_log_probs(model, ROWS, 7)
    assert use_packed_attention(model) != NAME
    assert any("padded" in line for line in notices.seen())
    got, _ = log_probs(model, sample_batch(ROWS))
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=1e-4)


def _bloom():
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    config = BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2)
    return BloomForCausalLM(config).eval()


def test_gradients_through_checkpointing_are_those_without():
    model = make_model("llama", dtype=torch.float64).train()
    use_packed_attention(model)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            enable_gradient_checkpointing(model)
        model.zero_grad()
        log_probs(model, sample_batch(ROWS))[0].sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, atol=1e-9, rtol=1e-6)


def test_packed_lengths_are_those_of_the_rows():
    random = np.random.default_rng(0)
    attention, mask = np.zeros((40, 11), np.int64), random.integers(0, 2, (40, 6))
    for row in attention:
        row[5 - random.integers(1, 6) : 5 + random.integers(0, 7)] = 1
    mask[0] = 0
    ids = {"prompts": torch.ones(40, 5).long(), "responses": torch.ones(40, 6).long()}
    masks = {"attention_mask": torch.from_numpy(attention), "response_mask": torch.from_numpy(mask)}
    batch = DataProto.from_dict({**ids, **masks})
    assert packed_lengths(batch).tolist() == [row.packed_length for row in rows_of(batch)]
