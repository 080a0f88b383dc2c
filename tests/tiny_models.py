"""Tiny random models of many families and a character tokenizer, made on the spot."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<pad>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    characters = string.digits + string.ascii_letters + " \n+=#-.,:?'\"$%!()*/<>|_"
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated", invert=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    fast.chat_template = CHAT_TEMPLATE
    fast.padding_side = "left"
    return fast


SMALL = {
    "tie_word_embeddings": False,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
LLAMA_LIKE = {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "initializer_range": 0.2}
FAMILIES: dict[str, dict] = {
    "llama": LLAMA_LIKE,
    "qwen2": LLAMA_LIKE,
    "qwen3": {**LLAMA_LIKE, "head_dim": 8},
    "mistral": {**LLAMA_LIKE, "sliding_window": 6},
    "gemma2": {**LLAMA_LIKE, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6},
    "gemma3_text": {**LLAMA_LIKE, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6},
    "phi": {**SMALL, "intermediate_size": 64, "initializer_range": 0.2},
    "phi3": {**LLAMA_LIKE, "pad_token_id": 0},
    "opt": {
        "tie_word_embeddings": False, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256, "init_std": 0.2,
    },
    "gpt2": {
        "tie_word_embeddings": False, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256,
        "initializer_range": 0.2,
    },
    "gpt_neox": {**SMALL, "intermediate_size": 64, "initializer_range": 0.2},
}  # fmt: skip


def make_config(family: str, vocab_size: int = 96, **changes):
    settings = {
        **FAMILIES[family],
        "vocab_size": vocab_size,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    return CONFIG_MAPPING[family](**{**settings, **changes})


def make_model(family: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes):
    """A random model of the family, in eval mode."""
    torch.manual_seed(seed)
    # SDPA of some transformers versions leaves Gemma 2's soft-cap out
    attention = {"attn_implementation": "eager"} if family == "gemma2" else {}
    model = AutoModelForCausalLM.from_config(make_config(family, **changes), dtype=dtype, **attention)
    return model.eval()


def save_tiny_model(folder: Path, family: str = "llama", **changes) -> Path:
    make_model(family, **changes).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def sample_batch(rows: list[tuple[list[int], list[int], list[int]]], *, extra_prompt: int = 0, extra_response: int = 0):
    """A padded sample batch from (prompt ids, response ids, response mask) rows; uid by equal prompts."""
    import numpy as np

    from verl.protocol import DataProto

    p = max(len(r[0]) for r in rows) + extra_prompt
    w = max(len(r[1]) for r in rows) + extra_response
    prompts, responses = torch.zeros(len(rows), p, dtype=torch.long), torch.zeros(len(rows), w, dtype=torch.long)
    attention = torch.zeros(len(rows), p + w, dtype=torch.long)
    mask = torch.zeros(len(rows), w, dtype=torch.long)
    for i, (prompt, response, trained) in enumerate(rows):
        prompts[i, p - len(prompt) :] = torch.tensor(prompt)
        responses[i, : len(response)] = torch.tensor(response, dtype=torch.long)
        mask[i, : len(trained)] = torch.tensor(trained, dtype=torch.long)
        attention[i, p - len(prompt) : p + len(response)] = 1
    uids = [str(r[0]) for r in rows]
    return DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": responses,
            "attention_mask": attention,
            "response_mask": mask,
            "input_ids": torch.cat([prompts, responses], 1),
        },
        non_tensors={
            "uid": np.array(uids, dtype=object),
            "sample_id": np.array([f"{u}/{i}" for i, u in enumerate(uids)], dtype=object),
        },
    )
