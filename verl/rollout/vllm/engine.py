"""VLLMEngine: rollouts in vLLM, in a process of its own on the trainer's device."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from verl.rollout.remote.client import Program
from verl.rollout.remote.engine import ProcessEngine, cache_bytes_of_token, cache_tokens_on_cpu
from verl.rollout.remote.settings import RemoteSettings
from verl.rollout.vllm.versions import installed_vllm

QUIET = {
    "HF_HUB_OFFLINE": "1",  # everything it reads is in one local folder
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",  # it asks the network for an address else
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}
PROGRAM = Program("vLLM", "verl.rollout.vllm.adapter", QUIET)
PAGE = 128  # tokens, on a CPU


class VLLMEngine(ProcessEngine):
    """vLLM over the weights of the twin."""

    name, title, program = "vllm", PROGRAM.title, PROGRAM
    check_installed = staticmethod(installed_vllm)

    @staticmethod
    def environment(device: torch.device, gpus: int) -> dict[str, str]:
        if device.type == "cpu":
            # a process of its own for the scheduler only takes time from the one that computes
            return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        return {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", **ProcessEngine.environment(device, gpus)}

    @staticmethod
    def fitted(settings: RemoteSettings, twin: PreTrainedModel, device: torch.device) -> RemoteSettings:
        settings = ProcessEngine.fitted(settings, twin, device)
        if device.type == "cuda" or "kv_cache_memory_bytes" in settings.engine_kwargs:
            return settings
        size = cache_tokens_on_cpu(settings, twin, PAGE) * cache_bytes_of_token(settings, twin)
        return replace(settings, engine_kwargs={**settings.engine_kwargs, "kv_cache_memory_bytes": size})
