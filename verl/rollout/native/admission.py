"""Does a model qualify for the native engine? It is asked for its attention calls, and its logits are compared."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel

from verl.errors import RolloutError
from verl.rollout.base import Request, SamplingParams
from verl.rollout.native import attention
from verl.rollout.native.attention import Recorder
from verl.rollout.native.cache import CacheShape
from verl.rollout.native.runner import Runner
from verl.rollout.native.scheduler import Chunk
from verl.rollout.native.sequence import Sequence

LAYER_TYPES = {"full_attention", "sliding_attention"}
PROBE_LENGTH, PROBE_PAGE = 21, 4
TOLERANCE = {torch.bfloat16: 6e-2, torch.float16: 8e-3, torch.float32: 1e-4}


class NotQualified(RolloutError):
    """The native engine cannot drive this model; the message is the reason."""


@torch.inference_mode()
def admit(twin: PreTrainedModel, page_size: int, make_runner: Callable[[CacheShape], Runner]) -> CacheShape:
    """Switch ``twin`` to the paged attention and check it; the shape of its cache.

    Raises:
        NotQualified: why it does not qualify; the twin then has its old attention again.
    """
    before = twin.config._attn_implementation
    config = twin.config.get_text_config()
    unknown = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    try:
        if unknown:
            raise RolloutError(f"it has layers of type {', '.join(sorted(unknown))}")
        prompt = _probe_ids(config.vocab_size)
        device = next(twin.parameters()).device
        expected = twin(input_ids=torch.from_numpy(prompt)[None].to(device), use_cache=False).logits[0].double()
        twin.set_attn_implementation(attention.NAME)
        if twin.config._attn_implementation != attention.NAME:
            raise RolloutError("its attention does not go through transformers' attention interface")
        heads, size = _record(twin, prompt, device)
        dtype = next(twin.parameters()).dtype
        shape = CacheShape(config.num_hidden_layers, heads, size, page_size, dtype, device)
        probe_shape = CacheShape(config.num_hidden_layers, heads, size, PROBE_PAGE, dtype, device)
        _compare(make_runner(probe_shape), prompt, expected)
    except (RolloutError, TypeError, ValueError, NotImplementedError, KeyError, AttributeError) as problem:
        twin.set_attn_implementation(before)
        raise NotQualified(str(problem)) from problem
    return shape


def _probe_ids(vocabulary: int) -> np.ndarray:
    return np.random.default_rng(0).integers(min(3, vocabulary - 1), vocabulary, PROBE_LENGTH)


def _record(twin: PreTrainedModel, prompt: np.ndarray, device: torch.device) -> tuple[int, int]:
    """(G, D) of the cache. One attention call per layer, all of one shape."""
    recorder = Recorder()
    ids = torch.from_numpy(prompt)[None].to(device)
    positions = torch.arange(len(prompt), device=device)[None]
    twin(input_ids=ids, position_ids=positions, use_cache=False, verl_layout=recorder)
    layers = [call[0] for call in recorder.calls]
    if layers != list(range(twin.config.get_text_config().num_hidden_layers)):
        raise RolloutError(f"its {len(layers)} attention calls are not one for each layer in turn")
    shapes = {shape for _, key, value, _ in recorder.calls for shape in (key, value)}
    if len(shapes) != 1:
        raise RolloutError(f"its keys and values have several shapes: {', '.join(map(str, sorted(shapes)))}")
    return shapes.pop()


def _compare(runner: Runner, prompt: np.ndarray, expected: torch.Tensor) -> None:
    """Prefill in two chunks, then decode the rest in two rows that share pages; every logit as in a plain forward."""
    half, prefilled = 2 * PROBE_PAGE, len(prompt) - 6
    runner.cache.allocate(64)
    rows = []
    for k in range(2):
        sequence = Sequence(Request(f"probe/{k}", prompt[:prefilled], SamplingParams(len(prompt), temperature=0)), k)
        sequence.pages = [1, 2, *range(10 + 10 * k, 18 + 10 * k)]
        sequence.group, sequence.shared_pages = runner, 2
        rows.append(sequence)
    runner.prefill([Chunk(rows[0], 0, half)])
    logits = runner.prefill([Chunk(s, half, prefilled - half) for s in rows])
    error = _difference(logits, expected[prefilled - 1])
    for position in range(prefilled, len(prompt)):
        for sequence in rows:
            sequence.tokens.append(int(prompt[position]))
        error = max(error, _difference(runner.decode_logits(rows), expected[position]))
    runner.release()
    if not error < TOLERANCE.get(runner.cache.shape.dtype, 1e-5):
        raise RolloutError(f"its logits through the paged cache differ from a plain forward's by {error:.1e}")


def _difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Greatest difference, in units of the greatest logit."""
    return float((logits.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
