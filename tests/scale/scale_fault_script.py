"""A run with two processes that can be killed: MODEL FOLDER STEPS [max_restarts] [slow]. Prints what it does."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "trainer")]

from trainer_helpers import SETTINGS  # noqa: E402
from trainer_rewards import digits_share  # noqa: E402

from verl.cli.run import run_cli  # noqa: E402
from verl.config import load_config  # noqa: E402
from verl.data import arithmetic_task  # noqa: E402
from verl.trainer.base import Trainer  # noqa: E402
from verl.trainer.restarts import fit_with_restarts  # noqa: E402


def main(argv: list[str]) -> int:
    model, folder, steps, restarts = argv
    values = {
        **SETTINGS,
        "algorithm.name": "grpo",
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.actor.strategy": "torch",
        "trainer.default_local_dir": folder,
        "trainer.n_gpus_per_node": 2,
        "trainer.device": "cpu",
        "trainer.total_training_steps": int(steps),
        "trainer.save_freq": 1,
        "trainer.max_restarts": int(restarts),
        "reward.reward_fn": digits_share,
        "ray_kwargs.ray_init.num_cpus": 4,
        "ray_kwargs.ray_init.object_store_memory": 100_000_000,
    }

    def tell(trainer: Trainer, metrics: dict[str, float]) -> None:
        pids = [place.pid for place in trainer.roles.actor.hosts.places]
        print(f"STEP {trainer.global_steps} PIDS {' '.join(map(str, pids))}", flush=True)

    def make(config) -> Trainer:
        return Trainer(config, train_rows=arithmetic_task("train", 5), callbacks=(tell,), style="plain")

    fit_with_restarts(load_config(values=values), make)
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main, sys.argv[1:]))
