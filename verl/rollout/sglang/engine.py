"""SGLangEngine: rollouts in SGLang, in a process of its own on the trainer's device."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.notices import notice
from verl.rollout.remote.client import Program
from verl.rollout.remote.engine import CONTEXT_BYTES, ProcessEngine, cache_tokens_on_cpu, write_model_folder
from verl.rollout.remote.settings import RemoteSettings
from verl.rollout.sglang.versions import installed_sglang

MOST = 0.95  # of the free memory: SGLang computes with what is left
PROGRAM = Program(
    "SGLang",
    "verl.rollout.sglang.adapter",
    {
        "HF_HUB_OFFLINE": "1",  # everything it reads is in one local folder
        "TOKENIZERS_PARALLELISM": "false",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # a few places more than the model's own length
    },
)


class SGLangEngine(ProcessEngine):
    """SGLang over the weights of the twin.

    Its log-probs are those of the temperature distribution, before filters, as training has them; those under a cut
    distribution (``sampled_log_probs``) it does not tell. It draws from one stream of random numbers for all requests,
    unless ``enable_deterministic_inference`` is among its arguments.
    """

    name, title, program = "sglang", PROGRAM.title, PROGRAM
    before_filters = True
    check_installed = staticmethod(installed_sglang)

    @staticmethod
    def environment(device: torch.device, gpus: int) -> dict[str, str]:
        if device.type == "cpu":
            return {"SGLANG_USE_CPU_ENGINE": "1"}
        return ProcessEngine.environment(device, gpus)

    @staticmethod
    def fitted(settings: RemoteSettings, twin: PreTrainedModel, device: torch.device) -> RemoteSettings:
        if not settings.engine_kwargs.get("enable_deterministic_inference"):
            notice(
                "SGLang draws the tokens of all responses from one stream of random numbers, so a run is not repeated "
                "exactly; actor_rollout_ref.rollout.engine_kwargs.sglang.enable_deterministic_inference=true gives "
                "each response its own seed, and is slower."
            )
        settings = ProcessEngine.fitted(settings, twin, device)
        if device.type == "cuda":  # SGLang counts in what it finds free, not in the whole GPU
            free, total = torch.cuda.mem_get_info(device)
            share = settings.gpu_memory_utilization * total / max(free - CONTEXT_BYTES, 1)
            return replace(settings, gpu_memory_utilization=round(min(share, MOST), 3))
        if "max_total_tokens" in settings.engine_kwargs:
            return settings
        tokens = cache_tokens_on_cpu(settings, twin, page=16)
        return replace(settings, engine_kwargs={**settings.engine_kwargs, "max_total_tokens": tokens})

    def write_folder(self, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """Without ids that end a response: SGLang cannot be told to leave out its own and keep those of a request."""
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.eos_token = None
        write_model_folder(self.twin, tokenizer, folder, eos_token_id=None)
