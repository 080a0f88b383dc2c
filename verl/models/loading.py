"""Load Hugging Face models and tokenizers, with errors that name what is missing and what is near."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from verl.config.suggest import near_path
from verl.errors import ModelError
from verl.models.damage import damage_of, json_problem
from verl.models.lora import has_adapters, merged_state, save_adapter
from verl.models.quantization import quantize
from verl.notices import notice

# transformers sets the default dtype of the whole process while it builds a model: one at a time
BUILDING = threading.RLock()
# what transformers raises where files are missing, damaged (pickles among them are never run) or of another kind
LOAD_ERRORS = (
    OSError, ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError, EOFError, RecursionError,
    SafetensorError, pickle.UnpicklingError,
)  # fmt: skip


@contextlib.contextmanager
def building_models() -> Iterator[None]:
    """Build, load and probe models one at a time, without transformers' progress bars and its report of fresh heads."""
    with BUILDING:
        verbosity = transformers_logging.get_verbosity()
        bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            transformers_logging.set_verbosity(verbosity)
            if bars:
                transformers_logging.enable_progress_bar()


def _near_match(path: Path) -> str:
    near = near_path(path, folders=True)
    return f" Did you mean {near}?" if near else ""


def resolve_model_path(path: str) -> str:
    """Check a local model folder early; a hub id is returned as it is.

    Raises:
        ModelError: the path looks local and is not there, or holds no ``config.json``.
    """
    expanded = Path(os.path.expandvars(path)).expanduser()
    if expanded.is_dir():
        if not (expanded / "config.json").is_file():
            what = "it has no config.json" if any(expanded.iterdir()) else "it is empty"
            raise ModelError(
                f"{expanded} is not a Hugging Face model folder: {what}. Give the folder that config.json, the weights "
                f"and the tokenizer lie in (hf download NAME --local-dir FOLDER makes one).{_near_match(expanded)}"
            )
        return str(expanded)
    looks_local = path.startswith(("/", ".", "~", "$")) or path.count("/") > 1 or expanded.exists()
    if looks_local:
        raise ModelError(f"There is no model folder at {expanded}.{_near_match(expanded)}")
    return path


def _unavailable(what: str, path: str, error: Exception) -> ModelError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if Path(path).is_dir():
        return ModelError(f"{what} in the folder {path} cannot be loaded: {damage_of(Path(path)) or reason}")
    near = _near_match(Path(path))
    return ModelError(
        f"{what} '{path}' cannot be loaded from the hub or its cache ({reason}). Give a local folder as model path, "
        f"or set HF_ENDPOINT to a mirror that you can reach.{near}"
    )


def load_tokenizer(
    path: str, *, trust_remote_code: bool = False, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """Load a tokenizer, with padding on the left and a pad token (the eos token where none is defined)."""
    path = resolve_model_path(path)
    if Path(path).is_dir() and not any((Path(path) / name).exists() for name in TOKENIZER_FILES):
        raise ModelError(
            f"The model folder {path} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}). Copy the tokenizer's "
            "files into it, or set actor_rollout_ref.model.tokenizer_path to a folder that has them."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # of a damaged file the tokenizers package says so in a bare Exception
        raise _unavailable("The tokenizer", path, error) from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ModelError(
                f"The tokenizer of {path} has neither a pad token nor an eos token; add one of them to it."
            )
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    if chat_template:
        tokenizer.chat_template = chat_template
    return tokenizer


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")


def load_config(path: str, *, trust_remote_code: bool = False, override: dict[str, Any] | None = None):
    """The model's HF config with ``override`` applied. An override that the config does not know is an error."""
    path = resolve_model_path(path)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # what a wrong value in config.json raises depends on its key
        raise _unavailable("The model", path, error) from error
    for key, value in (override or {}).items():
        if key not in config.to_dict() and not hasattr(config, key):
            raise ModelError(f"model.override_config has the key '{key}', which {type(config).__name__} does not know.")
        setattr(config, key, value)
    return config


def load_causal_lm(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    trust_remote_code: bool = False,
    override_config: dict[str, Any] | None = None,
    quantization: str | None = None,
) -> PreTrainedModel:
    """Load a causal language model in ``dtype`` on ``device`` with dropout switched off.

    ``quantization``: of its linear layers, which then never lie on the device in full.

    Dropout is off because a policy gradient compares the log-prob of the same tokens under two sets of weights:
    noise of dropout in one of them is a ratio different from 1 for no reason.
    """
    config = load_config(path, trust_remote_code=trust_remote_code, override=override_config)
    path = resolve_model_path(path)
    generation = Path(path) / "generation_config.json"
    if generation.is_file() and (problem := json_problem(generation)):  # transformers would do without its stop tokens
        raise ModelError(f"The model in the folder {path} cannot be loaded: {generation.name} {problem}")
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
        )
    except LOAD_ERRORS as error:
        raise _unavailable("The model", path, error) from error
    missing = sorted(loaded["missing_keys"])
    if missing:  # they would be random, and nothing would say so
        raise ModelError(
            f"The weights of {path} lack {len(missing)} of those that {type(model).__name__} has, such as "
            f"'{missing[0]}': it is no whole causal language model (a reward or value model, or an adapter?)."
        )
    disable_dropout(model, keep=override_config or {})
    if quantization is not None:
        quantize(model, quantization, device)
    return model.to(device)


DROPOUT_NAMES = (
    "attention_dropout",
    "attn_pdrop",
    "resid_pdrop",
    "embd_pdrop",
    "hidden_dropout",
    "dropout",
    "classifier_dropout",
)
"""Names of dropout probabilities in the configs of transformers' models."""


def disable_dropout(model: nn.Module, keep: dict[str, Any] | None = None) -> None:
    """Set every dropout probability to zero, except those that the user gave in ``keep`` by their config name."""
    config = getattr(model, "config", None)
    kept = {name for name in (keep or {}) if "drop" in name}
    if kept:
        notice(
            f"Dropout stays on, as model.override_config asks for it ({', '.join(sorted(kept))}): "
            "ratios will not be exactly 1."
        )
        return
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # attention modules keep their probability as a plain number
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    for name in DROPOUT_NAMES:
        if isinstance(getattr(config, name, None), float):
            setattr(config, name, 0.0)


def enable_gradient_checkpointing(model: PreTrainedModel, every: int = 1) -> None:
    """Recompute activations in the backward pass, in every so many layers. transformers renamed the call in 5.24."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    if enable.__name__ == "activation_checkpointing_enable":
        enable()
    else:
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for number, layer in enumerate(layers):
        if number % every:
            layer.gradient_checkpointing = False


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each decoder layer by itself: all layers share one compiled code, and shapes stay dynamic."""
    torch._dynamo.config.allow_unspec_int_on_nn_module = True  # layer numbers are no reason to compile again
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.forward = torch.compile(module.forward, dynamic=True)


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a response: the generation config's eos ids, the config's and the tokenizer's."""
    ids: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        ids.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return tuple(sorted(int(i) for i in ids))


def save_pretrained(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: str | os.PathLike,
    *,
    max_shard_size: str = "50GB",
) -> None:
    """Write a plain HF folder: safetensors (no file above ``max_shard_size``), config, generation config, tokenizer.

    Adapters are merged into the weights, and kept beside them in ``lora_adapter/``.
    """
    implementation = model.config._attn_implementation
    with building_models():
        model.config._attn_implementation = None
        try:
            if has_adapters(model):
                model.save_pretrained(folder, state_dict=merged_state(model), max_shard_size=max_shard_size)
                save_adapter(model, folder)
            else:
                model.save_pretrained(folder, max_shard_size=max_shard_size)
        finally:
            model.config._attn_implementation = implementation
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
