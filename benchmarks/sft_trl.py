"""Seconds of an SFT step: verl and TRL 1.16.0 on the same solutions of GSM8K, in one run.

    python benchmarks/sft_trl.py --data GSM8K --trl-python trl/bin/python
    python benchmarks/sft_trl.py --data GSM8K --trl-python trl/bin/python --device cuda --dtype bfloat16 --batch 64

Prompt and completion as messages, loss on the completion alone, unequal lengths, the same batches for both, AdamW, no
activation recomputed. TRL runs once for each setting (``--trl-settings``); the best one counts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from trl_compare import arguments, compare, ours, problems, trl


def answers(folder: str, count: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": "user", "content": row["question"]}],
            "completion": [{"role": "assistant", "content": row["answer"]}],
        }
        for row in problems(folder, count)
    ]


def main(argv: list[str]) -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args(argv)
    if options.side is None:
        compare(__file__, options, answers(options.data, options.batch * options.steps))
        return
    rows = json.loads(Path(options.rows).read_text())
    if options.side == "ours":
        ours(options, "sft", rows)
        return
    from trl import SFTConfig, SFTTrainer

    trl(options, SFTTrainer, SFTConfig, rows)


if __name__ == "__main__":
    main(sys.argv[1:])
