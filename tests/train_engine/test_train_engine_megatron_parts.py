"""How layers lie over stages, in which order these pass over micro-batches, and who owns which moments."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from verl.train_engine.megatron_grid import Stages
from verl.train_engine.megatron_pipeline import one_forward_one_backward
from verl.train_engine.megatron_recompute import runs_of, wrap_modules
from verl.train_engine.megatron_weights import owners_of
from verl.train_engine.parallel import Recompute


@pytest.mark.parametrize(("layers", "ranks", "chunks"), [(2, 2, 1), (5, 2, 2), (32, 4, 2), (7, 3, 2)])
def test_every_layer_lies_in_one_place_and_the_model_passes_through_them_in_order(layers, ranks, chunks):
    stages = Stages(layers, ranks, chunks)
    runs = [stages.run(rank, chunk) for chunk in range(chunks) for rank in range(ranks)]
    assert [layer for run in runs for layer in run] == list(range(layers))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1 and min(map(len, runs)) >= 1
    for layer in range(layers):
        rank, chunk, number = stages.place(layer)
        assert stages.run(rank, chunk)[number] == layer


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize(("ranks", "count"), [(2, 1), (2, 5), (4, 3), (4, 8), (3, 7)])
def test_the_stages_never_wait_for_each_other_in_vain(ranks, chunks, count):
    """Played through: a pass is made once what it needs has come, and all are made."""
    orders = [list(one_forward_one_backward(rank, ranks, chunks, count)) for rank in range(ranks)]
    for order in orders:
        assert sorted(order) == sorted({(b, c, n) for b in (False, True) for c in range(chunks) for n in range(count)})
    done: set[tuple[bool, int, int]] = set()  # (backward, run of layers, micro-batch)
    places = [0] * ranks
    last = ranks * chunks - 1
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        moved = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                backward, chunk, number = order[places[rank]]
                run = chunk * ranks + rank
                if backward:
                    needs = {(False, run, number)} | ({(True, run + 1, number)} if run < last else set())
                else:
                    needs = {(False, run - 1, number)} if run else set()
                if not needs <= done:
                    break
                done.add((backward, run, number))
                places[rank] += 1
                moved = True
        assert moved, f"all wait: {[order[p] for p, order in zip(places, orders, strict=True) if p < len(order)]}"


def test_a_stage_keeps_no_more_micro_batches_than_there_are_stages_behind_it():
    for rank in range(4):
        kept = most = 0
        for turn in one_forward_one_backward(rank, 4, 1, 12):
            kept += -1 if turn.backward else 1
            most = max(most, kept)
        assert most == 4 - rank


def test_messages_between_two_ranks_are_asked_for_in_the_order_in_which_they_are_sent():
    ranks, chunks = 2, 3
    orders = [list(one_forward_one_backward(rank, ranks, chunks, 5)) for rank in range(ranks)]
    for sender in range(ranks):
        for backward in (False, True):
            step = -1 if backward else 1
            receiver = (sender + step) % ranks
            sent = [(t.chunk * ranks + sender + step, t.number) for t in orders[sender] if t.backward == backward]
            got = [(t.chunk * ranks + receiver, t.number) for t in orders[receiver] if t.backward == backward]
            inside = range(ranks * chunks)
            first = ranks * chunks - 1 if backward else 0  # receives nothing
            assert [m for m in sent if m[0] in inside] == [m for m in got if m[0] != first]


def test_every_parameter_has_one_owner_and_all_own_about_as_much():
    sizes = {f"p{i}": size for i, size in enumerate([100, 40, 40, 40, 30, 30, 20, 10, 5])}
    owners = owners_of(sizes, 3)
    assert set(owners) == set(sizes)
    held = [sum(sizes[n] for n, owner in owners.items() if owner == rank) for rank in range(3)]
    assert max(held) - min(held) <= 10
    assert owners == owners_of(dict(reversed(sizes.items())), 3), "all ranks find the same ones"
    assert set(owners_of({"only": 5}, 4).values()) == {0}


class _Layer(nn.Module):
    """Counts how often it is computed."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(3, 3)
        self.count = 0

    def forward(self, x):
        self.count += 1
        return self.mlp(x).tanh(), None


@pytest.mark.parametrize(
    ("recompute", "checkpointed", "counts"),
    [
        (Recompute(), (False, False, False), (1, 1, 1)),
        (Recompute(), (True, False, True), (2, 1, 2)),
        (Recompute("full", "uniform", 2), (False, False, False), (2, 2, 2)),
        (Recompute("full", "block", 1), (True, True, True), (2, 1, 1)),
    ],
)
def test_which_layers_are_computed_again(recompute, checkpointed, counts):
    torch.manual_seed(0)
    layers = [_Layer() for _ in range(3)]
    hidden = torch.randn(2, 3, requires_grad=True)
    expected = hidden
    for layer in layers:
        expected, _ = layer(expected)
    [wanted] = torch.autograd.grad(expected.sum(), hidden)
    for layer in layers:
        layer.count = 0
    out = hidden
    for run in runs_of(layers, checkpointed, recompute):
        out = run(out)
    [found] = torch.autograd.grad(out.sum(), hidden)
    np.testing.assert_array_equal(found.numpy(), wanted.numpy())
    assert tuple(layer.count for layer in layers) == counts


def test_modules_that_are_named_are_computed_again():
    layer = nn.Module()
    layer.self_attention = nn.Module()
    layer.self_attention.core_attention, layer.mlp = nn.Tanh(), nn.Tanh()
    layer.input_layernorm, layer.pre_mlp_layernorm = nn.Tanh(), nn.Tanh()
    counted = {}
    for name, module in (("core_attn", layer.self_attention.core_attention), ("mlp", layer.mlp)):
        counted[name] = 0

        def count(x, name=name):
            counted[name] += 1
            return x.tanh()

        module.forward = count
    wrap_modules([layer], Recompute("selective", modules=("mlp",)))
    x = torch.ones(2, requires_grad=True)
    layer.mlp(layer.self_attention.core_attention(x)).sum().backward()
    assert counted == {"core_attn": 1, "mlp": 2}
