"""Rollouts through vLLM against vLLM by itself, and what handing new weights over takes, on one GPU.

    python benchmarks/vllm_rollout.py --shape 0.5b                 # alone, engine, sync and a colocated GRPO run
    python benchmarks/vllm_rollout.py --shape 7b --parts alone,engine,sync
    python benchmarks/vllm_rollout.py --model PATH --dtype float32 --parts engine,sync   # a real model, on a CPU too

Random weights in the shape of Qwen2.5 and a tokenizer of characters: they measure speed, never quality. Parts, each in
a process of its own, one JSON line a result:

* ``alone``: ``vllm.LLM.generate`` on the work: ``--prompts`` prompts of 128 tokens, ``--n`` samples of each,
  ``--new`` tokens, temperature 1, the log-prob of each sampled token. Once with a seed for each request, as verl
  samples, and once without.
* ``engine``: the same work through verl's VLLMEngine, from submit to the last row.
* ``sync``: an update of all weights handed over, the median of ``--rounds``: ``weight_load`` (vLLM reads and writes
  them), ``weight_sync`` (from the call to ready, waking up included), with and without sleeping before it.
* ``train``: a colocated GRPO run of ``--steps`` steps; the metrics of each.

``overhead`` compares the medians of ``engine`` and of ``alone`` with seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from rollout_decode import shape_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

PROMPT = 128


def tell(**values) -> None:
    print(json.dumps(values), flush=True)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens, enough for prompts and rewards."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return fast


def model_folder(args: argparse.Namespace, weights: bool) -> str:
    """A folder with config and tokenizer; with ``weights`` also random ones."""
    if args.model:
        return args.model
    folder = Path(tempfile.gettempdir()) / f"verl-bench-{args.shape}-{args.dtype}"
    config = shape_config(args.shape)
    config.architectures, config.dtype = ["Qwen2ForCausalLM"], getattr(torch, args.dtype)
    config.pad_token_id, config.eos_token_id = 0, 1
    if weights and not (folder / "done").exists():
        torch.manual_seed(0)
        with torch.device(args.device):
            AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).save_pretrained(folder)
        (folder / "done").touch()
    config.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def prompts_of(args: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    return np.random.default_rng(1).integers(5, vocabulary - 5, (args.prompts, PROMPT)).tolist()


def limits(args: argparse.Namespace) -> dict:
    return {
        "max_model_len": PROMPT + args.new,
        "max_num_seqs": args.prompts * args.n,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": args.memory,
    }


def alone(args: argparse.Namespace) -> None:
    from vllm import LLM, SamplingParams

    folder = model_folder(args, weights=False)
    started = time.perf_counter()
    llm = LLM(folder, load_format="dummy", dtype=args.dtype, enable_prefix_caching=True, **limits(args))
    tell(part="alone", setup_s=time.perf_counter() - started)
    prompts = prompts_of(args, AutoConfig.from_pretrained(folder).vocab_size)
    common = {"max_tokens": args.new, "ignore_eos": True, "logprobs": 0, "detokenize": False}
    for seeded in (True, False):
        seconds = []
        for run in range(args.runs + 1):
            llm.reset_prefix_cache()
            work = [(ids, run * 10_000 + i) for i, ids in enumerate(prompts * args.n)]
            params = [SamplingParams(seed=seed if seeded else None, **common) for _, seed in work]
            started = time.perf_counter()
            done = llm.generate([{"prompt_token_ids": ids} for ids, _ in work], params, use_tqdm=False)
            seconds.append(time.perf_counter() - started)
        told(args, "alone", seconds[1:], sum(len(d.outputs[0].token_ids) for d in done), seeded=seeded)


def told(args: argparse.Namespace, part: str, seconds: list[float], tokens: int, **more) -> None:
    median = statistics.median(seconds)
    tell(
        part=part, shape=args.model or args.shape, tokens=tokens, s=median, tok_s=tokens / median, runs=seconds, **more
    )


def build_engine(args: argparse.Namespace, sleep: bool):
    from verl.hybrid import make_twin
    from verl.models.loading import load_tokenizer
    from verl.rollout.vllm.engine import VLLMEngine
    from verl.rollout.vllm.settings import VLLMSettings

    folder = model_folder(args, weights=False)
    dtype = getattr(torch, args.dtype)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(args.device)
    else:
        with torch.device(args.device):
            model = AutoModelForCausalLM.from_config(shape_config(args.shape), dtype=dtype)
    started = time.perf_counter()
    settings = VLLMSettings(sleep=sleep, **limits(args))
    engine = VLLMEngine(make_twin(model), load_tokenizer(folder), (1,), settings)
    tell(part="setup", sleep=sleep, setup_s=time.perf_counter() - started)
    return model, engine


def engine(args: argparse.Namespace) -> None:
    from verl.rollout import Request, SamplingParams

    _, made = build_engine(args, sleep=False)
    prompts = prompts_of(args, made.vocabulary)
    params, seconds = SamplingParams(args.new, ignore_eos=True), []
    for run in range(args.runs + 1):
        made.weights_changed()  # the prefix cache is empty, as after an update
        requests = [
            Request(f"{run}/{i}", np.array(ids), params, run * 10_000 + i) for i, ids in enumerate(prompts * args.n)
        ]
        started = time.perf_counter()
        done = made.generate(requests)
        seconds.append(time.perf_counter() - started)
    told(args, "engine", seconds[1:], sum(len(d.token_ids) for d in done))
    made.close()


def sync(args: argparse.Namespace) -> None:
    for sleep in (False, True):
        model, made = build_engine(args, sleep)
        taken: dict[str, list[float]] = {}
        for round_ in range(args.rounds + 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.001)
            made.weights_changed()
            measured = made.take_metrics()
            if round_ > 1:  # the first ones open handles and compile
                for name, value in measured.items():
                    taken.setdefault(name.removeprefix("timing_s/"), []).append(value)
            made.release()
        medians = {name: statistics.median(values) for name, values in taken.items()}
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        tell(part="sync", shape=args.model or args.shape, sleep=sleep, gib=size / 2**30, rounds=args.rounds, **medians)
        made.close()
        del model, made


def train(args: argparse.Namespace) -> None:
    from verl import Trainer
    from verl.config import load_config

    rollout = "actor_rollout_ref.rollout"
    config = load_config(values={
        "algorithm.name": "grpo", "actor_rollout_ref.model.path": model_folder(args, weights=True),
        "trainer.default_local_dir": tempfile.mkdtemp(), "trainer.total_training_steps": args.steps,
        "trainer.save_final": False, "trainer.logger": ["jsonl"], "actor_rollout_ref.model.dtype": args.dtype,
        "trainer.device": args.device, f"{rollout}.name": args.engine, f"{rollout}.strict": True,
        f"{rollout}.n": args.n, f"{rollout}.ignore_eos": True, f"{rollout}.max_num_seqs": args.prompts * args.n,
        f"{rollout}.gpu_memory_utilization": args.memory, "data.train_batch_size": args.prompts,
        "data.max_prompt_length": PROMPT, "data.max_response_length": args.new,
        "reward.reward_fn": lambda batch: [len(set(ids.tolist())) / args.new for ids in batch["response_ids"]],
        "actor_rollout_ref.actor.optim.lr": 1e-6,
    })  # fmt: skip
    rows = [{"prompt": f"{i:0{PROMPT}d}"} for i in range(args.prompts * args.steps)]
    shown = ("timing_s/", "training/rollout", "rollout/", "perf/", "actor/grad_norm", "response_length/mean")

    def watch(trainer, metrics):
        tell(part="train", step=trainer.global_steps, **{k: v for k, v in metrics.items() if k.startswith(shown)})
        if args.device == "cuda":
            tell(part="train", peak_gib=torch.cuda.max_memory_allocated() / 2**30)

    trainer = Trainer(config, train_rows=rows, callbacks=(watch,))
    tell(part="train", **trainer.describe())
    trainer.fit()


PARTS = {"alone": alone, "engine": engine, "sync": sync, "train": train}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.5b", choices=("0.5b", "1.5b", "7b"))
    parser.add_argument("--model", help="a model folder in place of random weights")
    parser.add_argument("--parts", default="alone,engine,sync,train")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--memory", type=float, default=0.5)
    parser.add_argument("--engine", default="vllm", help="of the part train")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.inside:
        PARTS[args.inside](args)
        return
    medians = {}
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    for part in args.parts.split(","):
        command = [sys.executable, __file__, *sys.argv[1:], "--inside", part]
        with subprocess.Popen(command, env={**quiet, **os.environ}, stdout=subprocess.PIPE, text=True) as child:
            for line in child.stdout or ():
                if line.startswith("{"):
                    print(line, end="", flush=True)
                    result = json.loads(line)
                    if "tok_s" in result and result.get("seeded", True):
                        medians[part] = result["s"]
        if child.returncode:
            raise SystemExit(f"the part {part} failed with exit code {child.returncode}")
    if {"alone", "engine"} <= set(medians):
        tell(overhead=medians["engine"] / medians["alone"] - 1)


if __name__ == "__main__":
    main()
