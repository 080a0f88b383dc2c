"""VLLMEngine: rollouts in vLLM, in a process of its own on the trainer's device."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.errors import RolloutError
from verl.metrics import Metrics
from verl.notices import notice
from verl.rollout.base import Completion, Request, RolloutEngine
from verl.rollout.vllm import probe
from verl.rollout.vllm.client import EngineProcess
from verl.rollout.vllm.settings import VLLMSettings
from verl.rollout.vllm.versions import installed_vllm
from verl.rollout.vllm.weights import ExportedWeights

WAIT_S = 0.1  # that poll() waits for something to happen
CONTEXT_BYTES = 2**30  # what a second CUDA process takes before it holds anything


class RemoteRequests(RolloutEngine):
    """What engines that work elsewhere share: the requests that are out, and log-probs that they cannot give."""

    def __init__(self, twin: PreTrainedModel, settings: VLLMSettings):
        self.twin, self.settings = twin, settings
        self.vocabulary = int(twin.config.get_text_config().vocab_size)
        self._out: dict[str, Request] = {}
        self._finished: list[Completion] = []
        self._measured = Metrics()
        self._rounds = 0

    @property
    def pending(self) -> int:
        return len(self._out)

    def take_metrics(self) -> Metrics:
        measured, self._measured = self._measured, Metrics()
        return measured

    def _check(self, request: Request) -> None:
        if not len(request.prompt_ids):
            raise RolloutError(f"Request {request.id} has an empty prompt; there is nothing to continue.")
        limit = self.settings.max_model_len
        if limit is not None and len(request.prompt_ids) >= limit:
            raise RolloutError(
                f"The prompt of {request.id} has {len(request.prompt_ids)} tokens, and vLLM was started for sequences "
                f"of {limit}: raise data.max_prompt_length or actor_rollout_ref.rollout.max_model_len."
            )

    def _take(self, done: Iterable[Completion]) -> list[Completion]:
        """Completions that are handed out: no longer out, and with the log-probs that the interface asks for."""
        return [self._with_plain_log_probs(self._out.pop(c.request_id), c) for c in done]

    def _with_plain_log_probs(self, request: Request, done: Completion) -> Completion:
        params = request.params
        if not params.filtered and not params.adjusted:
            return done
        notice(
            "vLLM tells the log-probs of the distribution that filters and penalties leave; those under the plain "
            "temperature are computed by the training model, one more forward pass a response."
        )
        plain = probe.model_log_probs(self.twin, request, done)
        return replace(done, sampled_log_probs=done.log_probs if params.filtered else None, log_probs=plain)

    def _probe(self, hint: str = "") -> None:
        """Compare log-probs; an engine that is off ends the run."""
        started = time.perf_counter()
        self._rounds += 1
        requests = probe.probe_requests(self.vocabulary, self._rounds)
        gap = probe.difference(self.twin, requests, self.generate(requests))
        self._measured.add("rollout/weight_probe_diff", gap, reduce="max")
        self._measured.add("timing_s/weight_probe", time.perf_counter() - started, reduce="sum")
        trained = str(next(self.twin.parameters()).dtype).removeprefix("torch.")
        dtype = probe.coarser(trained, self.settings.dtype or trained)
        probe.check(gap, tolerance=self.settings.probe_tolerance, dtype=dtype, hint=hint)


class VLLMEngine(RemoteRequests):
    """vLLM over the weights of ``twin``, which it takes over before it generates from new ones.

    Args:
        twin: the rollout twin; its parameters are the live ones.
        eos_token_ids: ids that end a response unless ``ignore_eos``.
        process: makes the process; tests have one of their own.

    Raises:
        MissingDependencyError: vLLM is not installed. RolloutError: it is too old, cannot serve the model, or died.
    """

    name = "vllm"

    def __init__(
        self,
        twin: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: tuple[int, ...],
        settings: VLLMSettings,
        process: Callable[..., EngineProcess] | None = None,
    ):
        super().__init__(twin, settings)
        self.device = next(twin.parameters()).device
        if process is None:
            installed_vllm(self.device.type)
            process = EngineProcess
        self.process = process(environment=_environment(self.device, settings.tensor_parallel_size))
        self.settings = _fitted(settings, twin, self.device)
        folder = self.process.folder / "model"
        write_model_folder(twin, tokenizer, folder)
        self.process.send(
            "start",
            {
                "folder": str(folder),
                "settings": self.settings,
                "device": self.device.type,
                "eos_token_ids": eos_token_ids,
            },
        )
        ready = self.process.expect("ready")
        self.settings = replace(self.settings, max_model_len=ready["max_model_len"])
        self.weights: ExportedWeights | None = None
        self._stale, self._asleep = True, False
        self.release()

    def submit(self, requests: Iterable[Request]) -> None:
        requests = list(requests)
        for request in requests:
            self._check(request)
        if self._stale or self._asleep:
            self._take_over_weights()
        self._submit(requests)

    def _submit(self, requests: list[Request]) -> None:
        self._out.update((request.id, request) for request in requests)
        self.process.send("submit", requests)

    def poll(self) -> list[Completion]:
        wait = 0.0 if self._finished else WAIT_S
        while len(self._finished) < len(self._out):
            message = self.process.receive(wait)
            if message is None:
                break
            self._finished += message[1]
            wait = 0.0
        done, self._finished = self._finished, []
        return self._take(done)

    def abort(self, ids: Iterable[str] | None = None) -> None:
        finished = {completion.request_id for completion in self._finished}
        wanted = (set(self._out) if ids is None else set(ids) & set(self._out)) - finished
        if not wanted:
            return
        self.process.send("abort", sorted(wanted))
        while wanted:
            done = self.process.expect("done")
            self._finished += done
            wanted -= {completion.request_id for completion in done}

    def weights_changed(self) -> None:
        if self._out:
            raise RolloutError("The weights changed while responses were being written; abort them first.")
        self._stale = True
        self._take_over_weights()

    def release(self) -> None:
        """Sleep: give weights and cache back until the next request. On a CPU there is nothing to give back."""
        if self.settings.sleep and self.device.type == "cuda" and not self._out and not self._asleep:
            self.process.call("sleep")
            self._asleep = True

    def close(self) -> None:
        self.process.close()

    def _take_over_weights(self) -> None:
        """Wake up, take the weights as they are now, and see that they are those of the trainer."""
        started = time.perf_counter()
        if self._asleep:
            torch.cuda.empty_cache()  # what training has freed is free for all
            self.process.call("wake", ["weights"])
        if self.weights is None:
            self.weights = ExportedWeights(self.twin)
            self.process.call("open_weights", self.weights.table)
        self.weights.refresh()
        loading = time.perf_counter()
        self.process.call("load_weights")
        self._measured.add("timing_s/weight_load", time.perf_counter() - loading, reduce="sum")
        if self._asleep:
            self.process.call("wake", ["kv_cache"])
        self._measured.add("timing_s/weight_sync", time.perf_counter() - started, reduce="sum")
        self._stale = self._asleep = False
        self._probe()


def write_model_folder(twin: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Config and tokenizer, no weights."""
    config = copy.deepcopy(twin.config)
    config.architectures = [type(twin).__name__]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _environment(device: torch.device, gpus: int) -> dict[str, str]:
    if device.type == "cpu":
        # a process of its own for the scheduler only takes time from the one that computes
        return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    variables = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "CUDA_VISIBLE_DEVICES": ",".join(_visible(device, gpus))}
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments" in os.environ.get(name, ""):
            variables[name] = ""  # of the trainer's choosing; vLLM's sleeping memory cannot be made of such
    return variables


def _visible(device: torch.device, gpus: int) -> list[str]:
    """The trainer's GPU, which is the first one over there, and those after it that share the model."""
    known = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = known.split(",") if known else [str(i) for i in range(torch.cuda.device_count())]
    first = torch.cuda.current_device() if device.index is None else device.index
    if first + gpus > len(names):
        raise RolloutError(
            f"rollout.tensor_model_parallel_size={gpus} needs as many GPUs from number {first} on, and there are "
            f"{len(names)} in all."
        )
    return names[first : first + gpus]


def _fitted(settings: VLLMSettings, twin: PreTrainedModel, device: torch.device) -> VLLMSettings:
    """With the model's own dtype, and memory that is really there."""
    dtype = settings.dtype or str(next(twin.parameters()).dtype).removeprefix("torch.")
    settings = replace(settings, dtype=dtype)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        share = round((free - CONTEXT_BYTES) / total, 3)
        if share < settings.gpu_memory_utilization:
            notice(
                f"rollout.gpu_memory_utilization={settings.gpu_memory_utilization:g} is lowered to {share:g}: the "
                "training state holds the rest of the GPU."
            )
            settings = replace(settings, gpu_memory_utilization=share)
    elif "kv_cache_memory_bytes" not in settings.engine_kwargs:
        more = {**settings.engine_kwargs, "kv_cache_memory_bytes": _cache_bytes(settings, twin)}
        settings = replace(settings, engine_kwargs=more)
    return settings


def _cache_bytes(settings: VLLMSettings, twin: PreTrainedModel) -> int:
    """On a CPU: a cache for as many full sequences as may run at once, within the share of memory that is allowed."""
    import psutil

    config = twin.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    element = getattr(torch, settings.dtype or "float32").itemsize
    length = settings.max_model_len or config.max_position_embeddings
    token = 2 * config.num_hidden_layers * heads * width * element
    pages = -(-length // 128) + 1  # pages of 128 tokens, and one to spare for each sequence
    wanted = settings.max_num_seqs * pages * 128 * token
    return int(min(wanted, settings.gpu_memory_utilization * psutil.virtual_memory().available))
