"""Time to switch sharded weights to rollout: the arena, against gathering everything through the host.

    torchrun --nproc-per-node 2 benchmarks/reshard.py --shape 7b          # GPUs, one process each
    torchrun --nproc-per-node 2 benchmarks/reshard.py --device cpu --shape 0.1b
    torchrun --nproc-per-node 2 benchmarks/reshard.py --shape 7b --engine megatron   # matrices cut over all ranks
    torchrun --nproc-per-node 2 benchmarks/reshard.py --shape 7b --rollout-split 2   # each rank a part of the model

Random weights in the shape of Qwen2.5, spread over the ranks by FSDP2 as training does it (float32 shards).

- arena: what a run does. Each rank casts its shard into its place in the rollout's weights and an all-gather in place
  fills the rest, in bfloat16. ``map`` and ``unmap`` are the GPU's pages taken and given back around the update.
- with ``--rollout-split k`` each ``k`` neighbouring ranks generate together, and a rank receives its part of each
  matrix (rollout.tensor_model_parallel_size); ``bytes in the arena`` is that part.
- naive: every weight as a whole float32 tensor (``full_tensor``; with Megatron in bfloat16), to the host, and from
  there (or its part of it) into the rollout's weights.

Both must leave the same bits. The table is printed last.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2Config

from verl.comm import TorchDistComm
from verl.hybrid.arena import WeightArena
from verl.models.backbone import use_packed_attention
from verl.models.cuts import Cuts
from verl.train_engine.fsdp_module import ShardedModule
from verl.train_engine.parallel import ParallelSettings
from verl.train_engine.spread import SpreadModule

SHAPES = {
    "0.1b": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
}


def make_model(shape: str, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    config = Qwen2Config(
        **SHAPES[shape],
        num_key_value_heads=4 if shape == "7b" else 2,
        vocab_size=151936 if device.type == "cuda" else 32000,
        tie_word_embeddings=shape != "7b",
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)  # the same weights on all ranks
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def timed(step, device: torch.device) -> float:
    synchronise(device)
    started = time.perf_counter()
    step()
    synchronise(device)
    return time.perf_counter() - started


@torch.no_grad()
def naive(sharded: SpreadModule, arena: WeightArena) -> None:
    for name, target in arena.parameters.items():
        whole = sharded.shards[name].full_tensor() if isinstance(sharded, ShardedModule) else sharded.whole(name)
        whole = whole.cpu()
        if arena.cuts is None:
            target.copy_(whole)
            continue
        part = arena.cuts.wanted(name, dist.get_rank() % arena.cuts.size)
        matrix = whole.view(len(whole), -1)
        mine = matrix.narrow(0, part.row, part.rows).narrow(1, part.column, part.columns)
        target.view(-1)[: part.numel].view(part.rows, part.columns).copy_(mine)


def spread(model: torch.nn.Module, arguments: argparse.Namespace) -> tuple[SpreadModule, int]:
    """The model over the ranks, and how many share a copy."""
    if arguments.engine == "megatron":
        from verl.train_engine.megatron_module import MegatronModule

        use_packed_attention(model)
        size = dist.get_world_size()
        return MegatronModule(model, TorchDistComm(), ParallelSettings("megatron", tensor_size=size)), size
    sharded = ShardedModule(model, TorchDistComm(), ParallelSettings("fsdp", fsdp_size=arguments.fsdp_size))
    return sharded, sharded.group_size


def peak(device: torch.device) -> float:
    """GiB at the most since the last reset; of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(arguments: argparse.Namespace, device: torch.device) -> list[tuple[str, str]]:
    model = make_model(arguments.shape, device, torch.bfloat16)
    size = sum(p.numel() for p in model.parameters())
    cuts = Cuts(model, arguments.rollout_split) if arguments.rollout_split > 1 else None
    sharded, sharers = spread(model, arguments)
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    arena = WeightArena(sharded, cuts)
    fills, maps, unmaps = [], [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(arguments.steps + 1):
        unmaps.append(timed(arena.give_back, device))
        if arena.gives_back:
            maps.append(timed(arena._pages.map, device))
        fills.append(timed(arena.fill, device))
    extra = peak(device) - held if device.type == "cuda" else float("nan")
    bits = {name: p.detach().clone() for name, p in arena.parameters.items()} if arguments.check else {}
    naives = [timed(lambda: naive(sharded, arena), device) for _ in range(arguments.naive_steps)]
    same = all(torch.equal(bits[name], p) for name, p in arena.parameters.items()) if bits else None
    middle, slow = statistics.median(fills[1:]), statistics.median(naives)
    gathered = arena.nbytes * (sharers - 1) / sharers
    return [
        ("shape", f"{arguments.shape} ({size / 1e9:.2f} B weights)"),
        ("ranks", f"{dist.get_world_size()} x {torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}"),
        ("ranks that generate together", str(arguments.rollout_split)),
        ("bytes in the arena", f"{arena.nbytes / 2**30:.2f} GiB (all weights: {2 * size / 2**30:.2f} GiB)"),
        ("buffers besides, at most", f"{arena.most_sent / 2**30:.3f} GiB"),
        ("pages given back", str(arena.gives_back)),
        ("arena, first", f"{fills[0]:.4f} s"),
        ("arena, median", f"{middle:.4f} s (of {arguments.steps}; {min(fills[1:]):.4f} to {max(fills[1:]):.4f})"),
        ("received by a rank", f"{gathered / middle / 2**30:.1f} GiB/s"),
        ("map, median", f"{statistics.median(maps[1:]):.4f} s" if maps else "-"),
        ("unmap, median", f"{statistics.median(unmaps[1:]):.4f} s" if maps else "-"),
        ("GPU memory besides arena and shards", f"{extra:.2f} GiB"),
        ("naive, median", f"{slow:.4f} s (of {arguments.naive_steps})"),
        ("naive / arena", f"{slow / middle:.1f}"),
        ("same bits", str(same)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="0.5b", choices=list(SHAPES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--engine", default="fsdp", choices=["fsdp", "megatron"])
    parser.add_argument("--fsdp-size", type=int, default=-1, help="ranks of a copy (hybrid sharding)")
    parser.add_argument("--rollout-split", type=int, default=1, help="ranks that generate together, each with a part")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--naive-steps", type=int, default=2)
    parser.add_argument("--no-check", dest="check", action="store_false", help="do not compare the bits")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    table = measure(arguments, device)
    if dist.get_rank() == 0:
        print(f"torch {torch.__version__}")
        width = max(len(name) for name, _ in table)
        for name, value in table:
            print(f"{name:<{width}}  {value}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
