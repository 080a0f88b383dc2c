"""A GRPO step on a CPU: verl against TRL on the same few-shot task, each in a process of its own.

    python benchmarks/grpo_trl_cpu.py --trl-python /path/to/venv/bin/python [--steps 8]

Work of a step: 8 prompts (``1+2=3 4+5=9 x+y=``, x and y in 1..9) x 8 samples x 4 new tokens, SmolLM2-135M-Instruct,
reward 1 where the text before the first line break is the sum, AdamW at 2e-5, clipping at 1, no KL. Systems:

- ``verl, all rows``: every row is trained, its entropy is reported (as TRL does).
- ``verl``: the default, which skips rows whose advantage is zero (they still count in denominators).
- ``TRL bf16``: autocast to bf16 over float32 weights, no recomputation. ``TRL fp32``: the same without autocast.

A row gives the median seconds of the steps after the first two, and the peak memory of the process with its children
(the proportional set size, sampled every 0.1 s; ``peak of one`` is the main process's own highest resident set). The
CPU seconds that the main process used tell whether the machine was quiet: they are about seconds x cores then.
Systems take turns ``--repeats`` times, so that a slow minute of the machine does not fall on one of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

SYSTEMS = ("verl, all rows", "verl", "TRL bf16", "TRL fp32")
PROMPTS, SAMPLES, NEW_TOKENS, RATE = 8, 8, 4, 2e-5
WARM = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", help="interpreter with trl; without it, only verl is measured")
    parser.add_argument("--steps", type=int, default=8, help=f"steps a run, the first {WARM} of them not counted")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--model", help="a model folder in place of SmolLM2")
    parser.add_argument("--dtype", default="auto", help="of verl's weights; auto: its own choice")
    parser.add_argument("--worker", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments)
    model = arguments.model or prepared_model()
    found: dict[str, list[dict]] = {}
    for _ in range(arguments.repeats):
        for system in arguments.systems:
            python = arguments.trl_python if system.startswith("TRL") else sys.executable
            if python is None:
                continue
            result = launch(python, system, model, arguments.steps, arguments.dtype)
            print(json.dumps({"system": system, **result}), flush=True)
            found.setdefault(system, []).append(result)
    print(f"\n{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print("| system | s a step, median (min to max) | CPU s | peak GiB | peak of one GiB | reward, first to last |")
    print("|---|---|---|---|---|---|")
    for system, runs in found.items():
        seconds, used = ([s for run in runs for s in run[key][WARM:] or run[key]] for key in ("seconds", "cpu_seconds"))
        peak, own = (max(run[key] for run in runs) for key in ("peak_gib", "peak_of_one_gib"))
        spread = f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
        rewards = runs[0]["rewards"]
        memory = f"{peak:.2f} | {own:.2f}"
        print(f"| {system} | {spread} | {statistics.median(used):.2f} | {memory} | {rewards[0]} to {rewards[-1]} |")


def prepared_model() -> str:
    from verl.trainer.smollm2 import model_folder

    return str(model_folder())


def launch(python: str, system: str, model: str, steps: int, dtype: str) -> dict:
    """Run one system in a process of its own and watch its memory."""
    with tempfile.TemporaryDirectory() as folder:
        command = [python, __file__, "--worker", system, "--model", model, "--steps", str(steps), "--folder", folder]
        command += ["--dtype", dtype]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with open(Path(folder) / "log", "w") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            watch = MemoryWatch(process.pid)
            code = process.wait()
        if code:
            raise SystemExit(f"{system} failed:\n" + (Path(folder) / "log").read_text()[-4000:])
        result = json.loads((Path(folder) / "result.json").read_text())
    return {**result, "peak_gib": round(watch.stop() / 2**30, 2)}


class MemoryWatch:
    """The largest proportional set size of a process and its children."""

    def __init__(self, pid: int):
        self.pid, self.peak, self.running = pid, 0, True
        self.thread = threading.Thread(target=self.loop, daemon=True)
        self.thread.start()

    def loop(self) -> None:
        import psutil

        while self.running:
            total = 0
            try:
                top = psutil.Process(self.pid)
                for process in (top, *top.children(recursive=True)):
                    total += process.memory_full_info().pss
            except psutil.Error:  # a process ended while it was looked at
                total = 0
            self.peak = max(self.peak, total)
            time.sleep(0.1)

    def stop(self) -> int:
        self.running = False
        self.thread.join()
        return self.peak


def work(arguments: argparse.Namespace) -> None:
    folder = Path(arguments.folder)
    train = train_trl if arguments.worker.startswith("TRL") else train_verl
    seconds, rewards = train(arguments, folder)
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    wall, used = zip(*seconds, strict=True)
    result = {"seconds": [round(s, 3) for s in wall], "cpu_seconds": [round(s, 3) for s in used], "rewards": rewards}
    result["peak_of_one_gib"] = round(own, 2)
    (folder / "result.json").write_text(json.dumps(result))


def problems() -> list[tuple[str, str]]:
    """(prompt, answer) of every sum but the held-out quarter."""
    pairs = [(x, y) for x in range(1, 10) for y in range(1, 10) if (7 * x + 3 * y) % 4]
    return [(f"1+2=3\n4+5=9\n{x}+{y}=", str(x + y)) for x, y in pairs]


def score(text: str, answer: str) -> float:
    return float(text.split("\n")[0].strip() == answer)


def train_verl(arguments: argparse.Namespace, folder: Path) -> tuple[list[tuple[float, float]], list[float]]:
    from verl import Trainer
    from verl.config import load_config

    rows = [{"prompt": p, "data_source": "sums", "reward_model": {"ground_truth": a}} for p, a in problems()]
    reward = folder / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str.split('\\n')[0].strip() == ground_truth)\n"
    )
    values = {
        "algorithm.name": "grpo",
        "data.train_batch_size": PROMPTS,
        "data.max_prompt_length": 32,
        "data.max_response_length": NEW_TOKENS,
        "actor_rollout_ref.model.path": arguments.model,
        "actor_rollout_ref.model.dtype": arguments.dtype,
        "actor_rollout_ref.rollout.n": SAMPLES,
        "actor_rollout_ref.rollout.ignore_eos": True,
        "actor_rollout_ref.actor.optim.lr": RATE,
        "actor_rollout_ref.actor.use_kl_loss": False,
        "actor_rollout_ref.actor.calculate_entropy": arguments.worker == "verl, all rows",
        "reward.custom_reward_function.path": str(reward),
        "trainer.device": "cpu",
        "trainer.total_training_steps": arguments.steps,
        "trainer.save_final": False,
        "trainer.default_local_dir": str(folder / "run"),
    }
    seconds, rewards, used = [], [], [time.process_time()]

    def note(trainer, metrics: dict[str, float]) -> None:
        used.append(time.process_time())
        seconds.append((metrics["timing_s/step"], used[-1] - used[-2]))
        rewards.append(round(metrics["critic/score/mean"], 3))
        print(json.dumps({name: value for name, value in metrics.items() if "timing_s" in name}), flush=True)

    Trainer(load_config([], values=values), train_rows=rows, callbacks=(note,)).fit()
    return seconds, rewards


def train_trl(arguments: argparse.Namespace, folder: Path) -> tuple[list[tuple[float, float]], list[float]]:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    seconds, rewards = [], []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.started, self.used = time.perf_counter(), time.process_time()

        def on_step_end(self, *_, **__):
            seconds.append((time.perf_counter() - self.started, time.process_time() - self.used))

        def on_log(self, args, state, control, logs=None, **__):
            if logs and "reward" in logs:
                rewards.append(round(float(logs["reward"]), 3))

    config = GRPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        learning_rate=RATE,
        max_grad_norm=1.0,
        beta=0.0,
        max_steps=arguments.steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=arguments.worker == "TRL bf16",
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
    )
    GRPOTrainer(
        model=arguments.model,
        reward_funcs=lambda completions, answer, **_: [score(c, a) for c, a in zip(completions, answer, strict=True)],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": p, "answer": a} for p, a in problems()]),
        callbacks=[Clock()],
    ).train()
    return seconds, rewards


if __name__ == "__main__":
    main()
