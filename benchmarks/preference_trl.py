"""Seconds of a DPO step: verl and TRL 1.16.0 on the same pairs of GSM8K answers, in one run.

    python benchmarks/preference_trl.py --data GSM8K --trl-python trl/bin/python
    python benchmarks/preference_trl.py --data GSM8K --trl-python trl/bin/python --device cuda --dtype bfloat16

A pair is a problem with its own solution and that of another problem, so lengths are unequal. Both sides ask the
reference in every step, train all weights with AdamW on the same batches, and recompute no activations. TRL runs once
for each micro-batch size; the best one counts. The first losses are log 2 on both sides.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from trl_compare import arguments, compare, ours, problems, trl


def pairs(folder: str, count: int) -> list[dict[str, Any]]:
    rows = problems(folder, count + 1)
    return [
        {
            "prompt": [{"role": "user", "content": row["question"]}],
            "chosen": [{"role": "assistant", "content": row["answer"]}],
            "rejected": [{"role": "assistant", "content": other["answer"]}],
        }
        for row, other in pairwise(rows)
    ]


def main(argv: list[str]) -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args(argv)
    if options.side is None:
        compare(__file__, options, pairs(options.data, options.batch * options.steps))
        return
    rows = json.loads(Path(options.rows).read_text())
    if options.side == "ours":
        ours(options, "dpo", rows)
        return
    from trl import DPOConfig, DPOTrainer

    trl(options, DPOTrainer, DPOConfig, rows, beta=0.1)


if __name__ == "__main__":
    main(sys.argv[1:])
