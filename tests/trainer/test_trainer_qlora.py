"""QLoRA through a whole run: the native engine samples from quantised base and adapters, and a resumed run goes on."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from tiny_models import save_tiny_model
from trainer_helpers import make_trainer, weights

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None or importlib.util.find_spec("peft") is None,
    reason="the packages bitsandbytes and peft are not installed",
)
QLORA = {
    "actor_rollout_ref__model__lora_rank": 4,
    "actor_rollout_ref__model__quantization": "nf4",
    "actor_rollout_ref__actor__optim__optimizer": "AdamW8bit",
    "actor_rollout_ref__actor__use_kl_loss": True,
    "trainer__save_freq": 1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model") / "m", "qwen2", hidden_size=64)


def test_a_run_with_a_quantised_base_trains_and_resumes_bit_for_bit(model, tmp_path):
    whole = make_trainer(model, tmp_path / "a", **QLORA)
    assert whole.describe()["rollout_engine"] == "native"
    before = weights(whole)
    metrics = whole.fit()
    assert metrics["training/rollout_log_probs_diff_mean"] < 1e-4
    after = weights(whole)
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert moved and all("lora_" in name for name in moved)
    assert any(tensor.dtype == torch.uint8 for tensor in after.values())
    make_trainer(model, tmp_path / "b", trainer__total_training_steps=1, **QLORA).fit()
    resumed = make_trainer(model, tmp_path / "b", **QLORA)
    assert resumed.global_steps == 1
    resumed.fit()
    for name, tensor in weights(resumed).items():
        assert torch.equal(tensor, after[name]), name
