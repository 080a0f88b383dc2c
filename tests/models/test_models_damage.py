"""A model folder that is damaged: one sentence names the file and the remedy."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from tiny_models import save_tiny_model

from verl.cli.main import main
from verl.errors import ModelError
from verl.models.damage import damage_of
from verl.models.loading import load_causal_lm, load_tokenizer

AGAIN = "copy or download that file again"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 269060552\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("damage") / "whole", "llama")


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


def load(folder):
    load_tokenizer(str(folder))
    load_causal_lm(str(folder), dtype=torch.float32, device="cpu")


def test_a_whole_folder_has_no_damage(whole):
    load(whole)
    assert damage_of(whole) is None


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.safetensors", lambda old: old[:-100], r"model\.safetensors is cut off \(\d+ of \d+ bytes\)"),
        ("model.safetensors", lambda old: old[:20], r"only the beginning of one \(20 bytes\)"),
        ("model.safetensors", lambda old: b"", r"is no safetensors file, or only the beginning of one \(0 bytes\)"),
        ("model.safetensors", lambda old: b"<html>Not found</html>", r"is no safetensors file"),
        ("model.safetensors", lambda old: b"\3" + 7 * b"\0" + b"[1]" + old, r"its header is not readable"),
        ("tokenizer.json", lambda old: old[:100], r"tokenizer\.json is not JSON \(line \d+: .*\)"),
        ("tokenizer.json", lambda old: b"\xff\xfe", r"tokenizer\.json is not text in UTF-8"),
        ("tokenizer_config.json", lambda old: old[:10], r"tokenizer_config\.json is not JSON"),
        ("config.json", lambda old: old[:30], r"config\.json is not JSON \(line 3: "),
        ("config.json", lambda old: b"[1]", r"config\.json is JSON, but no object"),
        ("config.json", lambda old: b"{}", r"config\.json names no model_type"),
        ("generation_config.json", lambda old: old[:10], r"generation_config\.json is not JSON"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named_with_the_remedy(folder, name, content, said):
    path = folder / name
    path.write_bytes(content(path.read_bytes()))
    with pytest.raises(ModelError, match=said + f".*: {AGAIN}$") as caught:
        load(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_a_pointer_of_git_lfs(folder):
    (folder / "model.safetensors").write_bytes(LFS)
    with pytest.raises(ModelError, match=r"is only Git LFS's pointer to the file: run `git lfs pull` in the folder$"):
        load(folder)


def test_files_that_are_missing(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"it holds no weights: copy or download model\.safetensors too$"):
        load(folder)
    index = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-00001-of-00002\.safetensors is missing, which model\.saf.* names"):
        load(folder)


def test_an_empty_folder(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ModelError, match=r"empty is not a Hugging Face model folder: it is empty\. Give the folder that"
    ):
        load(tmp_path / "empty")
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"it has no config\.json\. Give the folder that .*hf download NAME"):
        load(folder)


def test_a_command_says_it_in_one_line(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9])
    assert main(["quickstart", "--model", str(folder), "--steps", "1", "--output", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err.strip()
    assert "is cut off" in err and AGAIN in err and len(err.splitlines()) == 1
