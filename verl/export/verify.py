"""Loading what was exported, and comparing its logits with those of the policy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from verl.dependencies import missing_dependency
from verl.errors import CheckpointError
from verl.models.loading import LOAD_ERRORS, building_models

_TEXTS = ("The sum of 12 and 30 is", "Question: how many days has a week?\nAnswer:", "def add(a, b):\n    return")
_RANDOM_ROWS, _TOKENS = 2, 48
# largest accepted mean |difference of log-probs|: rounding of the widest step between the two
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Difference:
    """Between two models on the same tokens: of their next-token log-probs, and where the best token differs.

    Attributes:
        tokens: positions compared. mean, largest: |difference| of log-probs, over all tokens of the vocabulary.
        agreement: share of positions at which both have the same most likely token.
    """

    tokens: int
    mean: float
    largest: float
    agreement: float

    def __str__(self) -> str:
        return (
            f"log-probs differ by {self.mean:.2g} on average and {self.largest:.2g} at most, "
            f"same best token at {self.agreement:.1%} of {self.tokens} positions"
        )


def compare_folder(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, *, trust_remote_code: bool = False
) -> Difference:
    """Load ``folder`` as anybody would and compare it with ``model``.

    Raises:
        CheckpointError: it cannot be loaded, or differs by more than rounding.
    """
    return _checked(model, _load(folder, trust_remote_code), tokenizer, folder)


def compare_adapter(
    merged: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    base: str,
    folder: Path,
    *,
    trust_remote_code: bool = False,
) -> Difference:
    """Put the adapter in ``folder`` on its base model and compare that with the merged policy."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise missing_dependency(error) or error from error
    model = PeftModel.from_pretrained(_load(base, trust_remote_code, merged.dtype), folder)
    return _checked(merged, model.eval(), tokenizer, folder)


def _load(path: str | Path, trust_remote_code: bool, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    with building_models():
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=trust_remote_code)
        except LOAD_ERRORS as error:
            raise CheckpointError(f"The exported model in {path} cannot be loaded: {error}") from error
    return model.eval()


def _checked(model: torch.nn.Module, other: torch.nn.Module, tokenizer, folder: Path) -> Difference:
    embeddings = model.get_input_embeddings().weight  # type: ignore[operator]
    difference = compare_logits(model, other, probe_rows(tokenizer, len(embeddings)))
    dtypes = [next(m.parameters()).dtype for m in (model, other)]
    allowed = max(_TOLERANCE.get(dtype, 1e-4) for dtype in dtypes)
    if not difference.mean <= allowed:  # also where it is not a number
        raise CheckpointError(
            f"The exported model in {folder} is not the policy: {difference} ({allowed:g} would be rounding)."
        )
    return difference


def probe_rows(tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> list[torch.Tensor]:
    """A few short texts and a few rows of random tokens, each (1, T)."""
    rows = [tokenizer(text)["input_ids"][:_TOKENS] for text in _TEXTS]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, min(vocabulary, len(tokenizer)), (_RANDOM_ROWS, _TOKENS), generator=generator)
    return [torch.tensor([row]) for row in rows if row] + list(drawn[:, None].unbind(0))


@torch.inference_mode()
def compare_logits(model: torch.nn.Module, other: torch.nn.Module, rows: list[torch.Tensor]) -> Difference:
    """Compare two models on rows of tokens (1, T); the first may have more vocabulary entries than are used."""
    total = largest = 0.0
    count = same = positions = 0
    for row in rows:
        mine, theirs = (m(input_ids=row).logits.double().log_softmax(-1) for m in (model, other))
        gap = (mine - theirs).abs()
        total, count = total + gap.sum().item(), count + gap.numel()
        largest = max(largest, gap.max().item())
        same += (mine.argmax(-1) == theirs.argmax(-1)).sum().item()
        positions += row.numel()
    return Difference(positions, total / count, largest, same / positions)
