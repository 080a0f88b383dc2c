"""Mixed into vLLM's workers: takes the trainer's weights over from where they lie. Runs in every worker process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from verl.rollout.remote.receiving import opened

PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""Of vLLM's layers: on a GPU their kernels read the parameters as they were loaded."""


class WeightReceiver:
    """``verl_open`` once, ``verl_load`` after each update."""

    model_runner: Any

    def verl_open(self, table: bytes) -> None:
        """``table``: as :func:`opened` takes it."""
        self._verl_weights = opened(table)

    @torch.no_grad()
    def verl_load(self) -> float:
        """Write the weights, as they are at this moment, into the model, in place; seconds that it took."""
        started = time.perf_counter()
        model = self.model_runner.get_model()
        if _reads_parameters(model):
            model.load_weights(self._verl_items())
        else:  # packed, quantised or absorbed weights are made again from the parameters
            self.model_runner.reload_weights(weights_iterator=self._verl_items())
            _repack_tied_heads(model)
        if next(model.parameters()).is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def _verl_items(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._verl_weights.items()


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """An output layer that shares the embedding's weight is given none of its own, so vLLM does not pack it again."""
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead" and type(module.quant_method).__name__ in PLAIN_METHODS:
            module.quant_method.process_weights_after_loading(module)


def _reads_parameters(model: torch.nn.Module) -> bool:
    """Whether parameters may simply be written: every layer is plain, and lies on a GPU."""
    if not next(model.parameters()).is_cuda:
        return False
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method).__name__ not in PLAIN_METHODS:
            return False
        if any(word in type(module).__name__ for word in ("MoE", "MLA")):
            return False
    return True
