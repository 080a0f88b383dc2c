"""Row B7 with LoRA: the base is the reference, and only the adapters move."""

from __future__ import annotations

import pytest
import torch
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM

from verl import wrap_for_rl
from verl.errors import ConfigError, ModelError

peft = pytest.importorskip("peft")

LR = {"actor_rollout_ref.actor.optim.lr": 1e-2}
FORMS = ("wrapped", "injected")


@pytest.fixture
def folder(tmp_path):
    return save_tiny_model(tmp_path / "tiny")


def with_lora(folder, form):
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    if form == "wrapped":
        return peft.get_peft_model(model, config)
    return peft.inject_adapter_in_model(config, model, adapter_name="default")


@pytest.mark.parametrize("form", FORMS)
def test_B7_lora_trains_adapters_against_their_base(folder, form, tmp_path):
    model = with_lora(folder, form)
    kind = type(model)
    assert wrap_for_rl(model, config=LR) is model and type(model) is kind
    ids = torch.randint(10, 60, (4, 6))
    base = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert model.forward_with_kl(ids).kl.abs().max().item() < 1e-5  # fresh adapters change nothing
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for _ in range(2):
        batch = model.verl_rollout(ids, max_new_tokens=5)
        metrics = model.verl_update(batch, rewards=[1.0, 0.0, 0.0, 1.0])
    moved = {name for name, weight in model.named_parameters() if not torch.equal(before[name], weight)}
    assert moved and all("lora_" in name for name in moved)
    assert metrics["actor/reward_kl_penalty"] != 0
    out = model.forward_with_kl(ids)
    with torch.no_grad():
        theirs = base(input_ids=ids).logits.log_softmax(-1)
        mine = out.logits.log_softmax(-1)
    torch.testing.assert_close(out.kl.detach(), (mine.exp() * (mine - theirs)).sum(-1), atol=1e-5, rtol=1e-4)
    assert out.kl.max() > 1e-5
    if form == "wrapped":
        model.save_pretrained(tmp_path / "saved")
        assert (tmp_path / "saved" / "adapter_config.json").is_file()


def test_B7_lora_rollouts_come_from_the_adapted_model(folder):
    model = wrap_for_rl(with_lora(folder, "wrapped"), config=LR)
    ids = torch.randint(10, 60, (2, 6))
    for _ in range(3):
        model.verl_update(model.verl_rollout(ids, max_new_tokens=5), rewards=[1.0, -1.0])
    batch = model.verl_rollout(ids, max_new_tokens=5, ignore_eos=True)
    with torch.no_grad():
        logits = model(input_ids=batch.batch["sequences"]).logits[:, 5:-1].log_softmax(-1)
    expected = logits.gather(2, batch.batch["responses"][:, :, None])[:, :, 0]
    torch.testing.assert_close(batch.batch["rollout_log_probs"], expected, atol=1e-4, rtol=1e-4)


def test_B7_lora_without_a_kl_and_with_a_reference_of_ones_own(folder):
    bare = wrap_for_rl(with_lora(folder, "wrapped"), enable_kl_penalty=False)
    with pytest.raises(ConfigError, match="needs a reference"):
        bare.forward_with_kl(torch.randint(10, 60, (2, 6)))
    other = AutoModelForCausalLM.from_pretrained(save_tiny_model(folder.parent / "other", seed=1))
    model = wrap_for_rl(with_lora(folder, "wrapped"), reference=other)
    assert float(model.forward_with_kl(torch.randint(10, 60, (2, 6))).kl.max()) > 1e-3


def test_B7_lora_with_other_adapters_is_refused(folder):
    model = with_lora(folder, "wrapped")
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules="all-linear"))
    with pytest.raises(ModelError, match="one adapter named 'default'"):
        wrap_for_rl(model)
