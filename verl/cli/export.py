"""``verl export``: what was trained, as a folder that can be served."""

from __future__ import annotations

import sys

from verl.cli.arguments import Arguments
from verl.notices import add_sink


def parse(argv: list[str]):
    parser = Arguments(
        prog="verl export",
        description="Write a trained model as a plain Hugging Face folder (for vLLM and everything else), as a LoRA "
        "adapter, or as a GGUF file.",
    )
    parser.add_argument(
        "--model_path", required=True, metavar="DIR",
        help="a run folder, one of its steps, an actor folder, or any Hugging Face folder",
    )  # fmt: skip
    parser.add_argument("--output_dir", required=True, metavar="OUT", help="a new folder")
    parser.add_argument(
        "--export_format", default="hf", metavar="FORMAT", help="hf, vllm (both a plain folder) or gguf; default: hf"
    )
    parser.add_argument("--step", metavar="N", help="of a run folder: a number, last (the default) or best")
    parser.add_argument(
        "--verify", action="store_true", help="load the result and compare its logits with the policy's"
    )
    parser.add_argument("--lora", default="merged", metavar="FORM", help="merged (the default) or adapter")
    parser.add_argument("--base", metavar="MODEL", help="base model of the adapter (default: the run's)")
    parser.add_argument("--dtype", metavar="DTYPE", help="of the weights, such as bfloat16 (default: as trained)")
    parser.add_argument("--max_shard_size", default="5GB", metavar="SIZE", help="of one weight file; default: 5GB")
    parser.add_argument("--gguf_type", default="auto", metavar="TYPE", help="auto, f32, f16, bf16 or q8_0")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export in OUT")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Export, and say what can be done with the result; the exit code."""
    arguments = parse(argv)
    from verl.checkpoint.models import locate_model
    from verl.export.folder import ExportOptions, export_model

    remove = add_sink(lambda text: print(f"[notice] {text}", file=sys.stderr))
    try:
        source = locate_model(arguments.model_path, arguments.step)
        done = export_model(
            source,
            arguments.output_dir,
            ExportOptions(
                format=arguments.export_format,
                lora=arguments.lora,
                dtype=arguments.dtype,
                max_shard_size=arguments.max_shard_size,
                base=arguments.base,
                verify=arguments.verify,
                overwrite=arguments.overwrite,
                trust_remote_code=arguments.trust_remote_code,
                gguf_type=arguments.gguf_type,
            ),
        )
    finally:
        remove()
    print(f"Exported   {source.path}" + (f" (step {source.step})" if source.step is not None else ""))
    print(f"Written    {done.path}, {done.dtype}")
    if done.difference is not None:
        print(f"Verified   {done.difference}")
    print(f"Next       {_next(done, arguments.export_format)}")
    return 0


def _next(done, form: str) -> str:
    if form == "gguf":
        return f"llama-cli -m {done.path}"
    if done.base is not None:
        return f"vllm serve {done.base} --enable-lora --lora-modules {done.folder.name}={done.folder}"
    return f"vllm serve {done.folder}" if form == "vllm" else f"verl serve {done.folder}"
