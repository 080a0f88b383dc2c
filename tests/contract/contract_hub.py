"""A local hub cache: tiny random models under the names that the documents use, laid out as huggingface_hub does."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_models import CHAT_TEMPLATE, make_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
)

from verl.data import builtin_prompts

REVISION = "0123456789abcdef0123456789abcdef01234567"
# id -> (family, head, has a chat template)
MODELS = {
    "facebook/opt-125m": ("opt", "causal", False),
    "Qwen/Qwen1.5-0.5B": ("qwen2", "causal", True),
    "Qwen/Qwen2-0.5B": ("qwen2", "causal", True),
    "Qwen/Qwen2-1.5B": ("qwen2", "causal", True),
    "Qwen/Qwen2.5-0.5B-Instruct": ("qwen2", "causal", True),
    "meta-llama/Llama-3-8b": ("llama", "causal", False),
    "OpenBMB/reward-model": ("llama", "score", False),
    "Qwen/Qwen2-0.5B-critic": ("qwen2", "value", True),
}
_TEXTS = [
    *(row["prompt"][0]["content"] for row in builtin_prompts()),
    "写一首关于春天的五言绝句 解释量子纠缠是什么，用中学生能听懂的话",
    "把下面这段话改写成正式商务邮件：'嘿，那个报告我明天发你'",
    "如何安慰失恋的朋友？ 用Python写一个快速排序 写一封辞职信 解释区块链技术 谢谢 您好 麻烦",
    'Let\'s think step by step and output the final answer after "####". How many apples does Tom have in all?',
]


def make_tokenizer(*, chat: bool) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 400 tokens; eos and no pad token, as the documents' models have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    fast.add_special_tokens({"additional_special_tokens": special[1:]})
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    return fast


def write_model(folder: Path, family: str, head: str, chat: bool) -> Path:
    """The HF folder of one tiny model."""
    tokenizer = make_tokenizer(chat=chat)
    torch.manual_seed(len(str(folder.name)))
    labels = {} if head == "causal" else {"num_labels": 1}
    config = make_config(family, len(tokenizer), max_position_embeddings=1200, pad_token_id=0, eos_token_id=0, **labels)
    kind = {
        "causal": AutoModelForCausalLM,
        "score": AutoModelForSequenceClassification,
        "value": AutoModelForTokenClassification,
    }[head]
    kind.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_hub(home: Path) -> Path:
    """``home`` as an ``HF_HOME`` that holds :data:`MODELS`."""
    for name, (family, head, chat) in MODELS.items():
        place = home / "hub" / f"models--{name.replace('/', '--')}"
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "main").write_text(REVISION)
        write_model(place / "snapshots" / REVISION, family, head, chat)
    return home
