"""Table B, rows 6 and 7: HybridDataflow and wrap_for_rl."""

from __future__ import annotations

import copy
import re
import threading

import pytest
import torch
from contract_blocks import HYBRID_DATAFLOW, WRAP_FOR_RL
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from verl import wrap_for_rl
from verl.dataflow import HybridDataflow, Node
from verl.errors import ConfigError, DataflowError, ModelError, RewardError
from verl.metrics import Metrics
from verl.models.packing import rows_of
from verl.protocol import DataProto

LLAMA = "meta-llama/Llama-3-8b"
LR = {"actor_rollout_ref.actor.optim.lr": 1e-2}


@pytest.fixture
def small(tmp_path, monkeypatch, hub_here):
    """A small graph whose reward is a function, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    flows = []

    def make(reward=lambda batch: [float(len(text)) for text in batch["responses"]], **more):
        settings = {"rollout_batch_size": 2, "max_seq_len": 64, "config": {"trainer.logger": []}, **more}
        flows.append(HybridDataflow("Qwen/Qwen2-0.5B", reward, **settings))
        return flows[-1]

    yield make
    for flow in flows:
        flow.close()


def test_B6_as_typed(tmp_path, monkeypatch, hub_here, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(HYBRID_DATAFLOW, "flow.py", "exec"), names)
    flow = names["flow"]
    assert "num_rollout_workers=4: this version generates in one process" in capsys.readouterr().out
    table = flow.describe()
    for text in ("Qwen/Qwen2-0.5B-critic", "generate", "score", "values", "update_critic", "critic.weights"):
        assert text in table
    assert flow.to_mermaid().startswith("flowchart TD")
    expected = flow.describe(gpu="RTX 3090")
    assert re.search(r"^seconds +expected on RTX 3090 if every response is full: \d+\.\d in all$", expected, re.M)
    times = {row.split()[1]: row for row in expected.splitlines() if re.match(r"\d", row)}
    for name in ("generate", "values", "update_actor", "update_critic"):
        assert re.search(r"\d\.\d{3}$", times[name].rstrip()), times[name]
    with pytest.raises(ConfigError, match="is not known; there are"):
        flow.describe(gpu="RTX 9999")
    assert flow._runner._trainer is None, "looking loads nothing"


def test_B6_step_run_and_a_critic_with_a_fresh_head(small, capsys):
    flow = small(reward="OpenBMB/reward-model", critic_model="Qwen/Qwen2-0.5B")
    first = flow.step()
    assert 0 < first["reward_mean"] < 1 and "critic/vf_loss" in first
    result = flow.run(["Hello there", "Good day"])
    assert result.step == 2 and len(result["sample"]) == 2
    assert (
        re.search(r"^seconds +of the last step$", flow.describe(), re.M)
        and flow._runner.trainer.plan.choice.device.described in flow.describe()
    )
    assert "The critic starts from Qwen/Qwen2-0.5B with a fresh value head" in capsys.readouterr().out


def test_B6_a_node_of_ones_own_in_five_lines(small):
    def count(batch):
        metrics = Metrics()
        metrics.add("own/tokens", float(batch.batch["response_mask"].sum()), reduce="sum")
        return metrics

    flow = small().add(Node("count", count, needs=["response_mask"]), after="generate")
    assert "count" in flow.nodes and flow.step()["own/tokens"] > 0
    with pytest.raises(ConfigError, match="change the graph before its first step"):
        flow.add(Node("late", count, needs=["response_mask"]))


def test_B6_a_second_reward(small):
    """The advantage takes the sum of two scores: one node renames, none is changed."""

    def bonus(batch):
        mask = batch.batch["response_mask"]
        return DataProto.from_dict(tensors={"extra": torch.where(mask.cumsum(1) == 1, 10.0, 0.0) * mask})

    seen = {}

    def look(batch):
        seen["extra"] = batch.batch["extra"].sum(1)

    flow = (
        small()
        .add(Node("bonus", bonus, ["response_mask"], ["extra"]), after="score")
        .add(Node("look", look, ["extra"]))
    )
    flow.step()
    assert seen["extra"].tolist() == [10.0, 10.0]


def test_B6_the_graph_refuses_before_anything_loads(small):
    flow = small()
    with pytest.raises(DataflowError, match="needs sample/nothing, which nobody gives"):
        flow.add(Node("n", print, needs=["nothing"]))
    with pytest.raises(DataflowError, match="token_level_scores"):
        flow.add(Node("second", print, needs=["responses"], gives=["token_level_scores"]))
    with pytest.raises(DataflowError, match="token_level_scores"):
        flow.remove("score")
    with pytest.raises(DataflowError, match="wait for each other in a circle"):
        loop = Node("a", print, needs=["b"], gives=["a"])
        flow._change(lambda graph: graph.with_node(loop).with_node(Node("b", print, needs=["a"], gives=["b"])))
    with pytest.raises(ConfigError, match="has no critic"):
        small(algorithm="grpo", critic_model="Qwen/Qwen2-0.5B-critic")
    assert flow._runner._trainer is None and "n" not in flow.nodes


def test_B6_nodes_on_different_pools_overlap(small):
    """Each of two nodes waits until the other has begun: one after the other they would never end."""
    meeting = threading.Barrier(2, timeout=20)

    def meet(batch):
        meeting.wait()

    one, two = (Node(name, meet, ["response_mask"], pool=name) for name in ("left", "right"))
    assert small().add(one).add(two).step()["training/global_step"] == 1


def test_B7_as_typed(hub_here, capsys):
    names = {"input_ids": torch.randint(3, 300, (2, 9))}
    exec(compile(WRAP_FOR_RL, "wrap.py", "exec"), names)
    assert names["rl_model"] is names["model"] and type(names["model"]) is LlamaForCausalLM
    outputs = names["outputs"].batch
    assert outputs["responses"].shape == (2, 64) and torch.equal(outputs["sequences"][:, :9], names["input_ids"])
    if not torch.cuda.is_available():
        assert "use_flash_attention=True: there is no flash attention here" in capsys.readouterr().out


def test_B7_rollout_log_probs_are_the_models(hub_here):
    model = wrap_for_rl(AutoModelForCausalLM.from_pretrained(LLAMA))
    ids = torch.randint(3, 300, (2, 6))
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    batch = model.verl_rollout(ids, mask, max_new_tokens=5, n=2)
    assert len(batch) == 4
    for i, row in enumerate(rows_of(batch)):
        assert row.prompt.tolist() == ids[i // 2][mask[i // 2].bool()].tolist()
        with torch.no_grad():
            logits = model(torch.tensor([[*row.prompt, *row.response]])).logits[0].float()
        expected = logits.log_softmax(-1)[len(row.prompt) - 1 : -1].gather(1, torch.tensor(row.response)[:, None])[:, 0]
        got = batch.batch["rollout_log_probs"][i, : len(row.response)]
        assert torch.allclose(got, expected, atol=2e-2 if model.dtype == torch.bfloat16 else 1e-4)


def test_B7_update_moves_the_models_own_weights(hub_here, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32)
    names = set(model.state_dict())
    wrap_for_rl(model, config=LR)
    ids = torch.randint(3, 300, (4, 6))
    assert float(model.forward_with_kl(ids).kl.abs().max()) < 1e-5
    before, address = model.lm_head.weight.clone(), model.lm_head.weight.data_ptr()
    for _ in range(2):
        batch = model.verl_rollout(ids, max_new_tokens=5)
        metrics = model.verl_update(batch, rewards=torch.tensor([1.0, 0.0, 0.0, 1.0]))
    assert metrics["critic/score/mean"] == 0.5 and "actor/reward_kl_penalty" in metrics
    assert not torch.equal(before, model.lm_head.weight) and model.lm_head.weight.data_ptr() == address
    out = model.forward_with_kl(ids)
    assert out.kl.shape == (4, 6) and out.kl.min() > -1e-6 and out.kl.max() > 1e-4
    out.kl.mean().backward()
    assert model.lm_head.weight.grad.abs().sum() > 0
    valued = model.generate_with_value(ids, max_new_tokens=5)
    assert valued.batch["values"].shape == (4, 5) and valued.batch["values"].abs().sum() > 0
    assert set(model.state_dict()) == names and model.generate(ids, max_new_tokens=2).shape[0] == 4
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(again) is type(model) and torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_B7_a_sampling_temperature_is_the_updates_too(hub_here):
    """Right after sampling, the update's log-probs are the sampled ones: their gap is the engines' rounding only."""
    model = wrap_for_rl(AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32), enable_kl_penalty=False)
    batch = model.verl_rollout(torch.randint(3, 300, (2, 6)), max_new_tokens=5, temperature=0.6)
    metrics = model.verl_update(batch, rewards=[1.0, 0.0])
    assert metrics["training/rollout_probs_diff_max"] < 1e-3


def test_B7_rewards_and_reference(hub_here):
    def longest(batch):
        return [float(len(text)) for text in batch["responses"]]

    plain = AutoModelForCausalLM.from_pretrained(LLAMA)
    reference = copy.deepcopy(plain)
    model = wrap_for_rl(plain, reference=reference, reward_fn=longest, config=LR)
    ids = torch.randint(3, 300, (2, 6))
    assert model.verl_update(model.verl_rollout(ids, max_new_tokens=4))["critic/score/mean"] > 0
    with pytest.raises(RewardError, match=r"shape \(3,\), expected \(2,\)"):
        model.verl_update(model.verl_rollout(ids, max_new_tokens=4), rewards=[1.0, 2.0, 3.0])
    bare = wrap_for_rl(AutoModelForCausalLM.from_pretrained(LLAMA), enable_kl_penalty=False)
    with pytest.raises(RewardError, match="needs one reward a row"):
        bare.verl_update(bare.verl_rollout(ids, max_new_tokens=4))
    with pytest.raises(ConfigError, match="needs a reference"):
        bare.forward_with_kl(ids)


def test_B7_modes_and_what_cannot_be_wrapped(hub_here):
    model = wrap_for_rl(AutoModelForCausalLM.from_pretrained(LLAMA))
    assert not model.shard_for_hybrid("rollout").training and model.shard_for_hybrid("update").training
    with pytest.raises(ConfigError, match="the modes are 'rollout' and 'update'"):
        model.shard_for_hybrid("infer")
    with pytest.raises(ModelError, match="takes a causal language model"):
        wrap_for_rl(torch.nn.Linear(2, 2))
    model.hf_device_map = {"model.embed_tokens": 0, "lm_head": "cpu"}
    with pytest.raises(ModelError, match=r"spread over 0, cpu by accelerate's hooks.*without device_map"):
        wrap_for_rl(model)
