"""What the comparisons with TRL share: the same rows for both, sides in processes of their own, one table.

TRL runs in an environment of its own (``--trl-python``), because it is a peer and no dependency:
``python -m venv trl && trl/bin/pip install trl==1.16.0 torch==2.13.0``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CLONE = Path(__file__).resolve().parents[1]


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", required=True, help="folder with GSM8K's train.jsonl (question, answer)")
    parser.add_argument("--model", help="model folder (default: SmolLM2-135M-Instruct of the quick start)")
    parser.add_argument("--trl-python", help="interpreter of an environment with trl 1.16.0; none: ours alone")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each side")
    parser.add_argument("--batch", type=int, default=16, help="rows (pairs) of an optimizer step")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps; the first is not counted")
    parser.add_argument("--rounds", type=int, default=2, help="times that each side runs, in turn")
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=4096, help="ours: tokens of a micro-batch")
    parser.add_argument(
        "--trl-settings",
        default="1 2 4 8",
        help="rows of TRL's micro-batches; with an f behind it padding-free, which needs flash attention to be right",
    )
    parser.add_argument("--trl-attention", default="sdpa", help="attn_implementation of TRL's model")
    parser.add_argument("--side", choices=("ours", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    parser.add_argument("--micro", help=argparse.SUPPRESS)
    return parser


def problems(folder: str, count: int) -> list[dict[str, str]]:
    """The first ``count`` problems of GSM8K."""
    with open(Path(folder) / "train.jsonl", encoding="utf-8") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]
    if len(rows) < count:
        raise SystemExit(f"{folder}/train.jsonl has {len(rows)} problems, and {count} are needed")
    return rows


def compare(script: str, options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Run every side ``rounds`` times in turn, and print seconds a step: the median, and the loss at both ends."""
    if options.model is None:
        sys.path.insert(0, str(CLONE))
        from verl.trainer.smollm2 import model_folder

        options.model = str(model_folder())
    sides = [("verl", "ours", "", sys.executable)]
    if options.trl_python:
        sides += [(f"TRL, {m}", "trl", m, options.trl_python) for m in options.trl_settings.split()]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name, *_ in sides}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        path.write_text(json.dumps(rows))
        for _ in range(options.rounds):
            for name, side, micro, python in sides:
                found[name].append(_one(script, options, path, side, micro, python))
                print(f"  {name}: {found[name][-1]}", flush=True)
    print(f"\n{Path(script).name}: {len(rows)} rows, {options.batch} a step, {options.dtype} on {options.device}")
    print(f"{'':24}{'s a step':>10}{'lowest':>10}{'first loss':>12}{'last loss':>12}")
    for name, runs in found.items():
        medians = [statistics.median(run["seconds"][1:]) for run in runs]
        losses = runs[-1]["losses"]
        print(f"{name:24}{statistics.median(medians):10.2f}{min(medians):10.2f}{losses[0]:12.4f}{losses[-1]:12.4f}")
    medians = {
        name: statistics.median(statistics.median(r["seconds"][1:]) for r in runs) for name, runs in found.items()
    }
    if len(medians) > 1:
        best = min((seconds, name) for name, seconds in medians.items() if name != "verl")
        print(f"TRL's best is '{best[1]}': {best[0] / medians['verl']:.2f} times the seconds of verl")


def _one(script: str, options: argparse.Namespace, rows: Path, side: str, micro: str, python: str) -> dict[str, Any]:
    given = {
        k: v for k, v in vars(options).items() if v is not None and k not in ("side", "rows", "micro", "trl_python")
    }
    command = [python, script, "--side", side, "--rows", str(rows), "--micro", micro or "0"]
    for key, value in given.items():
        command += [f"--{key.replace('_', '-')}", str(value)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=rows.parent)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def ours(options: argparse.Namespace, algorithm: str, rows: list[dict[str, Any]], **more: Any) -> None:
    """Train with verl, and print the seconds and losses of all steps as JSON."""
    import torch

    sys.path.insert(0, str(CLONE))
    from verl import Trainer, load_config

    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        values = {
            "algorithm.name": algorithm,
            "actor_rollout_ref.model.path": options.model,
            "actor_rollout_ref.model.dtype": options.dtype,
            "actor_rollout_ref.model.enable_gradient_checkpointing": False,
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": options.tokens,
            "actor_rollout_ref.actor.use_dynamic_bsz": True,
            "actor_rollout_ref.actor.optim.lr": 1e-6,
            "actor_rollout_ref.actor.optim.weight_decay": 0.0,
            "data.train_batch_size": options.batch,
            "data.max_length": options.max_length,
            "data.shuffle": False,
            "data.truncation": "keep_start",  # as TRL does
            "trainer.device": options.device,
            "trainer.total_training_steps": options.steps,
            "trainer.save_final": False,
            "trainer.logger": [],
            "trainer.default_local_dir": folder,
            **more,
        }
        seconds, losses = [], []

        def note(_: Any, metrics: dict[str, float]) -> None:
            seconds.append(round(metrics["timing_s/step"], 3))
            losses.append(round(metrics["train/loss"], 5))

        Trainer(load_config(values=values), train_rows=rows, callbacks=(note,)).fit()
    print(json.dumps({"seconds": seconds, "losses": losses}))


def trl(
    options: argparse.Namespace, trainer_class: Any, config_class: Any, rows: list[dict[str, Any]], **more: Any
) -> None:
    """The same with TRL: the micro-batch and padding of ``--micro``, nothing recomputed, the same optimizer."""
    import time

    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    torch.set_num_threads(options.threads)
    size, free = int(options.micro.rstrip("f")), options.micro.endswith("f")
    seconds, losses = [], []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if options.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(round(time.perf_counter() - self.started, 3))

        def on_log(self, _: Any, __: Any, ___: Any, logs: dict[str, float] | None = None, **____: Any) -> None:
            if logs and "loss" in logs:
                losses.append(round(logs["loss"], 5))

    with tempfile.TemporaryDirectory() as folder:
        config = config_class(
            output_dir=folder,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=options.batch // size,
            max_steps=options.steps,
            max_length=None if free else options.max_length,  # no row of GSM8K is longer
            learning_rate=1e-6,
            weight_decay=0.0,
            lr_scheduler_type="constant",
            warmup_steps=0,
            gradient_checkpointing=False,
            use_cpu=options.device == "cpu",
            bf16=options.dtype == "bfloat16",
            padding_free=free,
            train_sampling_strategy="sequential",
            dataloader_pin_memory=options.device == "cuda",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32", "attn_implementation": options.trl_attention},
            **more,
        )
        trainer = trainer_class(
            model=options.model,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(options.model),
            callbacks=[Clock()],
        )
        trainer.train()
    print(json.dumps({"seconds": seconds, "losses": losses}))
