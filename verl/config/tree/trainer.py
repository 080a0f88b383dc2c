"""``trainer.*``: how long, how often, where to."""

# ruff: noqa: RUF009  (option() and group() make dataclass fields)
from __future__ import annotations

from dataclasses import dataclass

from verl.config import names
from verl.config.fields import option

_EVERY = "-1: never."


@dataclass(slots=True)
class Trainer:
    """The run. Steps are training steps: one rollout and its updates."""

    total_epochs: int = option(30, "Passes over the training data.", low=1)
    total_training_steps: int | None = option(None, "Stop after this many steps; `null`: by `total_epochs`.", low=1)
    project_name: str = option("verl_examples", "Project of the run, for loggers and folders.")
    experiment_name: str = option("gsm8k", "Name of the run, for loggers and folders.")
    logger: list[str] = option(
        ["console"],
        "Where metrics go: one name or a list. `metrics.jsonl` in the run folder is always written.",
        choices=names.LOGGERS,
        verl="[console, wandb]",
    )
    nnodes: int = option(1, "Machines.", low=1)
    n_gpus_per_node: int = option(1, "Devices a machine; without a GPU, processes.", low=1, verl=8)
    ray_address: str | None = option(
        None, "Ray cluster to join; `null`: `RAY_ADDRESS`, else a new one on this machine.", verl="(none)"
    )
    max_colocate_count: int = option(10, "Most roles in one process.", low=1)
    max_restarts: int = option(
        0, "Times that a run goes on from its last checkpoint after a process died.", low=0, verl="(none)"
    )
    stall_timeout_s: float = option(
        600.0, "Seconds without progress after which the stalled processes are named; 0: never.", low=0, verl="(none)"
    )
    device: str = option("auto", "`auto`: the best there is.", choices=names.DEVICES, verl="cuda")
    executor: str = option(
        "concurrent",
        "`serial` runs one node of the dataflow at a time; same results.",
        choices=("concurrent", "serial"),
        verl="(none)",
    )
    schedule: str = option(
        "sync",
        "`one_step_off`: the rollout of the next step runs while this one is trained on, with weights one step old.",
        choices=("sync", "one_step_off"),
        verl="(a recipe)",
    )
    seed: int = option(42, "Seed of the run; other seeds follow it.", low=0, below=1e18, verl="(several)")
    profile_steps: list[int] = option([], "Steps to trace with torch's profiler, see `verl profile`.", verl="null")
    profile_dir: str | None = option(
        None, "Folder of the traces; `null`: `profile` in the run's folder.", path=True, verl="outputs/profile"
    )
    full_determinism: bool = option(False, "Only deterministic kernels, at a cost in speed.")
    save_freq: int = option(-1, f"Save a checkpoint every so many steps; {_EVERY}", low=-1)
    save_final: bool = option(
        True, "Save a checkpoint at the end, also at the early one of a first Ctrl-C or SIGTERM.", verl="(true)"
    )
    test_freq: int = option(-1, f"Validate every so many steps; {_EVERY}", low=-1)
    val_before_train: bool = option(True, "Validate before the first step.")
    val_only: bool = option(False, "Validate and stop.")
    resume_mode: str = option(
        "auto", "`auto`: from the newest checkpoint of the run's folder.", choices=("auto", "disable", "resume_path")
    )
    resume_from_path: str | None = option(None, "The `global_step_N` folder for `resume_path`.", path=True)
    default_local_dir: str | None = option(
        None, "Folder of the run; `null`: `checkpoints/{project_name}/{experiment_name}`.", path=True
    )
    max_actor_ckpt_to_keep: int | None = option(None, "Newest checkpoints kept; `null`: all.", low=1)
    keep_best: bool = option(False, "Keep the best checkpoint besides.", verl="(none)")
    best_metric: str | None = option(
        None, "Metric that says which is best; `null`: the validation score.", verl="(none)"
    )
    critic_warmup: int = option(0, "First steps that train only the value model.", low=0)
    log_val_generations: int = option(0, "Validation samples shown and logged each time.", low=0)
    rollout_data_dir: str | None = option(None, "Folder for the training samples, one jsonl a step.", path=True)
    validation_data_dir: str | None = option(None, "Folder for the validation samples, one jsonl a step.", path=True)
    sample_prompts: str | list[str] = option(
        [], "Your own prompts, answered now and then: a list, or a text file with one a line.", path=True, verl="(none)"
    )
    sample_freq: int = option(-1, f"Answer them every so many steps; {_EVERY}", low=-1, verl="(none)")
