"""A whole GRPO step on one GPU: verl against TRL with Hugging Face's generate and with vLLM in the same process.

    python benchmarks/grpo_trl_gpu.py [--systems verl trl-hf trl-vllm] [--steps 6] [--beta 0]

Work of a step: 32 prompts of 100 tokens x 8 samples x 256 new tokens, random weights in the shape of Qwen2.5-0.5B, KL
against a reference (``--beta 0``: without, and then rows without advantage may be skipped), no recomputation. No
network: model and tokenizer (bytes as tokens, and words that fill the vocabulary) are made on the spot. Each system
runs in a process of its own; prompts, lengths and optimizer settings are the same. All train in bf16 on float32 masters
(TRL: autocast over float32 weights).

A row gives the median seconds of a step after the first two, the highest memory allocated by torch in the process, and
the part of it that is reserved for the cache of running sequences.
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

SYSTEMS = {
    "verl": "every row trained",
    "verl-skip": "rows without advantage skipped (beta 0 only)",
    "verl-compiled": "every row trained, decoder layers compiled",
    "trl-hf": "Hugging Face generate",
    "trl-vllm": "vLLM in the same process",
}
PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS, VOCABULARY = 32, 8, 100, 256, 151936
WARM, RATE = 2, 1e-6
SHAPE = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "tie_word_embeddings": True, "max_position_embeddings": 4096,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = ["verl", "verl-compiled", "trl-hf", "trl-vllm"]
    parser.add_argument("--systems", nargs="+", default=usual, choices=SYSTEMS)
    parser.add_argument("--steps", type=int, default=6, help=f"steps a run, the first {WARM} of them not counted")
    parser.add_argument("--beta", type=float, default=0.001, help="weight of the KL against the reference")
    parser.add_argument("--python", help="interpreter for TRL, where it is another one")
    parser.add_argument("--trl-micro", type=int, default=64, help="TRL: rows a micro-batch")
    parser.add_argument("--vllm-memory", type=float, default=0.3, help="TRL: share of the GPU for vLLM")
    parser.add_argument("--tiny", action="store_true", help="a small shape and few tokens, to try the script")
    parser.add_argument("--worker", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model", tiny=arguments.tiny)
        print("| system | s a step, median (min to max) | first step s | peak GiB | of it cache GiB |", flush=True)
        print("|---|---|---|---|---|", flush=True)
        for system in arguments.systems:
            if system == "verl-skip" and arguments.beta:
                raise SystemExit("with a KL every row has a gradient: verl-skip needs --beta 0")
            print(row(system, launch(system, arguments, Path(folder))), flush=True)


def row(system: str, found: dict) -> str:
    seconds = found["seconds"][WARM:] or found["seconds"]
    spread = f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
    name = f"{system}: {SYSTEMS[system]}"
    return f"| {name} | {spread} | {found['seconds'][0]:.1f} | {found['peak_gib']:.1f} | {found['cache_gib']:.1f} |"


def launch(system: str, arguments: argparse.Namespace, folder: Path) -> dict:
    python = arguments.python if arguments.python and system.startswith("trl") else sys.executable
    command = [python, __file__, "--worker", system, "--folder", str(folder), "--steps", str(arguments.steps)]
    command += ["--beta", str(arguments.beta), "--trl-micro", str(arguments.trl_micro)]
    command += ["--vllm-memory", str(arguments.vllm_memory), *(["--tiny"] if arguments.tiny else [])]
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }  # fmt: skip
    log = folder / f"{system}.log"
    with open(log, "w") as file:
        code = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT).returncode
    if code:
        raise SystemExit(f"{system} failed:\n" + log.read_text()[-6000:])
    return json.loads((folder / f"{system}.json").read_text())


def make_model(folder: Path, *, tiny: bool) -> None:
    """Random bf16 weights, and a tokenizer of the family's kind without merges: a byte is a token."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    shape = {**SHAPE, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2} if tiny else SHAPE
    shape = {**shape, "num_attention_heads": 4, "vocab_size": 2048} if tiny else shape
    count = shape["vocab_size"]
    names = ["<pad>", "<eos>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"w{i}" for i in range(len(names), count)]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    fast.padding_side = "left"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        Qwen2Config(**shape, pad_token_id=0, eos_token_id=1, bos_token_id=None), dtype=torch.bfloat16
    )
    with torch.no_grad():
        model.get_output_embeddings().weight[1].zero_()  # the end of a sequence is as unlikely as any word
    model.generation_config.eos_token_id = 1
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    fast.save_pretrained(folder)


def prompts() -> list[str]:
    """Letters, each of them a token."""
    import random
    import string

    rng = random.Random(0)
    return ["".join(rng.choices(string.ascii_letters, k=PROMPT_TOKENS)) for _ in range(512)]


def score(text: str) -> float:
    """Differs within a group, whatever the weights."""
    return float(sum(map(ord, text)) % 7)


def work(arguments: argparse.Namespace) -> None:
    import torch

    folder = Path(arguments.folder)
    train = train_verl if arguments.worker.startswith("verl") else train_trl
    seconds, cache = train(arguments, folder)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    result = {"seconds": seconds, "peak_gib": peak / 2**30, "cache_gib": cache / 2**30}
    (folder / f"{arguments.worker}.json").write_text(json.dumps(result))


def new_tokens(arguments: argparse.Namespace) -> int:
    return 16 if arguments.tiny else NEW_TOKENS


def train_verl(arguments: argparse.Namespace, folder: Path) -> tuple[list[float], int]:
    import torch

    from verl import Trainer
    from verl.config import load_config

    values = {
        "algorithm.name": "grpo",
        "data.train_batch_size": PROMPTS,
        "data.max_prompt_length": 128,
        "data.max_response_length": new_tokens(arguments),
        "actor_rollout_ref.model.path": str(folder / "model"),
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.model.compile_layers": arguments.worker == "verl-compiled",
        "actor_rollout_ref.rollout.n": SAMPLES,
        "actor_rollout_ref.rollout.ignore_eos": True,
        "actor_rollout_ref.actor.optim.lr": RATE,
        "actor_rollout_ref.actor.use_kl_loss": bool(arguments.beta),
        "actor_rollout_ref.actor.kl_loss_coef": arguments.beta,
        "actor_rollout_ref.actor.calculate_entropy": arguments.worker != "verl-skip",
        "reward.reward_fn": lambda batch: [score(text) for text in batch["responses"]],
        "trainer.total_training_steps": arguments.steps,
        "trainer.save_final": False,
        "trainer.logger": [],
        "trainer.default_local_dir": str(folder / arguments.worker),
    }
    seconds: list[float] = []

    def note(trainer, metrics: dict[str, float]) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(metrics["timing_s/step"])
        print(json.dumps({name: value for name, value in metrics.items() if "timing_s" in name}), flush=True)

    rows = [{"prompt": text, "data_source": "words"} for text in prompts()]
    trainer = Trainer(load_config([], values=values), train_rows=rows, callbacks=(note,), stays_open=True)
    given = watch_cache(trainer.roles.actor.workers[0].hybrid._engine)
    trainer.fit()
    trainer.close()
    return seconds, max(given)


def watch_cache(engine) -> list[int]:
    """Bytes that torch gets back each time the engine gives its pages up; pages that are not torch's count as 0."""
    import torch

    given: list[int] = [0]
    release = engine.release

    def watched() -> None:
        before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        release()
        given.append(before - (torch.cuda.memory_allocated() if torch.cuda.is_available() else 0))

    engine.release = watched
    return given


def train_trl(arguments: argparse.Namespace, folder: Path) -> tuple[list[float], int]:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    seconds: list[float] = []
    gpu = torch.cuda.is_available()

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            if gpu:
                torch.cuda.synchronize()
            self.started = time.perf_counter()

        def on_step_end(self, *_, **__):
            if gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - self.started)

    vllm = {}
    if arguments.worker == "trl-vllm":
        vllm = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": arguments.vllm_memory,
            "vllm_max_model_length": 1024,
        }
    rows = PROMPTS * SAMPLES
    config = GRPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=arguments.trl_micro,
        gradient_accumulation_steps=rows // arguments.trl_micro,
        num_generations=SAMPLES,
        max_completion_length=new_tokens(arguments),
        learning_rate=RATE,
        max_grad_norm=1.0,
        beta=arguments.beta,
        max_steps=arguments.steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=not gpu,
        bf16=True,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        **vllm,
    )
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=lambda completions, **_: [score(text) for text in completions],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": text} for text in prompts()]),
        callbacks=[Clock()],
    )
    trainer.train()
    return seconds, vllm_cache_bytes(trainer, folder) if vllm else 0


def vllm_cache_bytes(trainer, folder: Path) -> int:
    """Bytes of vLLM's pages: blocks x tokens x layers x keys and values."""
    shape = json.loads((folder / "model" / "config.json").read_text())
    cache = trainer.vllm_generation.llm.llm_engine.vllm_config.cache_config
    head = shape["hidden_size"] // shape["num_attention_heads"]
    token = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head
    return cache.num_gpu_blocks * cache.block_size * token


if __name__ == "__main__":
    main()
