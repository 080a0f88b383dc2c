"""SGLang without SGLang: when it is chosen, what it is told, what its answers mean, how its schedulers take weights.

The real one is run by tests/sglang.
"""

from __future__ import annotations

import asyncio
import json
import pickle

import numpy as np
import pytest
import torch
from rollout_versions import lookup
from tiny_models import make_model, make_tokenizer
from torch import nn
from vllm_fake_host import InThread

from verl import notices
from verl.config import load_config, resolve
from verl.errors import MissingDependencyError, RolloutError
from verl.hardware import Device, choose
from verl.hybrid import make_twin
from verl.rollout import Request, SamplingParams
from verl.rollout.hf import HFEngine
from verl.rollout.remote.settings import RemoteSettings
from verl.rollout.remote.weights import ExportedWeights
from verl.rollout.sglang import receiver
from verl.rollout.sglang.adapter import LOADER, ROOM, Adapter, completion, engine_arguments, sampling
from verl.rollout.sglang.engine import SGLangEngine
from verl.rollout.sglang.versions import installed_sglang
from verl.trainer.settings import hardware_for, remote_settings

ROLLOUT = "actor_rollout_ref.rollout"
CPU = Device("cpu", "x", cpu_flags=frozenset())
H200 = Device("cuda", "NVIDIA H200", (9, 0), 141 << 30)


def test_what_is_installed():
    assert installed_sglang("cuda", lookup(sglang="0.5.23")) == "0.5.23"
    with pytest.raises(MissingDependencyError, match="pip install sglang"):
        installed_sglang("cpu", lookup())
    with pytest.raises(RolloutError, match=r"sglang 0\.5\.9 is older than 0\.5\.23.*pip install 'sglang>=0\.5\.23'"):
        installed_sglang("cuda", lookup(sglang="0.5.9"))
    with pytest.raises(RolloutError, match="does not run on mps"):
        installed_sglang("mps", lookup(sglang="0.5.23"))


@pytest.mark.parametrize(
    "device, packages, lack",
    [
        (CPU, {}, "pip install sglang"),
        (CPU, {"sglang": "0.5.23"}, None),
        (H200, {"sglang": "0.5.23"}, None),
        (H200, {"sglang": "0.4.6"}, "0.4.6 is too old"),
        (Device("cuda", "Tesla T4", (7, 5), 16 << 30), {"sglang": "0.5.23"}, "8.0"),
        (Device("mps", "M1"), {"sglang": "0.5.23"}, "Apple"),
    ],
)
def test_where_it_can_run(device, packages, lack):
    found = choose(device, "2.13.0", packages).lacks.get("rollout_engine.sglang")
    assert (found is None) if lack is None else (lack in found)


def told(device, choice, **values):
    required = {"actor_rollout_ref.model.path": "x", "data.train_files": "x.jsonl", f"{ROLLOUT}.name": "sglang"}
    config = resolve(load_config(values={**required, **values}))
    return engine_arguments("folder", remote_settings(config, hardware_for(config, choice)), device)


def test_what_the_engine_is_told():
    arguments = told("cuda", choose(H200, "2.14.1", {"sglang": "0.5.23"}), **{
        f"{ROLLOUT}.dtype": "float16", f"{ROLLOUT}.max_num_seqs": 33, f"{ROLLOUT}.tensor_model_parallel_size": 2,
        f"{ROLLOUT}.gpu_memory_utilization": 0.7, f"{ROLLOUT}.enable_chunked_prefill": False,
        f"{ROLLOUT}.enable_prefix_caching": False, f"{ROLLOUT}.seed": 5,
        f"{ROLLOUT}.engine_kwargs.sglang": {"page_size": 16, "log_level": "info"},
        f"{ROLLOUT}.engine_kwargs.vllm": {"swap_space": 3},
        "data.max_prompt_length": 100, "data.max_response_length": 28,
    })  # fmt: skip
    wanted = {
        "model_path": "folder", "dtype": "float16", "max_running_requests": 33, "tp_size": 2, "page_size": 16,
        "context_length": 128 + ROOM, "mem_fraction_static": 0.7, "chunked_prefill_size": -1, "random_seed": 5,
        "disable_radix_cache": True, "disable_cuda_graph": False, "enable_memory_saver": True, "log_level": "info",
        "custom_weight_loader": [LOADER], "load_format": "dummy", "device": "cuda",
    }  # fmt: skip
    assert wanted.items() <= arguments.items() and "swap_space" not in arguments
    awake = told("cuda", choose(H200, "2.14.1", {"sglang": "0.5.23"}), **{f"{ROLLOUT}.free_cache_engine": False})
    assert not awake["enable_memory_saver"] and awake["chunked_prefill_size"] > 0
    on_cpu = told("cpu", choose(CPU, "2.13.0", {"sglang": "0.5.23"}), **{"trainer.device": "cpu"})
    assert on_cpu["disable_cuda_graph"] and not on_cpu["enable_memory_saver"]
    assert on_cpu["attention_backend"] == "torch_native"


def test_the_ids_that_end_a_response_are_named():
    found = sampling(
        SamplingParams(9, temperature=0.5, top_k=4, min_tokens=2, stop=("x",), stop_token_ids=(7,)), 3, (1,)
    )
    wanted = {"max_new_tokens": 9, "top_k": 4, "min_new_tokens": 2, "stop": ["x"], "stop_token_ids": [1, 7]}
    assert wanted.items() <= found.items() and found["sampling_seed"] == 3
    assert sampling(SamplingParams(9, ignore_eos=True, stop_token_ids=(7,)), 0, (1,))["stop_token_ids"] == [7]


def test_an_answer_is_ids_and_their_log_probs():
    about = {"output_token_logprobs": [[-0.5, 7, None], [-1.5, 8, None]], "finish_reason": {"type": "stop"}}
    done = completion("r", {"output_ids": [7, 8], "meta_info": about})
    assert done.token_ids.tolist() == [7, 8] and done.log_probs.tolist() == [-0.5, -1.5]
    assert done.finish_reason == "stop" and done.log_probs.dtype == np.float32
    with pytest.raises(ValueError, match="do not fit"):
        completion("r", {"output_ids": [7], "meta_info": about})


class Served(nn.Module):
    """What SGLang's models offer to a loader."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def load_weights(self, weights):
        own = self.model.state_dict()
        for name, tensor in weights:
            own[name].copy_(tensor)


def test_the_loader_opens_the_weights_once_and_reads_what_they_are_now():
    model, served = make_model("llama"), Served(make_model("llama"))
    exported = ExportedWeights(make_twin(model))
    table = torch.frombuffer(bytearray(pickle.dumps(exported.table)), dtype=torch.uint8)
    for _ in range(2):
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
        exported.refresh()
        receiver.load(served, [("table", table)])
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), served.model.parameters(), strict=True))
        (kept,) = receiver._open.values()
    assert next(iter(receiver._open.values())) is kept
    receiver._open.clear()


def test_its_model_folder_knows_no_end_and_its_engine_is_the_common_one():
    model = make_model("llama")
    engine = SGLangEngine(
        make_twin(model), make_tokenizer(), (1,), RemoteSettings(max_model_len=64, max_num_seqs=8), process=InThread
    )
    folder = engine.process.folder / "model"
    assert json.loads((folder / "config.json").read_text()).get("eos_token_id") is None
    assert json.loads((folder / "tokenizer_config.json").read_text()).get("eos_token") is None
    assert engine.settings.engine_kwargs["max_total_tokens"] >= 8 * 64
    assert any("one stream of random numbers" in text for text in notices.seen())
    here = HFEngine(make_twin(model), make_tokenizer(), (1,))
    requests = [Request(f"r{i}", np.array([7, 8, 9 + i]), SamplingParams(12, temperature=0)) for i in range(3)]
    for ours, theirs in zip(engine.generate(requests), here.generate(requests), strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    engine.close()


def test_filters_leave_its_log_probs_alone_and_penalties_do_not():
    model = make_model("llama")
    engine = SGLangEngine.__new__(SGLangEngine)
    engine.twin = make_twin(model)
    ids = np.array([7, 8, 9])
    done = completion("r", {
        "output_ids": [10, 11],
        "meta_info": {"output_token_logprobs": [[-1.0, 10, None], [-2.0, 11, None]], "finish_reason": {"type": "stop"}},
    })  # fmt: skip
    filtered = engine._with_plain_log_probs(Request("r", ids, SamplingParams(2, top_k=3)), done)
    assert filtered is done
    penalised = engine._with_plain_log_probs(Request("r", ids, SamplingParams(2, repetition_penalty=1.5)), done)
    assert penalised.log_probs.tolist() != done.log_probs.tolist() and penalised.sampled_log_probs is None
    assert any("SGLang tells the log-probs" in text for text in notices.seen())


class Recorder:
    """Takes requests as SGLang's Engine does, and ends those whose name begins with the one that is aborted."""

    def __init__(self):
        self.loop, self.told, self.futures = asyncio.new_event_loop(), {}, {}
        self.tokenizer_manager = self

    async def async_generate(self, **told):
        self.told[told["rid"]] = told
        self.futures[told["rid"]] = future = self.loop.create_future()
        await future
        return {"output_ids": [], "meta_info": {"output_token_logprobs": [], "finish_reason": {"type": "abort"}}}

    def abort_request(self, rid):
        for name, future in self.futures.items():
            if name.startswith(rid) and not future.done():
                future.set_result(None)


def test_one_request_is_aborted_and_long_ones_are_cut():
    adapter = Adapter.__new__(Adapter)
    adapter.engine = Recorder()
    adapter.loop, adapter.eos, adapter.max_model_len = adapter.engine.loop, (1,), 16
    adapter._tasks, adapter._names, adapter._count = {}, {}, 0
    for i in range(1, 13):
        adapter.add(Request(f"row/{i}", np.array([7] * i), SamplingParams(8)))
    (ended,) = adapter.abort(["row/1"])
    assert ended.request_id == "row/1" and ended.finish_reason == "abort" and len(adapter._tasks) == 11
    lengths = [told["sampling_params"]["max_new_tokens"] for told in adapter.engine.told.values()]
    assert lengths == [8] * 8 + [7, 6, 5, 4]
    assert {done.request_id for done in adapter.abort(None)} == {f"row/{i}" for i in range(2, 13)}
    assert not adapter.busy
    adapter.loop.close()
