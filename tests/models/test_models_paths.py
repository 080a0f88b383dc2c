"""A model path that is not there: the error names what is near."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model

from verl.errors import ModelError
from verl.models.loading import load_causal_lm, resolve_model_path


def test_a_missing_model_names_the_near_match(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "models" / "Tiny-0.5B").mkdir(parents=True)
    (tmp_path / "models" / "Tiny-0.5B.json").write_text("{}")
    for path in ("$HOME/models/Org/Tiny-0.5B", "~/models/Org/Tiny-0.5b", str(tmp_path / "elsewhere" / "Tiny-0.5B")):
        with pytest.raises(ModelError, match=r"There is no model folder at .*Did you mean models/Tiny-0\.5B\?$"):
            resolve_model_path(path)
    with pytest.raises(ModelError, match=r"models/Tiny-0\.5B is not a Hugging Face model folder: it is empty"):
        resolve_model_path("models/Tiny-0.5B")
    (tmp_path / "models" / "Tiny-0.5B" / "README.md").write_text("text")
    with pytest.raises(ModelError, match=r"model folder: it has no config\.json"):
        resolve_model_path("models/Tiny-0.5B")
    (tmp_path / "models" / "Tiny-0.5B" / "config.json").write_text("{}")
    assert resolve_model_path("models/Tiny-0.5B") == "models/Tiny-0.5B"
    assert resolve_model_path("org/name") == "org/name"


def test_a_folder_without_all_weights_is_no_policy(tmp_path):
    """A reward model's folder has no output layer; a random one in its place would train without a word."""
    folder = save_tiny_model(tmp_path / "m", "llama")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 of those that LlamaForCausalLM has, such as 'lm_head.weight'"):
        load_causal_lm(str(folder), dtype=torch.float32, device="cpu")
    tied = save_tiny_model(tmp_path / "tied", "llama", tie_word_embeddings=True)
    load_causal_lm(str(tied), dtype=torch.float32, device="cpu")
