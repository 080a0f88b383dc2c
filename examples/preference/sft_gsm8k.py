"""SFT on GSM8K's solutions, and the share of test problems answered rightly before and after, for several seeds.

    python examples/preference/sft_gsm8k.py --data GSM8K --model MODEL
    python examples/preference/sft_gsm8k.py --data GSM8K --model MODEL --steps 50 --test-problems 200 --seeds 0

``--data`` is a folder with ``train.jsonl`` and ``test.jsonl`` (question, answer), as published. Answers are greedy, and
a rule compares the number after ``####``; what is learned and what is asked have the same prompt.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

# The clone that this script lies in comes before any installed package called verl.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from verl import Trainer, load_config


def settings(options: argparse.Namespace, model: str, folder: Path, seed: int, **more: Any) -> dict[str, Any]:
    return {
        "actor_rollout_ref.model.path": model,
        "data.train_files": str(Path(options.data) / "train.jsonl"),
        "data.max_prompt_length": 512,
        "data.max_response_length": options.max_response,
        "data.max_length": 512 + options.max_response,
        "data.train_batch_size": options.batch,
        "trainer.seed": seed,
        "trainer.project_name": "sft_gsm8k",
        "trainer.experiment_name": folder.name,
        "trainer.default_local_dir": str(folder),
        **{key.replace("__", "."): value for key, value in more.items()},
    }


def exact_match(options: argparse.Namespace, model: str, folder: Path) -> float:
    """The share of the first test problems that the model answers rightly."""
    values = settings(
        options, model, folder, 0, algorithm__name="grpo", trainer__val_only=True,
        data__val_files=str(Path(options.data) / "test.jsonl"), data__val_max_samples=options.test_problems,
        data__val_batch_size=options.val_batch,
    )  # fmt: skip
    _, score = Trainer(load_config(values=values)).fit_with_scores()
    return float(score or 0.0)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", default="runs/sft_gsm8k")
    parser.add_argument("--steps", type=int, default=350, help="of 64 rows: three times through the data")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--test-problems", type=int, default=1319)
    parser.add_argument("--val-batch", type=int, default=256)
    parser.add_argument("--max-response", type=int, default=320)
    options = parser.parse_args(argv)
    output = Path(options.output)
    before = exact_match(options, options.model, output / "before")
    print(f"before: {before:.3f}", flush=True)
    after = []
    for seed in options.seeds:
        folder = output / f"seed-{seed}"
        values = settings(
            options, options.model, folder, seed, algorithm__name="sft", trainer__total_training_steps=options.steps,
            actor_rollout_ref__actor__optim__lr=options.lr,
            actor_rollout_ref__actor__optim__lr_scheduler_type="cosine",
            actor_rollout_ref__actor__optim__lr_warmup_steps_ratio=0.03,
        )  # fmt: skip
        Trainer(load_config(values=values)).fit()
        model = str(folder / "actor" / f"global_step_{options.steps}")
        after.append(exact_match(options, model, output / f"after-{seed}"))
        print(f"seed {seed}: {after[-1]:.3f}", flush=True)
    spread = f" ± {statistics.stdev(after):.3f}" if len(after) > 1 else ""
    print(
        f"GSM8K, {options.test_problems} problems: {before:.3f} before, {statistics.mean(after):.3f}{spread} after SFT"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
