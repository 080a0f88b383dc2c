"""A real tokenizer of bytes, so that lengths in tokens are lengths in ASCII characters."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% if tools %}<|im_start|>tools{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def byte_tokenizer(*, chat_template: str | None = CHATML, add_bos: bool = False, add_eos: bool = False):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(SPECIAL + alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if add_bos or add_eos:
        single = ("<s> " if add_bos else "") + "$A" + (" </s>" if add_eos else "")
        backend.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", vocabulary["<s>"]), ("</s>", vocabulary["</s>"])]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def text_rows(count: int) -> list[dict]:
    return [{"prompt": f"p{number}"} for number in range(count)]
