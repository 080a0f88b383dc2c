"""Rollout speed of the native engine, vLLM and transformers' ``generate`` on the same work, side by side in one run.

    python benchmarks/rollout_vs_vllm.py --shapes 0.5b,1.5b,7b --batches 256,512
    python benchmarks/rollout_vs_vllm.py --shapes tiny --batches 16 --engines native,hf --device cpu  # a smoke test

Each engine runs in a process of its own; only one works at a time. Random bf16 weights in the shape of Qwen2.5,
prompts of 64 to 512 tokens with 8 samples of each, temperature 1, the log-prob of every sampled token. Works:

* ``full``: 256 new tokens a row.
* ``drawn``: early ends, the same for every engine: each token is a row's last with probability 1/150, at most 256.
* ``natural``: rows end where an engine samples one of many stop ids, at most 256; the lengths differ by chance.
* ``unequal``: as ``full``, but every row has a prompt of its own.

Seconds cover one call with the whole batch, prompts included: the median of ``--repeats`` calls, after one of that
batch that is not timed. Set-up is what comes before: importing, building, compiling, capturing, and what the untimed
call takes longer than the timed ones. vLLM runs with its defaults and prefix caching, its engine in a process of its
own (``vllm``) and in the caller's (``vllm-inprocess``); asynchronous scheduling is on in both. ``hf`` samples
``--hf-tokens`` tokens a row, without log-probs, in one left-padded batch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from rollout_decode import RESPONSE, SHAPES, prompts_of, roof_seconds, shape_config

SHAPES.setdefault("tiny", (64, 128, 2, 4, 2, 1000, True))
LENGTHS = (64, 512)
Run = Callable[[list[list[int]], list[int], tuple[int, ...], int], list[int]]


def job_of(work: str, batch: int, vocabulary: int) -> tuple[list[list[int]], list[int], tuple[int, ...]]:
    """Prompts, most new tokens of each row, stop ids."""
    prompts = prompts_of("unequal" if work == "unequal" else "shared", batch, vocabulary, LENGTHS)
    most = [RESPONSE] * batch
    if work == "drawn":
        most = np.minimum(np.random.default_rng(2).geometric(1 / 150, batch), RESPONSE).tolist()
    # about 1 in 500 tokens; many more would cost an engine that goes through the list for each token
    stops = tuple(range(7, vocabulary, 499)) if work == "natural" else ()
    return prompts, most, stops


# the engines: each makes a function (prompts, most tokens, stop ids, seed) -> how many tokens each row got


def native(args: argparse.Namespace) -> Run:
    import torch
    from rollout_decode import build_model

    from verl.hybrid.twin import make_twin
    from verl.rollout.base import Request, SamplingParams
    from verl.rollout.registry import make_engine

    args.model, args.dtype = None, "bfloat16" if args.device == "cuda" else "float32"
    twin = make_twin(build_model(args))
    engine = make_engine("native", twin, None, (), max_num_seqs=max(args.batches), **json.loads(args.native))
    assert engine.name == "native", f"the engine in use is {engine.name}"

    def run(prompts, most, stops, seed):
        engine.weights_changed()  # no prefix of an earlier call
        requests = [
            Request(f"{seed}/{i}", np.array(p), SamplingParams(m, stop_token_ids=stops), seed * 9973 + i)
            for i, (p, m) in enumerate(zip(prompts, most, strict=True))
        ]
        done = engine.generate(requests)
        assert all(np.isfinite(c.log_probs).all() and len(c.log_probs) == len(c.token_ids) for c in done)
        if args.device == "cuda":
            torch.cuda.synchronize()
        return [len(c.token_ids) for c in done]

    return run


def vllm(args: argparse.Namespace) -> Run:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if args.child == "vllm-inprocess" else "1"
    os.environ["VLLM_CACHE_ROOT"] = f"/tmp/rollout-vs-vllm-cache-{args.child}-{args.shape}"
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it would be compiled; nothing is filtered here
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    config = shape_config(args.shape)
    config.architectures = ["Qwen2ForCausalLM"]
    folder = f"/tmp/rollout-vs-vllm-{args.shape}"
    config.save_pretrained(folder)
    heads = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    tokens = max(args.batches) * (LENGTHS[1] + RESPONSE)  # all rows fit, whatever is shared
    llm = LLM(
        model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=2048,
        max_num_seqs=max(args.batches), enable_prefix_caching=True, async_scheduling=True,
        gpu_memory_utilization=0.2, kv_cache_memory_bytes=tokens * 4 * heads * config.num_hidden_layers,
    )  # fmt: skip

    def run(prompts, most, stops, seed):
        params = [
            SamplingParams(
                max_tokens=m, temperature=1.0, logprobs=0, ignore_eos=True, stop_token_ids=list(stops), detokenize=False
            )
            for m in most
        ]
        llm.reset_prefix_cache()
        out = [x.outputs[0] for x in llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)]
        assert all(len(o.logprobs) == len(o.token_ids) for o in out)
        return [len(o.token_ids) for o in out]

    return run


def hf(args: argparse.Namespace) -> Run:
    import torch
    from rollout_decode import build_model
    from transformers import GenerationConfig

    args.model, args.dtype = None, "bfloat16" if args.device == "cuda" else "float32"
    model = build_model(args)
    model.generation_config.eos_token_id = None

    def run(prompts, most, stops, seed):
        width = max(len(p) for p in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, p in enumerate(prompts):
            ids[i, width - len(p) :], mask[i, width - len(p) :] = torch.tensor(p), 1
        config = GenerationConfig(max_new_tokens=args.hf_tokens, do_sample=True, top_k=0, pad_token_id=0)
        with torch.inference_mode():
            out = model.generate(ids.to(args.device), attention_mask=mask.to(args.device), generation_config=config)
        out.cpu()
        return [min(m, args.hf_tokens) for m in most]

    return run


ENGINES = {"native": native, "vllm": vllm, "vllm-inprocess": vllm, "hf": hf}


def child(args: argparse.Namespace) -> None:
    """Build the engine, say how long it took, then measure what each line of the input asks for."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engines print goes with the errors

    def answer(**row) -> None:
        answers.write(json.dumps(row) + "\n")
        answers.flush()

    seen: set[int] = set()
    started = time.perf_counter()
    run = ENGINES[args.child](args)
    run(*job_of("full", 16, SHAPES[args.shape][5]), 99)  # what is made at first use
    answer(ready=round(time.perf_counter() - started, 1))
    for line in sys.stdin:
        order = json.loads(line)
        job = job_of(order["work"], order["batch"], SHAPES[args.shape][5])
        seconds, speeds, counts = [], [], []
        cold = order["batch"] not in seen
        seen.add(order["batch"])
        for repeat in range(order["repeats"] + cold):
            at = time.perf_counter()
            counts = run(*job, repeat)
            seconds.append(time.perf_counter() - at)
            speeds.append(sum(counts) / seconds[-1])
        median = statistics.median(seconds[cold:])
        row = {
            "tokens": sum(counts), "seconds": round(median, 3),
            "tok_s": round(statistics.median(speeds[cold:])), "spread_tok_s": [round(x) for x in speeds[cold:]],
            "first_s": round(seconds[0] if cold else median, 2),
        }  # fmt: skip
        if args.child == "native" and args.device == "cuda":
            row["roof"] = round(roof_seconds(shape_config(args.shape), job[0], counts, 2) / seconds[-1], 3)
        answer(**row)


class Engine:
    """A child process that measures on demand."""

    def __init__(self, name: str, shape: str, args: argparse.Namespace):
        self.name, self.shape = name, shape
        self.log = open(os.path.join(args.logs, f"{name}-{shape}.log"), "w")  # noqa: SIM115
        command = [sys.executable, __file__, "--child", name, "--shapes", shape, "--batches", *args.batch_texts]
        command += ["--device", args.device, "--native", args.native, "--hf-tokens", str(args.hf_tokens)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        self.set_up: float | None = None

    def _answer(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} for {self.shape} ended; see {self.log.name}")
        return json.loads(line)

    def wait(self, quiet: bool = False) -> None:
        """Until it is built. ``quiet``: whoever measures first will notice if it failed."""
        try:
            if self.set_up is None:
                self.set_up = self._answer()["ready"]
        except RuntimeError:
            if not quiet:
                raise

    def measure(self, work: str, batch: int, repeats: int) -> dict:
        self.wait()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"work": work, "batch": batch, "repeats": repeats}) + "\n")
        self.process.stdin.flush()
        row = self._answer()
        self.set_up = (self.set_up or 0.0) + max(0.0, row.pop("first_s") - row["seconds"])
        head = {"engine": self.name, "shape": self.shape, "work": work, "batch": batch}
        row = {**head, **row, "set_up_s": round(self.set_up, 1)}
        print(json.dumps(row), flush=True)
        return row

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()


def measure_all(engine: Engine, args: argparse.Namespace, table: dict) -> None:
    """All works of one engine; it is closed at the end."""
    try:
        for order in args.works:
            work, batches, repeats = ([*order.split(":"), "", ""])[:3]
            for batch in [int(batches)] if batches else args.batches:
                times = 1 if engine.name == "hf" else int(repeats or args.repeats)
                speed = engine.measure(work, batch, times)["tok_s"]
                table[engine.name, engine.shape, work, batch] = speed
                if engine.name == "hf" or engine.name in args.probe:
                    return  # one work tells enough
    except RuntimeError as problem:
        print(json.dumps({"engine": engine.name, "shape": engine.shape, "problem": str(problem)}), flush=True)
    finally:
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="0.5b,1.5b,7b")
    parser.add_argument("--batches", default="256,512", help="rows of a call")
    parser.add_argument("--works", default="drawn,full:256,natural:256", help="WORK, WORK:B or WORK:B:REPEATS")
    parser.add_argument("--engines", default="native,vllm,vllm-inprocess,hf", help="ENGINE or ENGINE:SHAPE")
    parser.add_argument("--probe", default="", help="engines that measure their first work only, once")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls, after one that is not timed")
    parser.add_argument("--hf-tokens", type=int, default=64)
    parser.add_argument("--together", action="store_true", help="build all at once: set-ups then slow each other")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--native", default='{"compile": "on"}', help="settings of the native engine, as JSON")
    parser.add_argument("--logs", default="/tmp")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.batch_texts, args.batches = [args.batches], [int(x) for x in args.batches.split(",")]
    shapes, args.works, args.probe = args.shapes.split(","), args.works.split(","), args.probe.split(",")
    if args.child:
        args.shape, args.batch = shapes[0], max(args.batches)
        return child(args)
    table: dict[tuple, float] = {}
    names = [name.partition(":")[::2] for name in args.engines.split(",")]
    pairs = [(name, shape) for shape in shapes for name, only in names if only in ("", shape)]
    ready = [Engine(*pair, args) for pair in pairs] if args.together else []
    for engine in ready:  # nobody measures while another one builds
        engine.wait(quiet=True)
    for i, pair in enumerate(pairs):
        measure_all(ready[i] if ready else Engine(*pair, args), args, table)
    for (name, shape, work, batch), speed in table.items():
        others = [v for (n, *key), v in table.items() if key == [shape, work, batch] and n.startswith("vllm")]
        if name == "native" and others:
            ratio = round(speed / max(others), 2)
            print(json.dumps({"shape": shape, "work": work, "batch": batch, "native over vllm": ratio}), flush=True)


if __name__ == "__main__":
    main()
