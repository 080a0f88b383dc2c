"""Rollouts through vLLM against vLLM by itself, and what handing new weights over takes, on one GPU.

    python benchmarks/vllm_rollout.py --shape 0.5b                 # alone, engine, sync and a colocated GRPO run
    python benchmarks/vllm_rollout.py --shape 7b --parts alone,engine,sync
    python benchmarks/vllm_rollout.py --parts sync --eager --rounds 5 --limit 120      # a quick look
    python benchmarks/vllm_rollout.py --model PATH --dtype float32 --device cpu --parts alone,engine,sync

Random weights in the shape of Qwen2.5 and a tokenizer of characters: they measure speed, never quality. Parts, each in
a process of its own that is ended after ``--limit`` seconds; one JSON line a result, and one for each thing begun, so
that a run that stops shows where:

* ``alone``: ``vllm.LLM.generate`` on the work: ``--prompts`` prompts of 128 tokens, ``--n`` samples of each,
  ``--new`` tokens, temperature 1, the log-prob of each sampled token. Once with a seed for each request, as verl
  samples, and once without.
* ``engine``: the same work through verl's VLLMEngine, from submit to the last row.
* ``sync``: an update of all weights handed over, the median of ``--rounds``: ``weight_load`` (vLLM reads and writes
  them), ``weight_sync`` (from the call to ready, waking up included), without and with sleeping before it.
* ``train``: a colocated GRPO run of ``--steps`` steps; the metrics of each.

``overhead`` compares the medians of ``engine`` and of ``alone`` with seeds. Both get the same engine arguments, those
of ``--kwargs`` among them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

PROMPT = 128
STARTED = time.perf_counter()
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process that has asked for its GPUs cannot use them
}


def tell(**values) -> None:
    print(json.dumps(values), flush=True)


def begin(args: argparse.Namespace, what: str) -> None:
    tell(part=args.inside, begins=what, at_s=round(time.perf_counter() - STARTED, 1))


def make_tokenizer():
    """Bytes as tokens, enough for prompts and rewards."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return fast


def model_folder(args: argparse.Namespace, weights: bool) -> str:
    """A folder with config and tokenizer; with ``weights`` also random ones."""
    import torch
    from rollout_decode import shape_config
    from transformers import AutoModelForCausalLM

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
    import numpy as np

    return np.random.default_rng(1).integers(5, vocabulary - 5, (args.prompts, PROMPT)).tolist()


def settings_of(args: argparse.Namespace, sleep: bool):
    """What the engine is told, alone and through verl."""
    from verl.rollout.remote.settings import RemoteSettings

    more = json.loads(args.kwargs)
    if args.device == "cpu" and args.engine == "vllm":
        more.setdefault("kv_cache_memory_bytes", 1 << 30)
    return RemoteSettings(
        dtype=args.dtype,
        max_model_len=PROMPT + args.new,
        max_num_seqs=args.prompts * args.n,
        gpu_memory_utilization=args.memory,
        enforce_eager=True if args.eager else None,
        sleep=sleep,
        engine_kwargs=more,
    )


def alone(args: argparse.Namespace) -> None:
    from transformers import AutoConfig
    from vllm import LLM, SamplingParams

    from verl.rollout.vllm.adapter import engine_arguments

    folder = model_folder(args, weights=False)
    arguments = engine_arguments(folder, settings_of(args, sleep=False), args.device)
    del arguments["worker_extension_cls"]
    begin(args, "vLLM starts")
    started = time.perf_counter()
    llm = LLM(**arguments)
    tell(part="alone", setup_s=time.perf_counter() - started)
    prompts = prompts_of(args, AutoConfig.from_pretrained(folder).vocab_size)
    common = {"max_tokens": args.new, "ignore_eos": True, "logprobs": 0, "detokenize": False}
    for seeded in (True, False):
        seconds = []
        for run in range(args.runs + 1):
            llm.reset_prefix_cache()
            work = [(ids, run * 10_000 + i) for i, ids in enumerate(prompts * args.n)]
            params = [SamplingParams(seed=seed if seeded else None, **common) for _, seed in work]
            begin(args, f"run {run}, {'with' if seeded else 'without'} seeds")
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
    import torch
    from rollout_decode import build_model

    from verl.hybrid import make_twin
    from verl.models.loading import load_tokenizer
    from verl.rollout.registry import make_engine

    begin(args, "the training model is built")
    model = build_model(args)
    begin(args, f"{args.engine} starts")
    started = time.perf_counter()
    tokenizer = load_tokenizer(model_folder(args, weights=False))
    engine = make_engine(args.engine, make_twin(model), tokenizer, (1,), remote=settings_of(args, sleep))
    tell(part=args.inside, sleep=sleep, setup_s=time.perf_counter() - started)
    if torch.cuda.is_available():
        free, whole = torch.cuda.mem_get_info()
        tell(part=args.inside, used_gib=(whole - free) / 2**30)
    return model, engine


def engine(args: argparse.Namespace) -> None:
    import numpy as np

    from verl.rollout import Request, SamplingParams

    _, made = build_engine(args, sleep=False)
    prompts = prompts_of(args, made.vocabulary)
    params, seconds = SamplingParams(args.new, ignore_eos=True), []
    for run in range(args.runs + 1):
        made.weights_changed()  # the prefix cache is empty, as after an update
        requests = [
            Request(f"{run}/{i}", np.array(ids), params, run * 10_000 + i) for i, ids in enumerate(prompts * args.n)
        ]
        begin(args, f"run {run}")
        started = time.perf_counter()
        done = made.generate(requests)
        seconds.append(time.perf_counter() - started)
    told(args, "engine", seconds[1:], sum(len(d.token_ids) for d in done))
    made.close()


def sync(args: argparse.Namespace) -> None:
    import torch

    model, made = build_engine(args, sleep=True)
    made.weights_changed()  # awake from here on
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    for sleep in (False, True) if args.device == "cuda" else (False,):
        taken: dict[str, list[float]] = {}
        for round_ in range(args.rounds + 2):
            begin(args, f"round {round_}{' from sleep' if sleep else ''}")
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.001)
            if sleep:
                made.release()
            made.take_metrics()
            made.weights_changed()
            if round_ > 1:  # the first ones open handles and compile
                for name, value in made.take_metrics().items():
                    taken.setdefault(name.removeprefix("timing_s/"), []).append(value)
        medians = {name: statistics.median(values) for name, values in taken.items()}
        tell(part="sync", shape=args.model or args.shape, sleep=sleep, gib=size / 2**30, rounds=args.rounds, **medians)
    made.close()


def train(args: argparse.Namespace) -> None:
    import torch

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

    begin(args, "the trainer is built")
    trainer = Trainer(config, train_rows=rows, callbacks=(watch,))
    tell(part="train", **trainer.describe())
    trainer.fit()


PARTS = {"alone": alone, "engine": engine, "sync": sync, "train": train}


def arguments(engine: str, about: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    parser.add_argument("--engine", default=engine, help="of all parts but alone")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="no compilation and no CUDA graphs: it starts sooner")
    parser.add_argument("--kwargs", default="{}", help="more of the engine's own arguments, as JSON")
    parser.add_argument("--limit", type=float, default=600, help="seconds that a part may take")
    # asking torch would open the GPUs in this process
    parser.add_argument("--device", default="cuda" if shutil.which("nvidia-smi") else "cpu")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    return parser.parse_args()


def run_part(args: argparse.Namespace, part: str, script: str) -> float | None:
    """Median seconds of the part's work, where it has such."""
    command = [sys.executable, script, *sys.argv[1:], "--device", args.device, "--inside", part]
    median = None
    with subprocess.Popen(
        command, env={**QUIET, **os.environ}, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        timer = threading.Timer(args.limit, _end_group, (child,))
        timer.start()
        for line in child.stdout or ():
            if line.startswith("{"):
                print(line, end="", flush=True)
                result = json.loads(line)
                if "tok_s" in result and result.get("seeded", True):
                    median = result["s"]
        child.wait()
        timer.cancel()
        _end_group(child)  # what vLLM may have left
    if child.returncode:
        raise SystemExit(f"the part {part} ended with code {child.returncode} (limit {args.limit:g} s)")
    return median


def _end_group(child: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def inside(args: argparse.Namespace, parts: dict) -> None:
    """The part itself; of an engine that failed, the end of its log, which nobody may be able to fetch later."""
    from verl.errors import VerlError

    if args.device == "cpu":
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # as verl has it on a CPU
    begin(args, "imports")
    try:
        parts[args.inside](args)
    except VerlError as error:
        if log := re.search(r"Its log is in (\S+\.log)", str(error)):
            print("\n".join(Path(log[1]).read_text().splitlines()[-40:]), file=sys.stderr, flush=True)
        raise


def main(engine: str = "vllm", parts: dict | None = None, script: str = __file__, about: str | None = __doc__) -> None:
    """Another engine's ``script`` has its own part ``alone``."""
    args = arguments(engine, about)
    if args.inside:
        inside(args, parts or PARTS)
        return
    medians = {part: run_part(args, part, script) for part in args.parts.split(",")}
    if medians.get("alone") and medians.get("engine"):
        tell(overhead=medians["engine"] / medians["alone"] - 1)


if __name__ == "__main__":
    main()
