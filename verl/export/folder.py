"""Writing the exported folder, whole or not at all."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.checkpoint.models import ModelSource
from verl.errors import CheckpointError, ConfigError, ModelError
from verl.export.card import model_card
from verl.export.gguf import GGUF_TYPES, converter, to_gguf
from verl.export.kinds import require_language_model
from verl.export.record import RunRecord, read_record
from verl.export.verify import Difference, compare_adapter, compare_folder
from verl.models.loading import (
    DROPOUT_NAMES,
    building_models,
    load_causal_lm,
    load_config,
    load_tokenizer,
    save_pretrained,
    stop_token_ids,
)
from verl.models.lora import FOLDER as ADAPTER_FOLDER
from verl.models.settings import DTYPES
from verl.notices import notice

FORMATS = ("hf", "vllm", "gguf")
LORA_FORMS = ("merged", "adapter")


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        folder: the output; path: what to load (the folder, or the GGUF file in it).
        dtype: of the weights. difference: of the logits, where they were compared. base: of an adapter.
    """

    folder: Path
    path: Path
    dtype: str
    difference: Difference | None = None
    base: str | None = None


@dataclass(frozen=True)
class ExportOptions:
    """How to export.

    Attributes:
        format: "hf" and "vllm" are one thing, a plain Hugging Face folder; "gguf" is one file for llama.cpp.
        lora: "merged" weights, or the "adapter" alone.
        dtype: of the weights; None keeps the trained one. max_shard_size: of a weight file, such as "5GB".
        base: the adapter's base model; None is the one that the run was started from.
        verify: load the result and compare its logits.
        overwrite: replace an earlier export.
        gguf_type: of the numbers in a GGUF file.
    """

    format: str = "hf"
    lora: str = "merged"
    dtype: str | None = None
    max_shard_size: str = "5GB"
    base: str | None = None
    verify: bool = False
    overwrite: bool = False
    trust_remote_code: bool = False
    gguf_type: str = "auto"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("export_format", self.format, FORMATS),
            ("lora", self.lora, LORA_FORMS),
            ("dtype", self.dtype or "float32", tuple(DTYPES)),
            ("gguf_type", self.gguf_type, GGUF_TYPES),
        ):
            if value not in known:
                raise ConfigError(f"--{name} is '{value}'; there are {', '.join(known)}.")
        if self.format == "gguf" and self.lora == "adapter":
            raise ConfigError("--export_format gguf holds whole models: use --lora merged.")
        if not re.fullmatch(r"0*[1-9]\d*[KMGT]i?B", self.max_shard_size):
            raise ConfigError(f"--max_shard_size is '{self.max_shard_size}'; it is a size such as 500MB or 5GB.")


def export_model(source: ModelSource, output: str | Path, options: ExportOptions | None = None) -> Exported:
    """Write the model of ``source`` to the new folder ``output``.

    Raises:
        CheckpointError: the output folder holds something, or the comparison failed.
        ModelError: the model cannot be loaded; there is no adapter; there is no GGUF converter.
    """
    options = options or ExportOptions()
    tool = converter() if options.format == "gguf" else None
    output = Path(output).expanduser()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        if not options.overwrite:
            raise CheckpointError(f"{output} is there already and not empty: give another --output_dir or --overwrite.")
        if not _ours(output):
            raise CheckpointError(f"{output} is no earlier export (it has no verl_export.json), so it is not replaced.")
    require_language_model(source.path, trust_remote_code=options.trust_remote_code)
    record = read_record(source)
    with _whole(output) as draft:
        if options.lora == "adapter":
            done = _write_adapter(source, draft, record, options)
        else:
            done = _write_merged(source, draft, record, options)
        if tool is not None:
            to_gguf(tool, draft, f"{output.name}.gguf", options.gguf_type)
    path = output / f"{output.name}.gguf" if tool is not None else output
    return Exported(output, path, done.dtype, done.difference, done.base)


MARK = "verl_export.json"


def _ours(folder: Path) -> bool:
    return (folder / MARK).is_file()


@contextmanager
def _whole(output: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of ``output`` when the block ends well."""
    draft, old = (output.parent / f".{what}-{output.name}" for what in ("exporting", "replaced"))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"{output} cannot be made: {error.filename} is a file; give another --output_dir.") from error
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir()
    try:
        yield draft
        if output.exists():
            if old.exists():
                shutil.rmtree(old)
            output.rename(old)  # two renames: a kill between them loses neither export
        draft.rename(output)
        if old.exists():
            shutil.rmtree(old)
    finally:
        if draft.exists():
            shutil.rmtree(draft)


@dataclass(frozen=True)
class _Done:
    dtype: str
    difference: Difference | None = None
    base: str | None = None


def _write_merged(source: ModelSource, draft: Path, record: RunRecord, options: ExportOptions) -> _Done:
    model, tokenizer = load_as_stored(source.path, options.trust_remote_code)
    dtype = DTYPES[options.dtype] if options.dtype else model.dtype
    exported = model if dtype == model.dtype else _converted(source.path, dtype, options.trust_remote_code)
    _set_ends(exported, tokenizer, record)
    save_pretrained(exported, tokenizer, draft, max_shard_size=options.max_shard_size)
    name = str(dtype).removeprefix("torch.")
    _write_card(draft, source, record, adapter=False, dtype=name)
    difference = None
    if options.verify:
        difference = compare_folder(model, tokenizer, draft, trust_remote_code=options.trust_remote_code)
    return _Done(name, difference)


def load_as_stored(path: str, trust_remote_code: bool = False) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in the dtype of its files, with its own dropout in the config, and its tokenizer."""
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    return _converted(path, "auto", trust_remote_code), tokenizer


def _converted(path: str, dtype, trust_remote_code: bool) -> PreTrainedModel:
    with building_models():
        model = load_causal_lm(path, dtype=dtype, device="cpu", trust_remote_code=trust_remote_code)
    own = load_config(path, trust_remote_code=trust_remote_code)
    for name in DROPOUT_NAMES:  # loading for use switches it off; the export keeps what the model says of itself
        if name in own.to_dict():
            setattr(model.config, name, getattr(own, name))
    return model.requires_grad_(False).eval()


def _set_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, record: RunRecord) -> None:
    """Let the generation config name every id that ended a response in training, so that a server stops there too."""
    ends = sorted({*stop_token_ids(model, tokenizer), *record.stop_token_ids})
    generation = model.generation_config
    if generation is None:
        raise ModelError(f"{type(model).__name__} does not generate: it has no generation config.")
    if ends:
        generation.eos_token_id = ends if len(ends) > 1 else ends[0]
    if generation.pad_token_id is None:
        generation.pad_token_id = tokenizer.pad_token_id
    try:
        generation.validate(strict=True)
    except ValueError as error:
        notice(f"The sampling settings of the generation config contradict each other and were left out ({error}).")
        for name in ("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p"):
            setattr(generation, name, None)
    stop = record.value("actor_rollout_ref.rollout.stop")
    if stop:
        shown = ", ".join(repr(text) for text in stop)
        notice(f"The run also stopped at the texts {shown}, which no folder can hold: give them with each request.")


def _write_adapter(source: ModelSource, draft: Path, record: RunRecord, options: ExportOptions) -> _Done:
    adapter = Path(source.path) / ADAPTER_FOLDER
    if not (adapter / "adapter_config.json").is_file():
        raise ModelError(f"{source.path} was not trained with LoRA: it has no {ADAPTER_FOLDER}; use --lora merged.")
    base = options.base or record.base_model
    if base is None:
        raise ModelError(f"The base model of the adapter in {source.path} is not on record: give it with --base.")
    for file in sorted(adapter.iterdir()):
        shutil.copyfile(file, draft / file.name)
    config = json.loads((draft / "adapter_config.json").read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = base
    (draft / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    merged, tokenizer = load_as_stored(source.path, options.trust_remote_code)
    tokenizer.save_pretrained(draft)
    name = str(merged.dtype).removeprefix("torch.")
    _write_card(draft, source, record, adapter=True, dtype=name)
    difference = None
    if options.verify:
        difference = compare_adapter(merged, tokenizer, base, draft, trust_remote_code=options.trust_remote_code)
    return _Done(name, difference, base)


def _write_card(draft: Path, source: ModelSource, record: RunRecord, *, adapter: bool, dtype: str) -> None:
    name = draft.name.removeprefix(".exporting-")
    card = model_card(source, record, name=name, adapter=adapter, dtype=dtype)
    (draft / "README.md").write_text(card, encoding="utf-8")
    facts = {"source": source.path, "step": source.step, "score": source.score, "base_model": record.base_model}
    (draft / MARK).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
