"""What an update computes: tokens of packed micro-batches, operations of a model, and the rate of a card."""

from __future__ import annotations

import pytest
from tiny_models import make_model, sample_batch

from verl.models.lora import add_adapters
from verl.models.packing import computed_tokens, pack, rows_of
from verl.models.settings import LoraSettings
from verl.workers.utilisation import Utilisation, card_flops

ROWS = [
    ([5, 6, 7], [9, 10, 11], [1, 1, 1]),
    ([5, 6, 7], [12, 13], [0, 1]),
    ([5, 6, 7], [8], [0]),
    ([20, 21], [22], [1]),
]


def test_the_tokens_counted_are_those_packed():
    batch = sample_batch(ROWS)
    packed = pack(batch)
    assert computed_tokens(rows_of(batch)) == (packed.num_tokens, len(packed.target))
    assert computed_tokens([]) == (0, 0)


@pytest.mark.parametrize("tied", [True, False])
def test_the_output_layer_is_counted_once_and_the_embedding_never(tied):
    model = make_model("llama", tie_word_embeddings=tied)
    head = 96 * 32
    layers = sum(p.numel() for name, p in model.named_parameters() if "layers" in name or name.endswith("norm.weight"))
    counter = Utilisation(model)
    counter.peak = 1000.0
    counter.add(10, 3)
    assert counter.of(2.0) == 6 * (layers * 10 + head * 3) / 2000
    assert counter.of(2.0) == 0


def test_frozen_weights_need_two_thirds():
    model = make_model("llama")
    add_adapters(model, LoraSettings(rank=2))
    assert Utilisation(model).factor == 4 and Utilisation(model).peak is None


def test_cards_are_known_by_the_names_that_drivers_give():
    assert card_flops("NVIDIA H200") == 790e12
    assert card_flops("NVIDIA GeForce RTX 3090") == 71e12
    assert card_flops("Tesla P40") == 12e12 and card_flops("NVIDIA A100-SXM4-80GB") is not None
    assert card_flops("Voodoo 2") is None
