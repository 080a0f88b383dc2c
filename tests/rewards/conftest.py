"""A tiny word tokenizer and sample batches made of texts."""

from collections.abc import Callable

import pytest
import torch
from rewards_batches import WORDS, sample_batch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl import notices
from verl.protocol import DataProto

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="[PAD]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", eos_token="[EOS]")


@pytest.fixture
def make_batch() -> Callable[..., DataProto]:
    return sample_batch


@pytest.fixture
def said():
    """The notices of this test."""
    notices.reset()
    lines: list[str] = []
    remove = notices.add_sink(lines.append)
    yield lines
    remove()
    notices.reset()
