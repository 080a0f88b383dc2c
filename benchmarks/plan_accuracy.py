"""The memory plan against what an update really takes, on a CPU or on a GPU.

    python benchmarks/plan_accuracy.py [--device cuda] [--shapes ...] [--tokens 4096]

Each shape is a random model in a process of its own, which takes two optimizer steps of two full micro-batches. On a
GPU the peak is what torch has allocated; on a CPU it is the process's resident memory above what it had before the
model was made. Prints a Markdown table; the aim is 15 %.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys

# hidden, intermediate, layers, heads, key-value heads, vocabulary, tied
SHAPES = {
    "narrow": (256, 1024, 8, 8, 4, 8192, False),
    "deep": (512, 1408, 16, 8, 8, 4096, True),
    "large vocabulary": (384, 1024, 6, 6, 2, 49152, True),
    "135M": (576, 1536, 30, 9, 3, 49152, True),
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
}
ON_CPU, ON_GPU = ("narrow", "deep", "large vocabulary"), ("0.5B", "1.5B", "7B")
SWITCHES = {
    "checkpointing": {"checkpointing": True},
    "every other layer": {"checkpointing": True, "every": 2},
    "8-bit": {"optimizer": "adamw8bit"},
    "offload": {"offload": True},
    "LoRA": {"rank": 16},
    "QLoRA": {"rank": 16, "quantization": "nf4"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES))
    parser.add_argument("--switches", nargs="*", default=[], choices=list(SWITCHES), help="measured one by one")
    parser.add_argument("--tokens", type=int, default=4096, help="of the micro-batch")
    parser.add_argument("--dtype", help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.dtype = arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32")
    if arguments.worker:
        print(json.dumps(measure(arguments, json.loads(arguments.worker))))
        return
    print(f"{arguments.device} ({platform.processor() or platform.machine()}), {arguments.dtype}\n")
    print("| shape | switch | tokens | planned GiB | measured GiB | off by |")
    print("|---|---|---|---|---|---|")
    for shape in arguments.shapes or (ON_GPU if arguments.device == "cuda" else ON_CPU):
        for switch in ("", *arguments.switches):
            found = in_a_process(arguments, {"shape": shape, **SWITCHES.get(switch, {})})
            off = found["planned"] / found["measured"] - 1
            numbers = f"{found['planned'] / 2**30:.2f} | {found['measured'] / 2**30:.2f} | {off:+.1%}"
            print(f"| {shape} | {switch} | {arguments.tokens:,} | {numbers} |", flush=True)


def in_a_process(arguments: argparse.Namespace, what: dict) -> dict[str, int]:
    command = [sys.executable, __file__, "--device", arguments.device, "--dtype", arguments.dtype]
    command += ["--tokens", str(arguments.tokens), "--worker", json.dumps(what)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "MALLOC_TRIM_THRESHOLD_": "0"})
    if done.returncode:
        raise SystemExit(f"{what} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def random_config(shape: str):
    from transformers import Qwen2Config

    hidden, inner, layers, heads, key_heads, vocabulary, tied = SHAPES[shape]
    return Qwen2Config(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=key_heads, vocab_size=vocabulary, tie_word_embeddings=tied, max_position_embeddings=8192,
    )  # fmt: skip


def settings_of(arguments: argparse.Namespace, what: dict, kernel: str):
    from verl.models.settings import LoraSettings, ModelSettings

    rank = what.get("rank", 0)
    return ModelSettings(
        "random",
        dtype=arguments.dtype,
        device=arguments.device,
        kernel=kernel,
        gradient_checkpointing=what.get("checkpointing", False),
        checkpoint_every=what.get("every", 1),
        lora=LoraSettings(rank=rank) if rank else None,
        quantization=what.get("quantization"),
    )


def random_policy(config, settings):
    import torch
    from transformers import AutoModelForCausalLM

    from verl.models.policy import prepare_policy
    from verl.models.quantization import quantize

    with torch.device(settings.device):
        model = AutoModelForCausalLM.from_config(config, dtype=settings.torch_dtype)
    if settings.quantization:
        quantize(model, settings.quantization)
    return prepare_policy(model, settings)


def measure(arguments: argparse.Namespace, what: dict) -> dict[str, int]:
    """Planned and measured bytes at the peak of an update."""
    import torch

    from verl.hardware import decide
    from verl.hardware.memory import ModelShape, Workload, lora_parameters, phases
    from verl.metrics import Metrics
    from verl.models.policy import log_probs
    from verl.protocol import DataProto
    from verl.train_engine.optimizers import OptimizerSettings
    from verl.train_engine.torch_engine import TorchEngine

    hidden, inner, layers, heads, key_heads, vocabulary, _ = SHAPES[what["shape"]]
    choice = decide(arguments.device)
    config, rank = random_config(what["shape"]), what.get("rank", 0)
    packed = choice.attention if arguments.device == "cuda" and arguments.dtype == "bfloat16" else "sdpa"
    settings = settings_of(arguments, what, packed)
    dtype = settings.torch_dtype
    warm_up(torch, arguments.device)
    before = start_of_peak(torch, arguments.device)
    model = random_policy(config, settings)
    kind, offload = what.get("optimizer", "adamw"), what.get("offload", False)
    engine = TorchEngine(model, OptimizerSettings(lr=1e-6, kind=kind, offload=offload))
    start_of_peak(torch, arguments.device)
    prompt, length = 64, 512
    rows = max(1, arguments.tokens // length)
    batch = make_batch(torch, DataProto, rows, prompt, length, vocabulary)

    def loss_of(micro):
        value, _ = log_probs(model, micro)
        return -value.sum() / (rows * length), Metrics()

    for _ in range(2):
        engine.train_step([batch, batch], loss_of)  # gradient sums are there during the second
    shape = ModelShape(
        parameters(config), layers, hidden, inner, hidden, hidden // heads * key_heads, vocabulary,
    )  # fmt: skip
    measured = peak_bytes(torch, arguments.device) - before
    work = Workload(
        element=dtype.itemsize,
        device_bytes=choice.device.memory_bytes,
        cuda=arguments.device == "cuda",
        kernels=choice.triton and dtype != torch.float32,
        micro_tokens=rows * length,
        forward_tokens=0,
        trained_share=(length - prompt) / length,
        trainable=lora_parameters(shape, rank) if rank else shape.parameters,
        rollout_rows=0,
        rollout_tokens=0,
        optimizer=kind,
        offload=offload and arguments.device == "cuda",
        checkpointing=settings.gradient_checkpointing,
        checkpointed=1 / settings.checkpoint_every,
        quantised=settings.quantization,
        flash=packed in ("varlen", "flash_attn"),
    )
    [update] = [phase for phase in phases(shape, work) if phase.name == "update"]
    return {"planned": update.total, "measured": measured}


def make_batch(torch, DataProto, rows: int, prompt: int, length: int, vocabulary: int):
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, vocabulary, (rows, prompt), generator=generator)
    # the last token of a row is never fed, so the row has one more than it costs
    responses = torch.randint(0, vocabulary, (rows, length - prompt + 1), generator=generator)
    ones = torch.ones_like(responses)
    mask = torch.cat([torch.ones_like(prompts), ones], 1)
    return DataProto.from_dict(
        tensors={"prompts": prompts, "responses": responses, "response_mask": ones, "attention_mask": mask}
    )


def warm_up(torch, device: str) -> None:
    """Libraries' own workspaces are not the model's."""
    x = torch.randn(512, 512, device=device, requires_grad=True)
    (x @ x).softmax(-1).sum().backward()


def start_of_peak(torch, device: str) -> int:
    """Bytes in use now; what is the peak later counts from here."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return status("VmRSS")


def peak_bytes(torch, device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else status("VmHWM")


def status(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) * 1024


def parameters(config) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


if __name__ == "__main__":
    main()
