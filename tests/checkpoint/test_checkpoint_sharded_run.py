"""A whole run on other numbers of processes than before: PPO with critic and reference, on Ray."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import save_tiny_model

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))

from trainer_helpers import make_trainer

pytest.importorskip("ray")
torch.set_num_threads(1)
COMPARED = ("actor/grad_norm", "actor/loss", "actor/kl_loss", "critic/grad_norm", "critic/vf_loss", "critic/score/mean")


def run(model: Path, folder: Path, processes: int, until: int) -> dict[int, dict[str, float]]:
    """Go on to step ``until`` on so many processes; the metrics of all steps so far."""
    trainer = make_trainer(
        model,
        folder,
        algorithm="ppo",
        trainer__n_gpus_per_node=processes,
        trainer__device="cpu",
        trainer__total_training_steps=until,
        trainer__save_final=True,
        actor_rollout_ref__actor__use_kl_loss=True,
    )
    try:
        trainer.fit()
    finally:
        trainer.close()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows}


def test_a_run_goes_on_with_another_number_of_processes(tmp_path):
    model = save_tiny_model(tmp_path / "model", "llama", tie_word_embeddings=True)
    alone = run(model, tmp_path / "alone", 1, 6)
    mixed = tmp_path / "mixed"
    for processes, until in ((1, 2), (2, 4), (1, 6)):
        found = run(model, mixed, processes, until)
    assert set(found) >= {1, 2, 3, 4, 5, 6}
    for step in range(1, 7):
        for name in COMPARED:
            assert found[step][name] == pytest.approx(alone[step][name], rel=2e-3, abs=1e-6), (step, name)
    assert found[3]["timing_s/reshard"] > 0 and found[2]["timing_s/reshard"] > 0
    weights = [
        load_file(folder / "global_step_6" / "actor" / "model.safetensors") for folder in (tmp_path / "alone", mixed)
    ]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-3, atol=1e-5)
