"""Rollout speed: the native engine, the simple one and vLLM on the same work, in one run.

    python benchmarks/rollout_decode.py --shape 0.5b --batch 256 --engines native,hf,vllm
    python benchmarks/rollout_decode.py --model PATH --batch 64 --max-tokens 128 # a real model, on a CPU too

Random weights in the shape of Qwen2.5 measure speed, never quality. Works:

* ``w1``: equal prompts of 128 tokens, 256 new tokens, no stops.
* ``unequal``: prompts of 64 to 512 tokens, 256 new tokens, no stops.
* ``stops``: the same prompts; lengths end naturally, at one of many stop ids.
* ``shared``: n=8 samples of each prompt of 64 to 512 tokens, 256 new tokens.

Seconds and tokens a second cover everything from submit to the last row, prompts included. Set-up is what comes
before the second run: building the engine and all that the first run compiles and captures. ``decode_tok_s`` counts
the decode steps alone (the last run). The share of the roof is
the time that the decode steps would take at the memory's and the matrix units' measured rates over the time taken.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

SHAPES = {
    "0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
}
BANDWIDTH, PEAK = 4.3e12, 790e12  # of one H200, measured: bytes a second of a copy, bf16 FLOP a second of a product
RESPONSE = 256


def shape_config(name: str) -> Qwen2Config:
    hidden, inner, layers, heads, kv, vocabulary, tied = SHAPES[name]
    return Qwen2Config(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, vocab_size=vocabulary, tie_word_embeddings=tied, max_position_embeddings=4096,
    )  # fmt: skip


def build_model(args: argparse.Namespace):
    dtype = getattr(torch, args.dtype)
    if args.model:
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(args.device).eval()
    torch.manual_seed(0)
    with torch.device(args.device):
        return AutoModelForCausalLM.from_config(shape_config(args.shape), dtype=dtype).eval()


def prompts_of(work: str, batch: int, vocabulary: int, lengths: tuple[int, int]) -> list[list[int]]:
    rng = np.random.default_rng(1)
    distinct = batch // 8 if work == "shared" else batch
    sizes = np.full(distinct, 128) if work == "w1" else rng.integers(lengths[0], lengths[1] + 1, distinct)
    prompts = [rng.integers(5, vocabulary - 5, size).tolist() for size in sizes]
    return [p for p in prompts for _ in range(8)] if work == "shared" else prompts


def stop_ids(work: str, vocabulary: int) -> tuple[int, ...]:
    """Stop ids that end a uniformly random response after about 200 tokens."""
    return tuple(range(7, vocabulary, 199))[: vocabulary // 199] if work == "stops" else ()


def roof_seconds(config, prompts: list[list[int]], counts: list[int], itemsize: int) -> float:
    """max(bytes / bandwidth, FLOP / peak), summed over the decode steps of rows with these response lengths."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv = 2 * config.num_key_value_heads * head * config.num_hidden_layers * itemsize
    per_layer = config.hidden_size * (2 * head * (config.num_attention_heads + config.num_key_value_heads))
    weights = config.num_hidden_layers * (per_layer + 3 * config.hidden_size * config.intermediate_size)
    weights += config.hidden_size * config.vocab_size
    sizes, counts_ = np.array([len(p) for p in prompts]), np.array(counts)
    total = 0.0
    for step in range(int(counts_.max())):
        alive = counts_ > step
        bytes_ = weights * itemsize + kv * float((sizes[alive] + step).sum())
        total += max(bytes_ / BANDWIDTH, 2 * weights * float(alive.sum()) / PEAK)
    return total


def ours(name: str, model, args: argparse.Namespace) -> Callable[[str, list[list[int]], int], list[int]]:
    from verl.hybrid.twin import make_twin
    from verl.rollout.base import Request, SamplingParams
    from verl.rollout.registry import make_engine

    extra = json.loads(args.native) if name == "native" else {}
    engine = make_engine(name, make_twin(model), None, (), max_num_seqs=args.batch, **extra)
    assert engine.name == name, f"the engine in use is {engine.name}"

    def run(work: str, prompts: list[list[int]], seed: int) -> list[int]:
        stop = stop_ids(work, model.config.vocab_size)
        params = SamplingParams(args.max_tokens, temperature=1.0, stop_token_ids=stop)
        engine.weights_changed()  # no prefix of an earlier run
        if name == "native":
            before = engine.tokens["decode"], engine.seconds["decode"]
        done = engine.generate(
            [Request(f"{seed}/{i}", np.array(p), params, seed * 9973 + i) for i, p in enumerate(prompts)]
        )
        if name == "native":
            speed.append((engine.tokens["decode"] - before[0]) / (engine.seconds["decode"] - before[1]))
        return [len(c.token_ids) for c in done]

    speed: list[float] = []
    run.engine, run.decode_speed = engine, speed  # type: ignore[attr-defined]
    return run


def generate_call(model, args: argparse.Namespace) -> Callable[[str, list[list[int]], int], list[int]]:
    """transformers' own ``generate`` over one left-padded batch."""
    from transformers import GenerationConfig

    def run(work: str, prompts: list[list[int]], seed: int) -> list[int]:
        width = max(len(p) for p in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, p in enumerate(prompts):
            ids[i, width - len(p) :], mask[i, width - len(p) :] = torch.tensor(p), 1
        eos = list(stop_ids(work, model.config.vocab_size)) or None
        config = GenerationConfig(
            max_new_tokens=args.max_tokens, do_sample=True, top_k=0, eos_token_id=eos, pad_token_id=0
        )
        model.generation_config.eos_token_id = None
        with torch.inference_mode():
            out = model.generate(ids.to(args.device), attention_mask=mask.to(args.device), generation_config=config)
        new = out[:, width:].cpu().numpy()
        ends = np.isin(new, eos or [])
        return [int(e.argmax()) + 1 if e.any() else new.shape[1] for e in ends]

    return run


def vllm_call(args: argparse.Namespace) -> Callable[[str, list[list[int]], int], list[int]]:
    import os

    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    folder = f"/tmp/vllm-{args.shape}"
    config = shape_config(args.shape)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    llm = LLM(
        model=folder, load_format="dummy", skip_tokenizer_init=True, dtype=args.dtype, gpu_memory_utilization=0.5,
        max_model_len=2048, max_num_seqs=args.batch, enable_prefix_caching=True, async_scheduling=True,
    )  # fmt: skip

    def run(work: str, prompts: list[list[int]], seed: int) -> list[int]:
        stop = list(stop_ids(work, config.vocab_size))
        params = SamplingParams(
            max_tokens=args.max_tokens,
            ignore_eos=True,
            stop_token_ids=stop,
            temperature=1.0,
            logprobs=0,
            detokenize=False,
        )
        llm.reset_prefix_cache()
        out = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [len(o.outputs[0].token_ids) for o in out]

    return run


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(name: str, args: argparse.Namespace, model) -> None:
    started = time.perf_counter()
    make = {"generate": lambda: generate_call(model, args), "vllm": lambda: vllm_call(args)}
    run = make.get(name, lambda: ours(name, model, args))()
    config = model.config if model is not None else AutoConfig.from_pretrained(f"/tmp/vllm-{args.shape}")
    low, high = (int(x) for x in args.lengths.split("-"))
    set_up = time.perf_counter() - started
    for work in args.works.split(","):
        prompts = prompts_of(work, args.batch, config.vocab_size, (low, high))
        seconds, counts = [], []
        for repeat in range(args.repeats + 1):
            synchronize(args.device)
            at = time.perf_counter()
            counts = run(work, prompts, repeat)
            synchronize(args.device)
            seconds.append(time.perf_counter() - at)
        warm = statistics.median(seconds[1:])
        set_up += max(0.0, seconds[0] - warm)
        row = {
            "engine": name, "shape": args.model or args.shape, "work": work, "batch": args.batch, "tokens": sum(counts),
            "seconds": round(warm, 3), "tok_s": round(sum(counts) / warm),
            "spread_s": [round(x, 3) for x in seconds[1:]],
            "set_up_s": round(set_up, 2),
        }  # fmt: skip
        if args.device == "cuda":
            size = getattr(torch, args.dtype).itemsize
            row["roof"] = round(roof_seconds(config, prompts, counts, size) / warm, 3)
        engine = getattr(run, "engine", None)
        if name == "native":
            row["decode_tok_s"] = round(run.decode_speed[-1])
        if name == "native" and args.device == "cuda":
            row["capture_s"] = round(engine.runner.capture_seconds, 2)
            row["compiled"] = engine.runner.layers.on
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.5b", choices=sorted(SHAPES))
    parser.add_argument("--model", help="a model folder instead of random weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=RESPONSE)
    parser.add_argument("--lengths", default="64-512", help="shortest and longest prompt")
    parser.add_argument("--works", default="w1,unequal,stops,shared")
    parser.add_argument("--engines", default="native,hf")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs, after one that is not timed")
    parser.add_argument("--native", default="{}", help="settings of the native engine, as JSON")
    parser.add_argument("--threads", type=int, help="CPU threads")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    names = args.engines.split(",")
    model = build_model(args) if any(name != "vllm" for name in names) else None
    for name in names:
        measure(name, args, model)


if __name__ == "__main__":
    main()
