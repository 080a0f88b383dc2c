"""Speed and memory of the policy update on one GPU: packed rows, flash attention, fused log-prob, fp32 masters.

    python benchmarks/train_update.py --shape 0.5b 1.5b [--compile] [--profile]
    torchrun --nproc-per-node 2 benchmarks/train_update.py --engine fsdp --shape 7b     # a share of 256 rows each
    torchrun --nproc-per-node 2 benchmarks/train_update.py --engine megatron --tensor 2 --shape 7b

Random weights in the shape of Qwen2.5 and 256 rows of 64 to 384 tokens, each of another prompt, so that every token is
real work. MFU is 6 N T over the card's measured bf16 matrix rate (``--peak``, FLOP/s): the layers at every token, the
(tied) output layer at every response token; attention and recomputation are not counted. One step = packing, forward,
backward and AdamW on fp32 masters.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen2Config

from verl.comm import TorchDistComm
from verl.metrics import Metrics
from verl.models.packing import pack
from verl.models.policy import log_probs, prepare_policy
from verl.models.settings import ModelSettings
from verl.protocol import DataProto
from verl.train_engine.fsdp import FSDPEngine
from verl.train_engine.microbatch import micro_batches
from verl.train_engine.parallel import ParallelSettings
from verl.train_engine.torch_engine import OptimizerSettings, TorchEngine

SHAPES = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
}


def make_policy(shape: str, arguments: argparse.Namespace) -> torch.nn.Module:
    config = Qwen2Config(
        **SHAPES[shape],
        num_key_value_heads=4 if shape == "7b" else 2,
        vocab_size=151936,
        tie_word_embeddings=shape != "7b",
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    settings = ModelSettings(
        "random",
        dtype="bfloat16",
        device="cuda",
        kernel=arguments.attention,
        compile_layers=arguments.compile,
        gradient_checkpointing=arguments.checkpointing,
    )
    return prepare_policy(model, settings)


def make_batch(rows: int, low: int, high: int, prompt: int, samples: int = 1) -> DataProto:
    """Rows of ``low`` to ``high`` tokens, the first ``prompt`` of them prompt; ``samples`` rows share a prompt."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(low, high + 1, (rows,), generator=generator) - prompt
    width = int(lengths.max())
    prompts = torch.randint(0, 151000, (rows // samples, prompt), generator=generator).repeat_interleave(samples, 0)
    responses = torch.randint(0, 151000, (rows, width), generator=generator)
    mask = (torch.arange(width)[None] < lengths[:, None]).long()
    return DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": responses,
            "response_mask": mask,
            "attention_mask": torch.cat([torch.ones_like(prompts), mask], 1),
        },
    )


def timed(step, count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def make_engine(model: torch.nn.Module, arguments: argparse.Namespace) -> TorchEngine:
    settings = OptimizerSettings(lr=1e-6, kind=arguments.optimizer.lower(), offload=arguments.offload)
    if arguments.engine == "torch":
        return TorchEngine(model, settings)
    if arguments.engine == "megatron":
        from verl.train_engine.megatron import MegatronEngine

        parallel = ParallelSettings(
            "megatron",
            tensor_size=arguments.tensor,
            pipeline_size=arguments.pipeline,
            sequence_parallel=arguments.scattered,
            distributed_optimizer=True,
        )
        return MegatronEngine(model, settings, TorchDistComm(), parallel)
    return FSDPEngine(model, settings, TorchDistComm(), ParallelSettings("fsdp", fsdp_size=arguments.fsdp_size))


def start_ranks() -> int:
    """Join the ranks that torchrun started; the number of this one."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))
    return torch.distributed.get_rank()


def measure(shape: str, arguments: argparse.Namespace) -> dict[str, object]:
    torch.cuda.reset_peak_memory_stats()
    model = make_policy(shape, arguments)
    engine = make_engine(model, arguments)
    batch = make_batch(256, 64, 384, arguments.prompt, arguments.samples)
    lengths = batch.batch["attention_mask"].sum(1).numpy()
    groups = np.arange(256) // arguments.samples
    shared = np.full(256, arguments.prompt)
    parts = micro_batches(np.arange(256), lengths, groups, shared=shared, max_tokens=arguments.tokens)
    micros = [batch.select_idxs(part) for part in parts]
    real = sum(pack(micro).num_tokens for micro in micros)
    total = int(lengths.sum())

    def loss_of(micro):
        value, _ = log_probs(model, micro)
        return -value.sum() / total, Metrics()

    def step():
        engine.train_step(micros, loss_of)

    warm = timed(step, 2)
    seconds = timed(step, arguments.steps)
    if arguments.profile:
        profile(step)
    middle = statistics.median(seconds)
    head = model.get_output_embeddings().weight.numel()
    looked_up = 0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    layers = sum(p.numel() for p in model.parameters()) - head - looked_up
    trained = int(batch.batch["response_mask"].sum())
    return {
        "shape": shape,
        "engine": arguments.engine,
        "ranks": engine.comm.world_size,
        "attention": model.config._attn_implementation,
        "compiled": arguments.compile,
        "micro_batches": len(micros),
        "tokens": total,
        "computed_tokens": real,
        "warm_s": [round(s, 2) for s in warm],
        "step_s": round(middle, 4),
        "spread_s": [round(min(seconds), 4), round(max(seconds), 4)],
        "tokens_per_s": round(total / middle),
        "mfu": round(6 * (layers * real + head * trained) / middle / arguments.peak, 4),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }


def profile(step) -> None:
    """Print where the GPU's time of one step goes."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        step()
        torch.cuda.synchronize()
    events = [e for e in trace.key_averages() if e.self_device_time_total > 0 and e.device_type.name == "CUDA"]
    events.sort(key=lambda e: -e.self_device_time_total)
    whole = sum(e.self_device_time_total for e in events)
    print(f"kernels: {whole / 1e3:.1f} ms in all")
    for e in events[:28]:
        print(f"{e.self_device_time_total / 1e3:8.2f} ms {e.count:6d} x {e.key[:100]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", default=["0.5b", "1.5b"], choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=32768, help="computed tokens a micro-batch")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--samples", type=int, default=1, help="rows that share a prompt")
    parser.add_argument("--attention", default="varlen", choices=["varlen", "sdpa", "flash_attn"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--peak", type=float, default=790e12)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--optimizer", default="AdamW", help="for example AdamW8bit or PagedAdamW8bit")
    parser.add_argument("--offload", action="store_true", help="masters, gradient sums and moments in host memory")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--engine", default="torch", choices=["torch", "fsdp", "megatron"])
    parser.add_argument("--tensor", type=int, default=2, help="ranks over which Megatron cuts matrices")
    parser.add_argument("--pipeline", type=int, default=1, help="ranks over which Megatron's layers lie")
    parser.add_argument("--scattered", action="store_true", help="Megatron's sequence parallelism")
    parser.add_argument("--fsdp-size", type=int, default=-1, help="ranks of a copy of the weights (hybrid sharding)")
    arguments = parser.parse_args()
    rank = start_ranks() if arguments.engine != "torch" else 0
    if rank == 0:
        print(torch.__version__, transformers.__version__, torch.cuda.get_device_name(), flush=True)
    for shape in arguments.shape:
        found = measure(shape, arguments)
        if rank == 0:
            print(json.dumps(found), flush=True)
        torch.cuda.empty_cache()
    if arguments.engine != "torch":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
