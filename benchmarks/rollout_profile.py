"""Where a rollout of the native engine spends its time on a GPU: set-up, cache memory, prompts, decode steps.

    python benchmarks/rollout_profile.py --shape 7b --parts setup,memory,prefill,decode,linear

* ``setup``: seconds of each step from the model to the first finished batch.
* ``memory``: taking and giving back the cache; a rollout of 4 tokens a row, which pays for little else.
* ``prefill``: kernels of 256 prompts of 64 to 512 tokens, as shares of the time on the clock.
* ``decode``: kernels of 64 decode steps of 256 rows, the same way.
* ``prompts``: 256 prompts by tokens a forward, through plain and through compiled layers (the first compiles).
* ``linear``: the model's matrix products alone, at decode and at prompt width, with fresh weights each time.

Random bf16 weights: speed only. One JSON line a part.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch
from rollout_decode import SHAPES, build_model, prompts_of

KINDS = (
    ("attention prompts", ("_prefill_kernel", "flash_fwd")),
    ("attention decode", ("_decode_kernel", "_shared_kernel", "_combine_kernel")),
    ("sampling", ("_stretch_kernel", "_merge_kernel")),
    ("linear", ("nvjet", "gemm", "cutlass", "cublas", "splitK", "wgmma")),
    ("copies", ("Memcpy", "Memset", "memcpy", "memset")),
    ("compiled elementwise", ("triton_",)),
)


def kind_of(kernel: str) -> str:
    for kind, marks in KINDS:
        if any(mark in kernel for mark in marks):
            return kind
    return "other elementwise"


def clock(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def profiled(work: Callable[[], object], top: int = 14) -> dict:
    """Milliseconds on the clock (unprofiled and profiled) and of each kind of kernel; the longest kernels."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    plain = clock(work)
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        wall = clock(work)
    kinds, names, calls = defaultdict(float), defaultdict(float), defaultdict(int)
    for event in record.events():
        if event.device_type == DeviceType.CUDA:
            kinds[kind_of(event.name)] += event.time_range.elapsed_us() / 1e3
            names[event.name[:90]] += event.time_range.elapsed_us() / 1e3
            calls[event.name[:90]] += 1
    longest = sorted(names, key=names.get, reverse=True)[:top]
    return {
        "clock_ms": round(plain * 1e3, 2), "profiled_ms": round(wall * 1e3, 2),
        "kernels_ms": round(sum(kinds.values()), 2), "count": sum(calls.values()),
        "kinds_ms": {k: round(v, 2) for k, v in sorted(kinds.items(), key=lambda x: -x[1])},
        "longest": [f"{names[n]:.2f} ms {calls[n]}x {n}" for n in longest],
    }  # fmt: skip


def make(model, batch: int, settings: dict):
    from verl.hybrid.twin import make_twin
    from verl.rollout.registry import make_engine

    engine = make_engine("native", make_twin(model), None, (), max_num_seqs=batch, **settings)
    assert engine.name == "native", f"the engine in use is {engine.name}"
    return engine


def requests(args, max_tokens: int, work: str = "unequal", seed: int = 0):
    from verl.rollout.base import Request, SamplingParams

    prompts = prompts_of(work, args.batch, SHAPES[args.shape][5], (64, 512))
    params = SamplingParams(max_tokens)
    return [Request(f"{seed}/{i}", np.array(p), params, seed * 9973 + i) for i, p in enumerate(prompts)]


def drain(engine) -> None:
    while engine.pending:
        engine.poll()


def setup(args, model) -> dict:
    seconds = {}
    seconds["engine (admission)"] = clock(lambda: make(model, args.batch, args.native))
    engine = make(model, args.batch, args.native)
    seconds["engine again"] = clock(lambda: make(model, args.batch, args.native))
    engine.submit(requests(args, 64))
    parts = {"_ensure_cache": engine._ensure_cache, "_prefill": engine._prefill, "_decode": engine._decode}
    seen = defaultdict(list)
    for name, function in parts.items():

        def timed(*a, _name=name, _function=function):
            torch.cuda.synchronize()
            started = time.perf_counter()
            result = _function(*a)
            torch.cuda.synchronize()
            seen[_name].append(time.perf_counter() - started)
            return result

        setattr(engine, name, timed)
    drain(engine)
    for name, times in seen.items():
        seconds[f"{name} first"] = times[0]
        seconds[f"{name} later, median"] = statistics.median(times[1:] or [0.0])
    seconds["capture"] = engine.runner.capture_seconds
    return {k: round(v, 4) for k, v in seconds.items()}


def memory(args, model) -> dict:
    out: dict[str, object] = {}
    for label, extra in (("settings", {}), ("2000 pages", {"max_pages": 2000})):
        engine = make(model, args.batch, {**args.native, **extra})
        rows = []
        for cycle in range(4):
            engine.weights_changed()
            engine.submit(requests(args, 4, "shared", cycle))
            take = clock(engine._ensure_cache)
            generate = clock(lambda engine=engine: drain(engine))
            give = clock(engine.release)
            rows.append([round(x * 1e3, 2) for x in (take, generate, give)])
        pages = engine.runner.planned_pages
        out[label] = {
            "GB": round(pages * engine.runner.cache.shape.page_bytes / 1e9, 2),
            "take, 4 tokens, give back: ms": rows,
        }
        del engine
        torch.cuda.empty_cache()
    from verl.rollout.native.arena import Arena

    bare = {}
    for size in (1 << 28, 1 << 30, 1 << 32, 1 << 34, 1 << 36):
        arena = Arena(1, size, torch.device("cuda"))
        whole = functools.partial(arena.map, size)
        bare[f"{size >> 20} MiB"] = [[round(clock(f) * 1e3, 2) for f in (whole, arena.unmap)] for _ in range(3)]
        arena.close()
    out["map, unmap: ms"] = bare
    return out


def prefill(args, model) -> dict:
    engine = make(model, args.batch, args.native)

    def run() -> None:
        engine.weights_changed()
        engine.generate(requests(args, 1))

    run()
    run()
    result = profiled(run)
    result["prompt_tokens"] = int(sum(len(r.prompt_ids) for r in requests(args, 1)))
    return result


def decode(args, model) -> dict:
    engine = make(model, args.batch, {"compile": "on", **args.native})
    steps = 64
    for cycle in range(2):
        engine.weights_changed()
        engine.submit(requests(args, 256, args.work, cycle))
        while not engine.scheduler.running or engine.scheduler.waiting or engine.scheduler.prefilling:
            engine.poll()
        for _ in range(2):
            engine.poll()  # captures

        def run() -> None:
            for _ in range(steps // engine.settings.window):
                engine.poll()

        if cycle:
            result = profiled(run)
            result["per step"] = {k: round(v / steps, 4) for k, v in result["kinds_ms"].items()}
            result["clock per step"] = round(result["clock_ms"] / steps, 4)
            return result
        drain(engine)
    raise AssertionError


def prompts(args, model) -> dict:
    """Milliseconds of four calls each with prompts of their own, then of four with 8 samples a prompt."""
    out = {}
    for tokens in (8192, 32768):
        for compiled in (False, True):
            engine = make(model, args.batch, {**args.native, "max_num_batched_tokens": tokens})
            plain = engine.runner.prefill

            def through_compiled(chunks, engine=engine, plain=plain):
                engine.runner.layers.on = True
                with engine.runner.layers.in_use():
                    return plain(chunks)

            if compiled:
                engine.runner.prefill = through_compiled
            times = []
            for cycle in range(8):
                engine.weights_changed()
                work = requests(args, 1, "unequal" if cycle < 4 else "shared", cycle)
                times.append(round(clock(functools.partial(engine.generate, work)) * 1e3))
            out[f"{tokens} tokens{', compiled' if compiled else ''}: ms"] = times
            engine.release()
    return out


def linear(args, model) -> dict:
    """Milliseconds and TFLOP/s of the products of all layers together, and of the output layer."""
    hidden, inner, layers, heads, kv, vocabulary, _ = SHAPES[args.shape]
    size = hidden // heads
    kinds = {
        "q": (hidden, heads * size), "k or v": (hidden, kv * size), "qkv in one": (hidden, (heads + 2 * kv) * size),
        "o": (heads * size, hidden), "gate or up": (hidden, inner), "gate and up in one": (hidden, 2 * inner),
        "down": (inner, hidden),
    }  # fmt: skip
    out = {}
    for rows in (32, args.batch, 2 * args.batch, 8192):
        line = {}
        for name, (a, b) in {**kinds, "output layer": (hidden, vocabulary)}.items():
            count = 2 if name == "output layer" else layers
            weights = [torch.randn(b, a, dtype=torch.bfloat16, device="cuda") for _ in range(count)]
            x = torch.randn(rows, a, dtype=torch.bfloat16, device="cuda")
            graph = torch.cuda.CUDAGraph()
            for w in weights[:2]:
                torch.nn.functional.linear(x, w)
            with torch.cuda.graph(graph):
                for w in weights:
                    torch.nn.functional.linear(x, w)
            graph.replay()
            seconds = statistics.median(clock(graph.replay) for _ in range(5))
            line[name] = [round(seconds * 1e3 / count, 4), round(2 * rows * a * b * count / seconds / 1e12)]
            del graph, weights
        out[f"{rows} rows: ms each, TFLOP/s"] = line
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="7b", choices=sorted(SHAPES))
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--work", default="shared", help="prompts of the decode part: unequal or shared")
    parser.add_argument("--parts", default="setup,memory,prefill,decode,linear")
    parser.add_argument("--native", default="{}", type=json.loads, help="settings of the native engine, as JSON")
    args = parser.parse_args()
    args.model, args.device, args.dtype = None, "cuda", "bfloat16"
    started = time.perf_counter()
    model = build_model(args) if args.parts != "linear" else None
    torch.cuda.synchronize()
    print(json.dumps({"shape": args.shape, "model_s": round(time.perf_counter() - started, 2)}), flush=True)
    parts = {"setup": setup, "memory": memory, "prefill": prefill, "decode": decode, "linear": linear}
    parts["prompts"] = prompts
    for name in args.parts.split(","):
        started = time.perf_counter()
        result = parts[name](args, model)
        print(json.dumps({"part": name, "s": round(time.perf_counter() - started, 1), **result}), flush=True)


if __name__ == "__main__":
    main()
