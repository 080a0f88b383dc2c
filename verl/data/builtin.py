"""Data that needs no file: the arithmetic task of the quick start, and prompts for a trainer made without data."""

from __future__ import annotations

from typing import Literal

from verl.data.rows import Row
from verl.data.sampler import permutation
from verl.errors import DataError

ARITHMETIC_SOURCE = "verl/arithmetic"
BUILTIN_SOURCE = "verl/builtin"


def arithmetic_task(split: Literal["train", "validation"] = "train", high: int = 9, seed: int = 0) -> list[Row]:
    """Sums of two numbers in 1 … ``high`` after two worked ones, as rows for a prompt dataset.

    The prompt is plain text, as a base model continues it: ``1+2=3\\n4+5=9\\n{x}+{y}=``. The ground truth is the sum as
    text, to be compared with the response before its first line break. A quarter of the pairs, those with
    (7x + 3y) mod 4 = 0, are the validation split, so no problem is in both. ``seed`` gives the order.
    """
    if split not in ("train", "validation"):
        raise DataError(f"the arithmetic task has the splits train and validation, not {split!r}")
    numbers = range(1, high + 1)
    pairs = [(x, y) for x in numbers for y in numbers if ((7 * x + 3 * y) % 4 == 0) == (split == "validation")]
    if not pairs:
        raise DataError(f"the arithmetic task with numbers up to {high} has no {split} problem: use at least 2")
    ordered = [pairs[k] for k in permutation(len(pairs), seed, 0)]
    return [
        {
            "data_source": ARITHMETIC_SOURCE,
            "prompt": f"1+2=3\n4+5=9\n{x}+{y}=",
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(x + y)},
            "extra_info": {"split": split, "index": index, "x": x, "y": y},
        }
        for index, (x, y) in enumerate(ordered)
    ]


_QUESTIONS = (
    "Write two sentences about the sea in winter.",
    "Explain to a child why the sky is blue.",
    "Give three tips for learning a new language.",
    "What is the difference between weather and climate?",
    "Describe how to make a cup of tea.",
    "Name one invention that changed daily life, and say how.",
    "Write a short, friendly message that moves a meeting to tomorrow.",
    "Why do leaves change their colour in autumn?",
    "Suggest a simple dinner with rice and vegetables.",
    "Explain what a computer program is without technical words.",
    "Write a four-line poem about a train at night.",
    "What should one check before a long bicycle tour?",
    "How does a bill become due, and what does 'overdue' mean?",
    "Give one argument for and one against working from home.",
    "Summarise in one sentence what photosynthesis does.",
    "Tell a story of three sentences in which a key is lost and found.",
)


def builtin_prompts() -> list[Row]:
    """Sixteen everyday requests as rows, for a trainer that is given a reward function but no data."""
    return [
        {
            "data_source": BUILTIN_SOURCE,
            "prompt": [{"role": "user", "content": question}],
            "extra_info": {"split": "train", "index": index},
        }
        for index, question in enumerate(_QUESTIONS)
    ]
