"""The only module that calls SGLang (0.5.23). Runs in the host process, see ``verl/rollout/remote/host.py``.

SGLang's Engine is asynchronous: a task a request, driven by the steps of the host.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from verl.rollout.base import Completion, Request, SamplingParams
from verl.rollout.remote.settings import RemoteSettings

LOADER = "verl.rollout.sglang.receiver.load"
ROOM = 8  # SGLang keeps some places of a sequence for itself
STEP_S = 0.05  # that a step waits for a response to end


def engine_arguments(folder: str, settings: RemoteSettings, device: str) -> dict[str, Any]:
    """Arguments of ``sglang.Engine``, which are those of its ServerArgs.

    The weights are made up at the start (``load_format=dummy``), as the trainer's are written over them before
    anything is generated.
    """
    on_cpu = device == "cpu"
    arguments: dict[str, Any] = {
        "model_path": folder,
        "load_format": "dummy",
        "device": device,
        "dtype": settings.dtype or "auto",
        "random_seed": settings.seed,
        "context_length": None if settings.max_model_len is None else settings.max_model_len + ROOM,
        "max_running_requests": settings.max_num_seqs,
        "max_prefill_tokens": settings.max_num_batched_tokens,
        "chunked_prefill_size": settings.max_num_batched_tokens if settings.enable_chunked_prefill else -1,
        "disable_radix_cache": not settings.enable_prefix_caching,
        "mem_fraction_static": settings.gpu_memory_utilization,
        "tp_size": settings.tensor_parallel_size,
        "disable_cuda_graph": on_cpu if settings.enforce_eager is None else settings.enforce_eager,
        "trust_remote_code": settings.trust_remote_code,
        "enable_memory_saver": settings.sleep and not on_cpu,
        "custom_weight_loader": [LOADER],
        "skip_server_warmup": True,
        "log_level": "warning",
    }
    if on_cpu:
        more = {"attention_backend": "torch_native", "sampling_backend": "pytorch", "disable_overlap_schedule": True}
        arguments.update(more)
    return {**arguments, **settings.engine_kwargs}


def sampling(params: SamplingParams, seed: int, eos: Sequence[int]) -> dict[str, Any]:
    """SGLang's sampling parameters. The ids that end a response are all named: its model folder knows none."""
    stops = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *eos)
    return {
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "min_new_tokens": params.min_tokens,
        "stop": list(params.stop) or None,
        "stop_token_ids": sorted(set(stops)),
        "no_stop_trim": True,
        "skip_special_tokens": False,
        # heard with enable_deterministic_inference only
        "sampling_seed": seed,
    }


class Adapter:
    """An engine whose schedulers are processes below this one."""

    def __init__(self, folder: str, settings: RemoteSettings, device: str, eos_token_ids: Sequence[int]):
        from sglang.srt.entrypoints.engine import Engine

        self.engine = Engine(**engine_arguments(folder, settings, device))
        self.loop: asyncio.AbstractEventLoop = self.engine.loop
        self.eos = tuple(eos_token_ids)
        self.max_model_len = settings.max_model_len or self.engine.tokenizer_manager.context_len - ROOM
        self._tasks: dict[str, asyncio.Task] = {}
        self._names: dict[str, str] = {}  # of the unfinished requests: our id → SGLang's
        self._count = 0
        self._asleep = False

    # ---- requests --------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        self._count += 1
        # none is the beginning of another: SGLang aborts every request whose name begins with the one it is given
        self._names[request.id] = f"{self._count:012d}"
        parameters = sampling(request.params, request.seed, self.eos)
        for limit in ("max_new_tokens", "min_new_tokens"):  # longer ones are refused
            parameters[limit] = min(parameters[limit], self.max_model_len - len(request.prompt_ids))
        answer = self.engine.async_generate(
            input_ids=[int(i) for i in request.prompt_ids],
            sampling_params=parameters,
            return_logprob=True,
            rid=self._names[request.id],
        )
        self._tasks[request.id] = self.loop.create_task(answer, name=request.id)

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    def step(self) -> list[Completion]:
        """What has ended since; waits a moment for something to."""
        return self._wait(self._tasks.values())

    def abort(self, ids: Iterable[str] | None) -> list[Completion]:
        """End these requests (all if None); what they have written."""
        wanted = {i: self._tasks[i] for i in (list(self._tasks) if ids is None else ids) if i in self._tasks}
        written: list[Completion] = []
        while wanted:
            for name in wanted:  # again and again: one that SGLang has not begun yet knows of nothing
                self.engine.tokenizer_manager.abort_request(self._names[name])
            done = self._wait(wanted.values())
            for completion in done:
                del wanted[completion.request_id]
            written += done
        return written

    def _wait(self, tasks: Iterable[asyncio.Task]) -> list[Completion]:
        waiting = asyncio.wait(list(tasks), timeout=STEP_S, return_when=asyncio.FIRST_COMPLETED)
        done, _ = self.loop.run_until_complete(waiting)
        return [self._finished(task) for task in done]

    def _finished(self, task: asyncio.Task) -> Completion:
        name = task.get_name()
        del self._tasks[name], self._names[name]
        return completion(name, task.result())

    # ---- weights and memory ----------------------------------------------------------------------------------------

    def open_weights(self, table: list[tuple]) -> None:
        """Where the trainer's weights lie. The schedulers open them at the first update."""
        self._table = torch.frombuffer(bytearray(pickle.dumps(table)), dtype=torch.uint8).clone()

    def load_weights(self) -> float:
        """Take over the weights as they are now; seconds."""
        started = time.perf_counter()
        _must(self.engine.begin_weight_update())
        _must(self.engine.update_weights_from_tensor([("table", self._table)], load_format=LOADER, flush_cache=False))
        _must(self.engine.end_weight_update())
        if not self._asleep:  # it was emptied before it went
            self.engine.flush_cache()
        return time.perf_counter() - started

    def sleep(self) -> None:
        """Give memory back; the weights are gone then."""
        self.engine.release_memory_occupation(tags=["kv_cache", "weights"])
        self._asleep = True

    def wake(self, tags: list[str]) -> None:
        self.engine.resume_memory_occupation(tags=tags)
        self._asleep = self._asleep and "kv_cache" not in tags


def completion(request_id: str, answer: dict[str, Any]) -> Completion:
    """A response of SGLang's: ids, and for each one [log-prob, id, text]."""
    about = answer["meta_info"]
    tokens, entries = answer["output_ids"], about["output_token_logprobs"]
    if [entry[1] for entry in entries] != list(tokens):
        raise ValueError(f"{request_id} has {len(tokens)} tokens and {len(entries)} log-probs that do not fit them")
    reason = about["finish_reason"]["type"]
    log_probs = np.array([entry[0] for entry in entries], np.float32)
    return Completion(
        request_id, np.array(tokens, np.int64), log_probs, reason if reason in ("stop", "length") else "abort"
    )


def _must(answer: Any) -> None:
    """Weight updates answer (success, message), or an object that holds both."""
    success, message = answer if isinstance(answer, tuple) else (answer.success, answer.message)
    if not success:
        raise RuntimeError(f"the weights were not taken over: {message}")
