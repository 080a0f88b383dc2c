"""rollout.tensor_model_parallel_size of the native engine: what is refused before a model loads, and what plan says."""

from __future__ import annotations

import pytest
from config_problems import problems
from tiny_models import save_tiny_model

from verl.cli import main

ROLLOUT, A = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
TWO, RANKS = f"{ROLLOUT}.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=4"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([TWO], ["needs more processes", "trainer.n_gpus_per_node"]),
        ([TWO, "trainer.n_gpus_per_node=3"], ["does not divide the 3 processes"]),
        ([TWO, RANKS, f"{A}.strategy=torch"], ["spread over the processes", f"{A}.strategy=auto"]),
        ([TWO, RANKS, f"{A}.optim.optimizer=Adafactor"], ["Adafactor", "whole"]),
        ([TWO, RANKS, f"{ROLLOUT}.name=hf"], ["splits no model", f"{ROLLOUT}.name=native"]),
    ],
)
def test_what_cannot_be_is_one_sentence(given, words):
    found = problems(*given)
    assert len(found) == 1 and all(word in found[0] for word in words), found


def test_what_can_be_is_silent():
    assert problems(TWO, RANKS) == problems(TWO, RANKS, f"{A}.strategy=fsdp", f"{ROLLOUT}.name=native") == []
    assert problems(f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.name=vllm") == []


def test_plan_knows_it(tmp_path, capsys):
    folder = save_tiny_model(tmp_path / "model", "llama")
    given = [f"actor_rollout_ref.model.path={folder}", "data.train_batch_size=8", RANKS, "trainer.device=cpu"]
    assert main(["plan", "--gpu", "a100-40gb", *given]) == 0
    whole = capsys.readouterr().out
    assert "generate together" not in whole
    assert main(["plan", "--gpu", "a100-40gb", *given, TWO]) == 0
    assert "each 2 of 4 processes generate together, each with 1/2 of the weights" in capsys.readouterr().out
    assert main(["plan", *given, f"{ROLLOUT}.tensor_model_parallel_size=4", "trainer.n_gpus_per_node=8"]) == 0


@pytest.mark.parametrize(
    ("family", "size", "words"),
    [("opt", 2, "no way to cut the attention"), ("phi3", 2, "not known here"), ("llama", 8, "8 ranks do not divide")],
)
def test_a_model_that_cannot_be_split_is_refused_from_its_config_alone(tmp_path, capsys, family, size, words):
    folder = save_tiny_model(tmp_path / "model", family)
    (folder / "model.safetensors").unlink()
    given = [f"actor_rollout_ref.model.path={folder}", "data.train_batch_size=8", "trainer.n_gpus_per_node=8"]
    assert main(["plan", *given, f"{ROLLOUT}.tensor_model_parallel_size={size}"]) == 2
    told = capsys.readouterr().err
    assert words in told and f"tensor_model_parallel_size={size} is not possible" in told
