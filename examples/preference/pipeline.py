"""SFT, then a reward model, then PPO against it: the three stages of RLHF as one script, on a CPU if need be.

    python examples/preference/pipeline.py                       # SmolLM2-135M of the quick start, some minutes
    python examples/preference/pipeline.py --model MODEL --sft-steps 20 --rm-steps 20 --ppo-steps 10

The task is adding two numbers. SFT learns from right answers, the reward model from pairs of a right and a wrong one,
and PPO from the reward model alone. A rule that none of them has seen checks answers to held-out sums at the end.
Every stage is an ordinary run with a folder, a report and checkpoints; running the script again goes on where it was.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

# The clone that this script lies in comes before any installed package called verl.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from verl import Trainer, load_config
from verl.data import arithmetic_task

HIGHEST = 10


def sums() -> list[dict[str, Any]]:
    """The prompts of the training sums, each with the right answer and a wrong one near it."""
    chance = random.Random(0)
    rows = []
    for row in arithmetic_task("train", HIGHEST):
        right = int(row["reward_model"]["ground_truth"])
        wrong = right + chance.choice([-2, -1, 1, 2])
        rows.append({"prompt": row["prompt"], "right": f"{right}\n", "wrong": f"{wrong}\n"})
    return rows


def stage(folder: Path, algorithm: str, model: str, steps: int, batch: int, **more: Any) -> dict[str, Any]:
    """The configuration of one stage."""
    return {
        "algorithm.name": algorithm,
        "actor_rollout_ref.model.path": model,
        "data.train_batch_size": batch,
        "data.max_length": 96,
        "data.max_prompt_length": 64,
        "data.max_response_length": 4,
        "actor_rollout_ref.rollout.stop": ["\n"],
        "trainer.total_training_steps": steps,
        "trainer.default_local_dir": str(folder),
        "trainer.project_name": "pipeline",
        "trainer.experiment_name": algorithm,
        **{key.replace("__", "."): value for key, value in more.items()},
    }


def trained(folder: Path, steps: int) -> str:
    """The model that a stage has made."""
    return str(folder / "actor" / f"global_step_{steps}")


def run(values: dict[str, Any], rows: list[dict[str, Any]], check: bool = False) -> float | None:
    """Train one stage; with ``check``, the share of held-out sums that the model then answers rightly."""
    held_out = arithmetic_task("validation", HIGHEST) if check else None
    trainer = Trainer(load_config(values=values), train_rows=rows, validation_rows=held_out)
    _, after = trainer.fit_with_scores()
    return after


def exact_match(folder: Path, model: str) -> float:
    """The rule's verdict on a model's greedy answers to the held-out sums."""
    values = stage(folder, "grpo", model, 1, 8, trainer__val_only=True)
    found = run(values, arithmetic_task("train", HIGHEST), check=True)
    return float(found or 0.0)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub name (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--output", default="runs/pipeline", help="folder of the three runs")
    parser.add_argument("--sft-steps", type=int, default=20)
    parser.add_argument("--rm-steps", type=int, default=20)
    parser.add_argument("--ppo-steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=2e-5, help="of all stages (PPO: a tenth)")
    arguments = parser.parse_args(argv)
    if arguments.model is None:
        from verl.trainer.smollm2 import model_folder

        arguments.model = str(model_folder())
    output, rows = Path(arguments.output), sums()
    rate = {"actor_rollout_ref__actor__optim__lr": arguments.lr}
    before = exact_match(output / "check-before", arguments.model)

    answers = [{"prompt": row["prompt"], "response": row["right"]} for row in rows]
    run(stage(output / "sft", "sft", arguments.model, arguments.sft_steps, 16, **rate), answers)
    sft = trained(output / "sft", arguments.sft_steps)

    pairs = [{"prompt": row["prompt"], "chosen": row["right"], "rejected": row["wrong"]} for row in rows]
    run(stage(output / "rm", "rm", sft, arguments.rm_steps, 16, **rate), pairs)
    judge = trained(output / "rm", arguments.rm_steps)

    ppo = stage(
        output / "ppo", "ppo", sft, arguments.ppo_steps, 16,
        reward_model__enable=True, reward_model__model__path=judge, reward_model__normalize="sigmoid",
        algorithm__kl_ctrl__kl_coef=0.01, actor_rollout_ref__actor__optim__lr=arguments.lr / 10,
        critic__optim__lr=arguments.lr,
    )  # fmt: skip
    run(ppo, arithmetic_task("train", HIGHEST))
    after = (
        exact_match(output / "check-sft", sft),
        exact_match(output / "check-ppo", trained(output / "ppo", arguments.ppo_steps)),
    )
    print(f"Held-out sums answered rightly: {before:.2f} before, {after[0]:.2f} after SFT, {after[1]:.2f} after PPO")


if __name__ == "__main__":
    main(sys.argv[1:])
