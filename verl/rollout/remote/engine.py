"""Engines that work outside this process: the requests that are out, and the rollout interface over a process."""

from __future__ import annotations

import copy
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.errors import RolloutError
from verl.metrics import Metrics
from verl.notices import notice
from verl.rollout.base import Completion, Request, RolloutEngine
from verl.rollout.remote import probe
from verl.rollout.remote.client import EngineProcess, Program
from verl.rollout.remote.settings import RemoteSettings
from verl.rollout.remote.weights import ExportedWeights

WAIT_S = 0.1  # that poll() waits for something to happen
CONTEXT_BYTES = 2**30  # what a second CUDA process takes before it holds anything


class RemoteRequests(RolloutEngine):
    """What engines that work elsewhere share: the requests that are out, and log-probs that they cannot give.

    Attributes:
        title: the engine, for people.
        before_filters: the engine tells log-probs of the distribution before top-k, top-p and min-p.
    """

    title: str
    before_filters = False

    def __init__(self, twin: PreTrainedModel, settings: RemoteSettings):
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
                f"The prompt of {request.id} has {len(request.prompt_ids)} tokens, and {self.title} was started for "
                f"sequences of {limit}: raise data.max_prompt_length or actor_rollout_ref.rollout.max_model_len."
            )

    def _take(self, done: Iterable[Completion]) -> list[Completion]:
        """Completions that are handed out: no longer out, and with the log-probs that the interface asks for."""
        return [self._with_plain_log_probs(self._out.pop(c.request_id), c) for c in done]

    def _with_plain_log_probs(self, request: Request, done: Completion) -> Completion:
        params = request.params
        if not params.adjusted and (self.before_filters or not params.filtered):
            return done
        what = "penalties" if self.before_filters else "filters and penalties"
        notice(
            f"{self.title} tells the log-probs of the distribution that {what} leave; those under the plain "
            "temperature are computed by the training model, one more forward pass a response."
        )
        plain = probe.model_log_probs(self.twin, request, done)
        sampled = done.log_probs if params.filtered and not self.before_filters else None
        return replace(done, sampled_log_probs=sampled, log_probs=plain)

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
        probe.check(gap, tolerance=self.settings.probe_tolerance, dtype=dtype, title=self.title, hint=hint)


class ProcessEngine(RemoteRequests):
    """An engine in a process of its own, which takes the weights of ``twin`` over before it generates from new ones.

    A subclass says which: ``name``, ``program`` and the hooks below :meth:`check_installed`.

    Args:
        twin: the rollout twin; its parameters are the live ones.
        eos_token_ids: ids that end a response unless ``ignore_eos``.
        process: makes the process; tests have one of their own.

    Raises:
        MissingDependencyError: the engine is not installed.
        RolloutError: it is too old, cannot serve the model, or died.
    """

    program: Program

    def __init__(
        self,
        twin: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: tuple[int, ...],
        settings: RemoteSettings,
        process: Callable[..., EngineProcess] | None = None,
    ):
        super().__init__(twin, settings)
        self.device = next(twin.parameters()).device
        if process is None:
            self.check_installed(self.device.type)
            process = EngineProcess
        self.process = process(self.program, environment=self.environment(self.device, settings.tensor_parallel_size))
        self.settings = self.fitted(settings, twin, self.device)
        folder = self.process.folder / "model"
        self.write_folder(tokenizer, folder)
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

    @staticmethod
    @abstractmethod
    def check_installed(device: str) -> object:
        """Raises if the engine cannot run on this kind of device."""

    @staticmethod
    def environment(device: torch.device, gpus: int) -> dict[str, str]:
        """Variables that the process must have."""
        return gpu_environment(device, gpus)

    @staticmethod
    def fitted(settings: RemoteSettings, twin: PreTrainedModel, device: torch.device) -> RemoteSettings:
        """With the model's own dtype, and memory that is really there."""
        return fitted_to_gpu(with_dtype(settings, twin), device)

    def write_folder(self, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """The model as the engine reads it at its start: no weights."""
        write_model_folder(self.twin, tokenizer, folder)

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


def write_model_folder(
    twin: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, **changed: object
) -> None:
    """Config and tokenizer, no weights; ``changed``: values of the config that are to be others."""
    config = copy.deepcopy(twin.config)
    config.architectures = [type(twin).__name__]
    for part in (config, config.get_text_config()):
        for name, value in changed.items():
            setattr(part, name, value)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def gpu_environment(device: torch.device, gpus: int) -> dict[str, str]:
    """On a GPU: which ones the process sees, and no memory that cannot be given back."""
    if device.type != "cuda":
        return {}
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(_visible(device, gpus))}
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments" in os.environ.get(name, ""):
            variables[name] = ""  # of the trainer's choosing; an engine's sleeping memory cannot be made of such
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


def with_dtype(settings: RemoteSettings, twin: PreTrainedModel) -> RemoteSettings:
    return replace(settings, dtype=settings.dtype or str(next(twin.parameters()).dtype).removeprefix("torch."))


def fitted_to_gpu(settings: RemoteSettings, device: torch.device) -> RemoteSettings:
    """With a share of the GPU that is really there."""
    if device.type != "cuda":
        return settings
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    share = round((free - CONTEXT_BYTES) / total, 3)
    if share >= settings.gpu_memory_utilization:
        return settings
    notice(
        f"rollout.gpu_memory_utilization={settings.gpu_memory_utilization:g} is lowered to {share:g}: the training "
        "state holds the rest of the GPU."
    )
    return replace(settings, gpu_memory_utilization=share)


def cache_bytes_of_token(settings: RemoteSettings, twin: PreTrainedModel) -> int:
    """Keys and values of one token."""
    config = twin.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * getattr(torch, settings.dtype or "float32").itemsize


def cache_tokens_on_cpu(settings: RemoteSettings, twin: PreTrainedModel, page: int) -> int:
    """A cache for as many full sequences as may run at once, within the share of memory that is allowed.

    ``page``: tokens of a page; a sequence has one to spare.
    """
    import psutil

    length = settings.max_model_len or twin.config.get_text_config().max_position_embeddings
    wanted = settings.max_num_seqs * (-(-length // page) + 1) * page
    allowed = settings.gpu_memory_utilization * psutil.virtual_memory().available
    return int(min(wanted, allowed / cache_bytes_of_token(settings, twin)))
