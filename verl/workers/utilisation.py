"""Model FLOPs utilisation of an update: what the model must compute, over what the card could in that time."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from verl.hardware.memory import CARDS

FORWARD_AND_BACKWARD = 6  # operations a parameter and token: 2 forward, 2 for inputs' and 2 for weights' gradients
FROZEN = 4  # without weights' gradients


def card_flops(name: str) -> float | None:
    """FLOP/s of a card by the name that its driver gives, None if it is not in the table."""
    lowered = name.lower()
    found = [card for card in CARDS if all(word in lowered for word in card.name.lower().split())]
    return max(found, key=lambda card: len(card.name)).tflops * 1e12 if found else None


class Utilisation:
    """Counts what is computed for one model. Attention itself, and what is computed twice, is not counted."""

    def __init__(self, model: nn.Module):
        parameters = {id(p): p for p in model.parameters()}
        embeddings = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
        layer = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
        output = None if layer is None else layer.weight
        self.head = 0 if output is None else output.numel()
        looked_up = sum(p.numel() for p in embeddings.values())
        self.layers = sum(p.numel() for p in parameters.values()) - looked_up
        if output is not None and id(output) not in embeddings:
            self.layers -= self.head
        frozen = any(not p.requires_grad for p in parameters.values())
        self.factor = FROZEN if frozen else FORWARD_AND_BACKWARD
        device = next(model.parameters()).device
        self.peak = card_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self.flops = 0.0

    def add(self, computed: int, predicted: int) -> None:
        """One micro-batch: tokens through the layers, tokens through the output layer."""
        self.flops += self.factor * (self.layers * computed + self.head * predicted)

    def of(self, seconds: float) -> float | None:
        """Share of the card's matrix rate since the last call; None where that rate is not known."""
        flops, self.flops = self.flops, 0.0
        return None if self.peak is None or seconds <= 0 else flops / seconds / self.peak
