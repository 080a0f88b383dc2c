"""Shared by all tests: no network, few threads, and tiny random models with a real tokenizer."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest


@pytest.fixture(autouse=True, scope="session")
def _few_threads():
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh_notices():
    from verl import notices

    notices.reset()


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """Characters as tokens: digits, letters, a few signs, ChatML marks; pad and eos are different tokens."""
    from tiny_models import make_tokenizer

    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory):
    """A folder with a tiny random Llama (fp32) and the character tokenizer."""
    from tiny_models import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")
