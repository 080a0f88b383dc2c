"""Run a Hugging Face backbone over packed sequences, whatever its family, and check that this is right for it."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from verl.errors import ModelError
from verl.models import attention, varlen
from verl.models.loading import DROPOUT_NAMES
from verl.models.packing import PackedBatch, Segment
from verl.models.sequence_parallel import sequence_of
from verl.models.tensor_parallel import tensor_parallel_of
from verl.notices import notice

LAYOUTS = {
    attention.NAME: attention.make_layout,
    varlen.VARLEN: varlen.make_varlen_layout,
    varlen.FLASH: varlen.make_varlen_layout,
}
KERNELS = {"sdpa": attention.NAME, "varlen": varlen.VARLEN, "flash_attn": varlen.FLASH}
"""Packed attentions by the hardware table's names."""


def may_share_prompts(model: PreTrainedModel) -> bool:
    """Whether the responses to a prompt may use one computation of it: not if dropout would draw one mask for all of
    them, nor if a router's loss counts each token that the model sees."""
    config = model.config.get_text_config()
    return not (model.training and has_dropout(model)) and not getattr(config, "output_router_logits", False)


def has_dropout(model: nn.Module) -> bool:
    """Whether a policy or value model draws random numbers in training."""
    config = getattr(model, "model", model).config if not isinstance(model, PreTrainedModel) else model.config
    return any(getattr(config.get_text_config(), name, None) for name in DROPOUT_NAMES)


def runs_packed(model: PreTrainedModel) -> bool:
    """Whether the model computes packed rows as they are, without padding."""
    return model.config._attn_implementation in LAYOUTS


def hidden_states(model: PreTrainedModel, packed: PackedBatch) -> torch.Tensor:
    """(T, D) last hidden states of the packed tokens."""
    parallel = tensor_parallel_of(model)
    if parallel is not None:
        return parallel.hidden_states(packed)
    backbone = model.base_model
    make_layout = LAYOUTS.get(model.config._attn_implementation)
    if make_layout is not None:
        sequence = sequence_of(model)
        if sequence is not None:
            return sequence.hidden_states(backbone, packed, make_layout(packed))
        out = backbone(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            use_cache=False,
            verl_layout=make_layout(packed),
        )
        return out.last_hidden_state[0]
    return _padded_hidden_states(backbone, packed)


def _padded_hidden_states(backbone: nn.Module, packed: PackedBatch) -> torch.Tensor:
    """The same through an ordinary right-padded batch, for families that cannot run packed: prompts are repeated."""
    device = packed.input_ids.device
    sequences = packed.segment_ids()
    width = max(len(keys) for _, keys in sequences)
    index = torch.zeros(len(sequences), width, dtype=torch.long, device=device)
    mask = torch.zeros(len(sequences), width, dtype=torch.long, device=device)
    take_row, take_column, place = [], [], []
    for row, (own, keys) in enumerate(sequences):
        index[row, : len(keys)] = torch.tensor(keys, device=device)
        mask[row, : len(keys)] = 1
        take_row += [row] * len(own)
        take_column += range(len(keys) - len(own), len(keys))
        place += own
    out = backbone(input_ids=packed.input_ids[0][index], attention_mask=mask, use_cache=False).last_hidden_state
    picked = out[torch.tensor(take_row, device=device), torch.tensor(take_column, device=device)]
    return torch.empty_like(picked).index_copy(0, torch.tensor(place, device=device), picked)


def lm_head(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor | None, float | None]:
    """(weight (V, D), bias (V,) or None, soft-cap or None) of the model's output layer."""
    if tensor_parallel_of(model) is not None:
        raise ModelError(
            f"This needs the whole output layer of {type(model).__name__}, which strategy=megatron cuts over ranks; "
            "use strategy=fsdp."
        )
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(f"{type(model).__name__} has no linear output layer (found {type(head).__name__}).")
    return head.weight, head.bias, getattr(model.config, "final_logit_softcapping", None)


def probe_batch(device: torch.device, vocabulary: int) -> PackedBatch:
    """A prompt of 5 tokens with two continuations, and a sequence of its own."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(3, vocabulary - 1), vocabulary, (1, 18), generator=generator).to(device)
    positions = torch.tensor([[*range(5), 5, 6, 7, 5, 6, *range(8)]], device=device)
    segments = [Segment(0, 5), Segment(5, 3, 0, 5), Segment(8, 2, 0, 5), Segment(10, 8)]
    none = torch.zeros(0, dtype=torch.long, device=device)
    return PackedBatch(ids, positions, segments, none, none, none, none, (0, 0))


@torch.no_grad()
def use_packed_attention(model: PreTrainedModel, *, explicit: str | None = None, kernel: str = "sdpa") -> str:
    """Switch ``model`` to packed attention if a probe gives the same numbers as its own attention, else leave it.

    Args:
        explicit: an attention implementation that the user insists on; then sequences are padded, and no probe is made.
        kernel: the packed attention to try first, one of ``KERNELS``; "sdpa", which serves all devices, comes next.

    Returns:
        The attention implementation in use.

    Raises:
        ModelError: the output layer is not a plain (soft-capped) linear layer, so log-probs would be wrong.
    """
    if explicit not in (None, "auto", attention.NAME):
        model.set_attn_implementation(explicit)
        return explicit
    training = model.training
    model.eval()
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")  # the SDPA of some transformers versions leaves the cap out
    device = next(model.parameters()).device
    probe = probe_batch(device, model.config.get_text_config().vocab_size)
    expected = _padded_hidden_states(model.base_model, probe)
    _check_head(model, probe)
    before = model.config._attn_implementation
    for name in dict.fromkeys((KERNELS[kernel], attention.NAME)):
        reason = _refusal(model, name, probe, expected)
        if reason is None:
            break
        model.set_attn_implementation(before)
        instead = "padded batches instead of packed ones" if name == attention.NAME else "packed SDPA"
        notice(f"{type(model).__name__} runs with {instead}: {reason}")
    model.train(training)
    return model.config._attn_implementation


def _refusal(model: PreTrainedModel, name: str, probe: PackedBatch, expected: torch.Tensor) -> str | None:
    """Switch to the packed attention ``name``; why its numbers cannot be used, or None if they are right."""
    try:
        model.set_attn_implementation(name)
        if model.config._attn_implementation != name:
            raise ModelError("its attention does not go through transformers' attention interface")
        got = hidden_states(model, probe)
    except (ModelError, TypeError, ValueError, NotImplementedError, KeyError, RuntimeError) as problem:
        return str(problem).splitlines()[0]
    error = float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
    return None if error < probe_tolerance(expected.dtype) else f"its hidden states differ by {error:.1e}"


def probe_tolerance(dtype: torch.dtype) -> float:
    return {torch.bfloat16: 6e-2, torch.float16: 8e-3, torch.float32: 1e-4}.get(dtype, 1e-5)


def _check_head(model: PreTrainedModel, probe: PackedBatch) -> None:
    """The model's own logits must equal our reading of its output layer."""
    if model.get_output_embeddings() is None:
        return
    weight, bias, softcap = lm_head(model)
    ids = probe.input_ids[:, 10:]
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    ours = torch.nn.functional.linear(hidden, weight, bias).float()
    if softcap is not None:
        ours = torch.tanh(ours / softcap) * softcap
    theirs = model(input_ids=ids, use_cache=False).logits[0].float()
    error = float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-6))
    if not error < probe_tolerance(hidden.dtype):
        raise ModelError(
            f"{type(model).__name__} changes its logits after the output layer in a way that is not known here "
            f"(relative difference {error:.1e}); it cannot be trained."
        )
