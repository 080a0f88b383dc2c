"""The attention function of the rollout twin, registered with transformers under the name ``verl_paged``.

It writes the keys and values of the tokens at hand to the paged cache and attends to what the cache holds. Where
each token belongs is said by a layout, which the model's forward is given as the keyword ``verl_layout`` and hands
down: a keyword, not a global, so that two engines never see each other's pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from transformers import AttentionInterface

from verl.errors import RolloutError

NAME = "verl_paged"
REFUSED_KEYWORDS = ("s_aux", "position_bias", "attention_sinks", "sinks", "head_mask", "layer_head_mask", "alibi")


@dataclass(frozen=True)
class Options:
    """What one layer asks for: scores = softcap * tanh(scale * q.k / softcap), keys nearer than ``window`` only."""

    scale: float
    window: int | None
    softcap: float | None


class Layout(ABC):
    """Where the tokens of one forward belong, and how they see the cache.

    Dimension key: T tokens, H query heads, G key-value heads, D head size.
    """

    @abstractmethod
    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """Write (T, G, D) keys and values of ``layer`` and return the (T, H, D) outputs of the (T, H, D) queries."""


class Recorder(Layout):
    """Notes which layers call the attention, with which shapes and options; attends within one plain sequence."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, tuple[int, int], tuple[int, int], Options]] = []

    def attend(self, layer, query, key, value, options):
        self.calls.append((layer, tuple(key.shape[1:]), tuple(value.shape[1:]), options))
        return torch.zeros_like(query)


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    verl_layout: Layout | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: (1, H, T, D) queries, (1, G, T, D) keys and values in; (1, T, H, D) outputs out.

    Raises:
        RolloutError: the model passes something that is not known here, so its answers would be wrong.
    """
    if verl_layout is None:
        raise RolloutError(f"{type(module).__name__} does not hand keywords down to its attention")
    for name in REFUSED_KEYWORDS:
        if kwargs.get(name) is not None:
            raise RolloutError(f"{type(module).__name__} passes '{name}', which the paged attention does not know")
    options = Options(
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        None if sliding_window is None else int(sliding_window),
        None if softcap is None else float(softcap),
    )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    layer: int = module.layer_idx  # type: ignore[assignment]
    return verl_layout.attend(layer, q, k, v, options)[None], None


# torch.compile must not look inside: a layer's number would make every layer a program of its own
AttentionInterface.register(NAME, torch.compiler.disable(paged_attention_forward))
