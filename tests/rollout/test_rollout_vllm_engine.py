"""VLLMEngine without vLLM: its process, its weights, its probe. A host with the same protocol stands in."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import make_model, make_tokenizer
from vllm_fake_host import InThread

from verl.errors import RolloutError
from verl.hybrid import OneDeviceHybrid, make_twin
from verl.models.lora import add_adapters
from verl.models.settings import LoraSettings
from verl.rollout import Request, SamplingParams
from verl.rollout.hf import HFEngine
from verl.rollout.remote import probe
from verl.rollout.remote.client import EngineProcess
from verl.rollout.remote.settings import RemoteSettings
from verl.rollout.remote.weights import ExportedWeights, checkpoint_tensors
from verl.rollout.rows import stream_rows
from verl.rollout.vllm.engine import PROGRAM, VLLMEngine


def engine_for(model, fault="", process=InThread, **settings):
    settings = RemoteSettings(max_model_len=64, max_num_seqs=8, engine_kwargs={"fault": fault}, **settings)
    return VLLMEngine(make_twin(model), make_tokenizer(), (1,), settings, process=process)


def as_program(module):
    """Makes the process run another module."""
    return lambda program, environment=None: EngineProcess(replace(program, module=module), environment)


def requests_for(params, name="r", count=4):
    return [Request(f"{name}{i}", np.array([7, 8, 9 + i // 2]), params, seed=10 + i) for i in range(count)]


@pytest.fixture(scope="module")
def shared():
    """(model, engine): tests that change no weights and break nothing."""
    model = make_model("llama")
    engine = engine_for(model)
    yield model, engine
    engine.close()
    assert not engine.process.thread.is_alive()  # it noticed, without being told


def test_the_same_tokens_as_an_engine_in_this_process(shared):
    model, engine = shared
    here = HFEngine(make_twin(model), make_tokenizer(), (1,))
    for k, params in enumerate((SamplingParams(12, temperature=0), SamplingParams(12, temperature=0.7))):
        requests = requests_for(params, f"same{k}/")
        for ours, theirs in zip(engine.generate(requests), here.generate(requests), strict=True):
            assert ours.token_ids.tolist() == theirs.token_ids.tolist()
            assert ours.finish_reason == theirs.finish_reason and ours.sampled_log_probs is None
            np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=1e-5)


def test_filtered_rows_have_both_log_probs(shared):
    model, engine = shared
    requests = requests_for(SamplingParams(8, temperature=1.2, top_k=3, ignore_eos=True), "filtered")
    for request, done in zip(requests, engine.generate(requests), strict=True):
        np.testing.assert_allclose(done.log_probs, probe.model_log_probs(model, request, done), atol=1e-5)
        assert (done.sampled_log_probs > done.log_probs + 1e-3).all()


def test_rows_stream_and_are_aborted(shared):
    _, engine = shared
    short, long = SamplingParams(2, ignore_eos=True), SamplingParams(40, ignore_eos=True)
    requests = requests_for(short, "short", 2) + requests_for(long, "long", 2)
    pieces = stream_rows(engine, requests, prompt_width=4, response_width=40, pad_id=0)
    first = next(pieces)
    assert set(first.non_tensor_batch["sample_id"]) <= {"short0", "short1"}
    pieces.close()
    assert engine.pending == 0 and engine.poll() == []
    engine.submit(requests_for(long, "again", 2))
    engine.abort(["again0", "not there"])
    done = {c.request_id: c for c in engine.poll()}
    assert done["again0"].finish_reason == "abort" and engine.pending == 1
    assert len(done["again0"].token_ids) == len(done["again0"].log_probs) < 40
    engine.abort()
    assert [c.request_id for c in engine.poll()] == ["again1"]


def test_prompts_that_do_not_fit(shared):
    _, engine = shared
    with pytest.raises(RolloutError, match="empty prompt"):
        engine.submit([Request("empty", np.array([], np.int64), SamplingParams(2))])
    with pytest.raises(RolloutError, match=r"70 tokens.*sequences of 64.*max_prompt_length"):
        engine.submit([Request("long", np.full(70, 7), SamplingParams(2))])
    assert engine.pending == 0


def test_new_weights_are_taken_over_and_measured():
    model = make_model("llama")
    engine = engine_for(model)
    hybrid = OneDeviceHybrid(model, lambda twin: engine, lambda: 1)
    request = requests_for(SamplingParams(12, temperature=0), count=1)[0]
    before = engine.generate([request])[0].token_ids.tolist()
    assert set(engine.take_metrics()) >= {"timing_s/weight_sync", "timing_s/weight_probe", "rollout/weight_probe_diff"}
    assert not len(engine.take_metrics())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    with hybrid.rollout_mode() as same:
        after = same.generate([Request("b", request.prompt_ids, request.params)])[0]
    assert after.token_ids.tolist() != before
    np.testing.assert_allclose(after.log_probs, probe.model_log_probs(model, request, after), atol=1e-5)
    assert engine.take_metrics()["rollout/weight_probe_diff"] < 1e-5
    engine.submit([Request("c", request.prompt_ids, SamplingParams(40, ignore_eos=True))])
    with pytest.raises(RolloutError, match="while responses were being written"):
        engine.weights_changed()
    engine.close()


def test_weights_that_do_not_arrive_stop_the_run():
    model = make_model("llama")
    engine = engine_for(model, "stale")
    engine.generate(requests_for(SamplingParams(2)))
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    with pytest.raises(RolloutError, match=r"differ from the training model's by 0\.\d+ on average.*probe_tolerance"):
        engine.weights_changed()
    generous = engine_for(model, "stale", probe_tolerance=5.0)
    generous.weights_changed()
    for one in (engine, generous):
        one.close()


def test_an_engine_that_fails_says_why():
    engine = engine_for(make_model("llama"), "raises")
    engine.generate(requests_for(SamplingParams(2)))
    with pytest.raises(
        RolloutError, match=r"vLLM failed: RuntimeError: CUDA error: an illegal memory.*last checkpoint"
    ):
        engine.weights_changed()
    with pytest.raises(RolloutError, match="vLLM failed: ValueError: the model is not supported"):
        engine_for(make_model("llama"), "no start")


def test_a_process_that_dies_is_one_sentence():
    with pytest.raises(RolloutError, match=r"ended with exit code 0 .*Its log is in .*last checkpoint") as raised:
        as_program("this")(PROGRAM).expect("ready")
    path = re.search(r"Its log is in (\S+\.log)", str(raised.value))[1]
    with open(path) as log:
        assert "Beautiful is better than ugly" in log.read()
    os.remove(path)
    deaf = as_program("vllm_deaf_host")(PROGRAM)
    assert deaf.receive(0.01) is None
    deaf.process.kill()
    with pytest.raises(RolloutError, match=r"was killed by SIGKILL in the middle of the run\. Run the same"):
        deaf.expect("ready")


def test_the_process_ends_with_the_engine():
    engine = engine_for(make_model("llama"), process=as_program("vllm_fake_host"))
    process, folder = engine.process.process, engine.process.folder
    assert process.poll() is None and (folder / "model" / "config.json").is_file()
    engine.generate(requests_for(SamplingParams(2)))
    exported = [source[1] for *_, source in engine.weights.table]
    assert all(os.path.exists(path) for path in exported)
    del engine
    assert process.poll() == 0 and not folder.exists()
    assert not any(os.path.exists(path) for path in exported)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_exported_names_are_those_of_a_checkpoint(family, tmp_path):
    from safetensors.torch import load_file

    model = make_model(family, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    exported = checkpoint_tensors(make_twin(model))
    assert set(exported) == set(saved)
    assert all(torch.equal(exported[name], saved[name]) for name in saved)


def test_adapters_are_merged_into_what_is_exported():
    model = make_model("llama")
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    add_adapters(model, LoraSettings(rank=4))
    twin = make_twin(model)
    weights = ExportedWeights(twin)
    names = [name for name, *_ in weights.table]
    assert set(names) == set(base)
    changed = "model.layers.0.self_attn.q_proj.weight"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    weights.refresh()
    merged = checkpoint_tensors(twin)[changed]
    assert torch.equal(weights._staged[changed], merged) and not torch.equal(merged, base[changed])
    assert torch.equal(weights._staged["lm_head.weight"], base["lm_head.weight"])


def test_tolerances_and_what_is_off():
    probe.check(0.05, tolerance=None, dtype="bfloat16", title="vLLM")
    for gap, tolerance, dtype in ((0.05, None, "float32"), (0.2, None, "bfloat16"), (float("nan"), 9.0, "float32")):
        with pytest.raises(RolloutError, match="vLLM does not compute what is being trained"):
            probe.check(gap, tolerance=tolerance, dtype=dtype, title="vLLM")
    assert probe.coarser("float32", "bfloat16") == "bfloat16" == probe.coarser("bfloat16", "float16")
