"""The engine over the real SGLang, and a short run."""

from __future__ import annotations

import inspect
import os
import signal

import numpy as np
import psutil
import pytest
import torch
from tiny_models import make_model, make_tokenizer, save_tiny_model

from verl.errors import RolloutError
from verl.hybrid import make_twin
from verl.rollout import Request, SamplingParams
from verl.rollout.hf import HFEngine
from verl.rollout.remote.probe import model_log_probs
from verl.rollout.remote.settings import RemoteSettings
from verl.rollout.sglang.engine import SGLangEngine

PROMPTS = ([7, 8, 9], [10, 11, 12, 13, 14, 15, 16, 17], [20])
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


def requests_for(params, name, prompts=PROMPTS):
    return [Request(f"{name}/{i}", np.array(ids), params, seed=50 + i) for i, ids in enumerate(prompts)]


def change(model, by=0.05):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by * torch.randn_like(parameter))


@pytest.fixture(scope="module")
def shared():
    """(model, engine): SGLang takes a minute and more to start, so these tests have one."""
    model = make_model("llama", **WIDE)
    engine = SGLangEngine(make_twin(model), make_tokenizer(), (1,), RemoteSettings(max_model_len=96, max_num_seqs=8))
    yield model, engine
    engine.close()


def test_greedy_answers_are_those_of_the_simple_engine_before_and_after_an_update(shared):
    model, engine = shared
    here = HFEngine(make_twin(model), make_tokenizer(), (1,))
    for round_ in range(2):
        requests = requests_for(SamplingParams(16, temperature=0), f"greedy{round_}")
        for request, ours, theirs in zip(requests, engine.generate(requests), here.generate(requests), strict=True):
            assert ours.token_ids.tolist() == theirs.token_ids.tolist() and ours.finish_reason == theirs.finish_reason
            np.testing.assert_allclose(ours.log_probs, model_log_probs(model, request, ours), atol=1e-4)
        change(model)
        engine.weights_changed()
        here.weights_changed()
    assert engine.take_metrics()["rollout/weight_probe_diff"] < 1e-4


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(12, temperature=0.7),
        SamplingParams(12, temperature=1.3, top_k=5, top_p=0.9, ignore_eos=True),
        SamplingParams(12, repetition_penalty=1.5, min_tokens=6),
    ],
)
def test_log_probs_are_those_of_the_plain_temperature(shared, params):
    model, engine = shared
    requests = requests_for(params, f"plain{params.temperature}{params.top_k}{params.min_tokens}")
    for request, done in zip(requests, engine.generate(requests), strict=True):
        np.testing.assert_allclose(done.log_probs, model_log_probs(model, request, done), atol=1e-4)
        assert params.min_tokens <= len(done.token_ids) <= 12
        assert done.finish_reason == "length" or not params.ignore_eos


def test_ids_and_texts_that_end_a_response(shared):
    _, engine = shared
    plain = SamplingParams(16, temperature=0, ignore_eos=True)
    (free,) = engine.generate(requests_for(plain, "free", PROMPTS[:1]))
    assert len(free.token_ids) == 16 and free.finish_reason == "length"
    stop = int(free.token_ids[4])
    first = free.token_ids.tolist().index(stop)
    params = SamplingParams(16, temperature=0, ignore_eos=True, stop_token_ids=(stop,))
    (ended,) = engine.generate(requests_for(params, "id", PROMPTS[:1]))
    assert ended.token_ids.tolist() == free.token_ids.tolist()[: first + 1] and ended.finish_reason == "stop"
    text = make_tokenizer().decode(free.token_ids[2:5])
    params = SamplingParams(16, temperature=0, ignore_eos=True, stop=(text,))
    (ended,) = engine.generate(requests_for(params, "text", PROMPTS[:1]))
    assert ended.finish_reason == "stop" and ended.token_ids.tolist() == free.token_ids.tolist()[: len(ended.token_ids)]
    assert text in make_tokenizer().decode(ended.token_ids) and len(ended.log_probs) == len(ended.token_ids) <= 5


def test_rows_are_aborted(shared):
    _, engine = shared
    engine.submit(requests_for(SamplingParams(80, ignore_eos=True), "long"))
    engine.abort(["long/0", "not there"])
    done = {completion.request_id: completion for completion in engine.poll()}
    assert done["long/0"].finish_reason == "abort" and len(done["long/0"].token_ids) < 80
    engine.abort()
    rest = {completion.request_id for completion in engine.poll()}
    assert {*done, *rest} == {"long/0", "long/1", "long/2"} and engine.pending == 0


def test_an_engine_that_is_killed_is_one_sentence(shared):
    """The last test with the shared engine."""
    _, engine = shared
    engine.submit(requests_for(SamplingParams(80, ignore_eos=True), "killed"))
    for child in psutil.Process(engine.process.process.pid).children(recursive=True):
        os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(RolloutError, match=r"(The SGLang process|SGLang failed).*the last checkpoint"):
        while engine.pending:
            engine.poll()


def test_what_is_called_has_the_arguments_that_are_given():
    """Of what cannot run on a CPU: sleeping and waking, and the arguments of a GPU."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    from verl.rollout.sglang.adapter import engine_arguments

    for method in (Engine.release_memory_occupation, Engine.resume_memory_occupation):
        assert "tags" in inspect.signature(method).parameters
    known = set(inspect.signature(ServerArgs).parameters)
    assert set(engine_arguments("folder", RemoteSettings(), "cuda")) <= known
    assert set(engine_arguments("folder", RemoteSettings(), "cpu")) <= known


def test_a_short_run_with_the_trainer(tmp_path):
    from verl import Trainer
    from verl.config import load_config

    model = save_tiny_model(tmp_path / "llama", **WIDE)
    rollout, seen = "actor_rollout_ref.rollout", []
    config = load_config(values={
        "algorithm.name": "grpo", "actor_rollout_ref.model.path": str(model), "trainer.device": "cpu",
        "trainer.default_local_dir": str(tmp_path / "run"), f"{rollout}.name": "sglang", f"{rollout}.strict": True,
        f"{rollout}.n": 4, f"{rollout}.max_num_seqs": 8, f"{rollout}.temperature": 0.9, "data.train_batch_size": 4,
        "data.max_prompt_length": 32, "data.max_response_length": 16, "trainer.total_training_steps": 3,
        "actor_rollout_ref.model.dtype": "float32", "actor_rollout_ref.actor.optim.lr": 3e-3,
        "reward.reward_fn": lambda batch: [float(sum(map(str.isalpha, text))) for text in batch["responses"]],
        "trainer.logger": ["jsonl"], "trainer.save_final": False,
    })  # fmt: skip
    rows = [{"prompt": f"{i}+{i}="} for i in range(8)]
    trainer = Trainer(config, train_rows=rows, callbacks=(lambda _, metrics: seen.append(metrics),))
    trainer.fit()
    assert trainer.describe()["rollout_engine"] == "sglang" and len(seen) == 3
    for metrics in seen:
        assert metrics["training/rollout_probs_diff_max"] < 1e-4 and metrics["rollout/weight_probe_diff"] < 1e-4
