"""What VLLMEngine arranges for a GPU: which ones its process sees, memory, and whose tensor is whose."""

from __future__ import annotations

import pickle

import pytest
import torch
from tiny_models import make_model

from verl import notices
from verl.errors import RolloutError
from verl.rollout.remote import weights
from verl.rollout.remote.receiving import DEVICE
from verl.rollout.remote.settings import RemoteSettings
from verl.rollout.vllm.engine import VLLMEngine
from verl.rollout.vllm.receiver import WeightReceiver, _reads_parameters

GIB = 2**30


@pytest.mark.parametrize(
    "variable, device, gpus, seen",
    [
        (None, "cuda:0", 1, "0"),
        (None, "cuda:2", 2, "2,3"),
        ("4,5,6,7", "cuda:1", 2, "5,6"),
        ("GPU-a,GPU-b", "cuda:1", 1, "GPU-b"),
        ("4,5", "cuda:1", 2, None),
    ],
)
def test_the_trainers_gpu_is_the_first_of_its_process(variable, device, gpus, seen, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    if seen is None:
        with pytest.raises(RolloutError, match=r"tensor_model_parallel_size=2 needs.*there are 2 in all"):
            VLLMEngine.environment(torch.device(device), gpus)
        return
    variables = VLLMEngine.environment(torch.device(device), gpus)
    assert variables["CUDA_VISIBLE_DEVICES"] == seen and variables["PYTORCH_CUDA_ALLOC_CONF"] == ""


def test_it_asks_for_memory_that_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (61 * GIB, 100 * GIB))
    model = make_model("llama", dtype=torch.bfloat16)
    fitted = VLLMEngine.fitted(RemoteSettings(gpu_memory_utilization=0.9), model, torch.device("cuda:0"))
    assert fitted.gpu_memory_utilization == 0.6 and fitted.dtype == "bfloat16"
    assert any("gpu_memory_utilization=0.9 is lowered to 0.6" in text for text in notices.seen())
    fitted = VLLMEngine.fitted(RemoteSettings(gpu_memory_utilization=0.5), model, torch.device("cuda:0"))
    assert fitted.gpu_memory_utilization == 0.5 and not fitted.engine_kwargs


def test_on_a_cpu_the_cache_is_as_large_as_needed():
    model = make_model("llama")  # 2 layers, 2 heads of 8
    settings = RemoteSettings(max_model_len=100, max_num_seqs=4)
    fitted = VLLMEngine.fitted(settings, model, torch.device("cpu"))
    token = 2 * 2 * 2 * 8 * 4
    assert fitted.engine_kwargs["kv_cache_memory_bytes"] == 4 * 2 * 128 * token
    own = RemoteSettings(engine_kwargs={"kv_cache_memory_bytes": 7})
    assert VLLMEngine.fitted(own, model, torch.device("cpu")).engine_kwargs["kv_cache_memory_bytes"] == 7


def rebuilt(*arguments):
    return torch.full((2,), float(arguments[DEVICE]))


def test_a_tensor_of_the_trainer_is_opened_on_the_first_gpu():
    arguments = (*range(DEVICE), 3, *range(8))
    receiver = WeightReceiver()
    receiver.verl_open(pickle.dumps([("w", "float32", (2,), ("cuda", rebuilt, arguments))]))
    assert dict(receiver._verl_items())["w"].tolist() == [0, 0]


def test_weights_that_cannot_be_opened_are_copied_and_told(monkeypatch):
    shared = []

    def reduce_tensor(tensor):
        if tensor.data_ptr() in live:
            raise RuntimeError("CUDA error: invalid argument\nmore")
        shared.append(tensor)
        return rebuilt, ()

    model = make_model("llama")
    live = {parameter.data_ptr() for parameter in model.parameters()}
    monkeypatch.setattr(weights, "reduce_tensor", reduce_tensor)
    exported = weights.ExportedWeights.__new__(weights.ExportedWeights)
    exported._staged = {}
    row = exported._cuda_row("head", model.lm_head.weight, True)
    assert row[:3] == ("head", "float32", tuple(model.lm_head.weight.shape)) and row[3][0] == "cuda"
    assert torch.equal(exported._staged["head"], model.lm_head.weight) and exported._staged["head"] is shared[0]
    assert any("CUDA error: invalid argument" in text and "reads a copy" in text for text in notices.seen())
    monkeypatch.setattr(weights, "reduce_tensor", lambda tensor: (_ for _ in ()).throw(RuntimeError("no")))
    with pytest.raises(RolloutError, match=r"by CUDA IPC \(no\).*expandable_segments"):
        exported._cuda_row("head", model.lm_head.weight, True)


def test_only_plain_layers_on_a_gpu_are_written_directly():
    assert not _reads_parameters(make_model("llama"))  # on a CPU vLLM packs its weights
