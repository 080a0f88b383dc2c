"""Attention of one layer in a decode step, by how contexts are cut: microseconds on a GPU.

    python benchmarks/decode_attention.py --shapes 7b,1.5b,0.5b --batches 256

Rows are 8 samples of prompts of 64 to 512 tokens, 128 tokens into the responses. ``alone``: every row has pages of its
own; ``shared``: the 8 rows have the prompt's full pages in common, and neighbours read them once. Six layers in one
captured graph, median of seven replays. Prints the best cuts, and what the engine takes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics

import numpy as np
import torch

from verl.rollout.native.attention import Options

SHAPES = {"0.5b": (14, 2, 64), "1.5b": (12, 2, 128), "7b": (28, 4, 128)}
PAGE, LAYERS, SAMPLES, WRITTEN = 16, 6, 8, 128
OWN = ((64, 4, 3), (32, 4, 3), (64, 8, 3), (32, 2, 3), (128, 8, 2))
COMMON = ((32, 4, 3), (64, 4, 3), (64, 8, 3))


def tables(batch: int) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """(B, W) pages of rows alone and of rows that share, (B,) positions, (2, B) sharing."""
    rng = np.random.default_rng(0)
    prompts = np.repeat(rng.integers(64, 513, batch // SAMPLES), SAMPLES)
    positions, full = prompts + WRITTEN, prompts // PAGE
    width = int(positions.max()) // PAGE + 1
    pages = {kind: np.zeros((batch, width), np.int32) for kind in ("alone", "shared")}
    sharing = np.zeros((2, batch), np.int32)
    fresh = itertools.count(1)
    for i in range(batch):
        used = positions[i] // PAGE + 1
        pages["alone"][i, :used] = list(itertools.islice(fresh, int(used)))
        pages["shared"][i, :used] = pages["alone"][i, :used]
        first = i - i % SAMPLES
        pages["shared"][i, : full[i]] = pages["shared"][first, : full[i]]
        sharing[0, i] = full[i] * PAGE
        sharing[1, i] = SAMPLES if i == first else 0
    return pages, positions, sharing


def candidates(kind: str) -> list:
    from verl.rollout.native.kernels import Cut

    if kind == "alone":
        return [None] + [(Cut(parts, *own), None) for parts in (1, 2, 4) for own in OWN]
    pairs = ((1, 1), (1, 2), (2, 2), (2, 4), (1, 4))
    kinds = [(own, COMMON[0]) for own in OWN] + [(OWN[0], common) for common in COMMON[1:]]
    return [None] + [(Cut(a, *own), Cut(b, *common)) for a, b in pairs for own, common in kinds]


def microseconds(run) -> float:
    run(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(LAYERS):
            run(layer)
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / LAYERS * 1e3)
    return round(statistics.median(times), 1)


def measure(shape: str, batch: int) -> None:
    from verl.rollout.native.kernels import decode_attention

    heads, groups, size = SHAPES[shape]
    pages, positions, sharing = tables(batch)
    make = {"dtype": torch.bfloat16, "device": "cuda"}
    cache = torch.randn(LAYERS, 2, int(pages["alone"].max()) + 1, PAGE, groups, size, **make)
    query = torch.randn(batch, heads, size, **make)
    key, value = torch.randn(2, batch, groups, size, **make)
    at, shared = torch.from_numpy(positions).cuda(), torch.from_numpy(sharing).cuda()
    options = Options(size**-0.5, None, None)
    for kind, table in pages.items():
        table_ = torch.from_numpy(table).cuda()
        neighbours = (shared[0], shared[1]) if kind == "shared" else None
        results = []
        for cuts in candidates(kind):

            def run(layer: int, cuts=cuts, table_=table_, neighbours=neighbours) -> None:
                decode_attention(query, key, value, *cache[layer], table_, at, options, neighbours, cuts)

            results.append((microseconds(run), str(cuts)))
        row = {"shape": shape, "batch": batch, "rows": kind, "the engine's us": results[0][0]}
        print(json.dumps({**row, "best": sorted(results)[:4]}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="7b,1.5b,0.5b")
    parser.add_argument("--batches", default="256,512")
    args = parser.parse_args()
    for shape in args.shapes.split(","):
        for batch in args.batches.split(","):
            measure(shape, int(batch))


if __name__ == "__main__":
    main()
