"""The only module that calls vLLM (0.24 and newer). Its calls are those that these versions have in common.

Runs in the host process, see ``host.py``.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from verl.rollout.base import Completion, Request
from verl.rollout.remote.settings import RemoteSettings

RECEIVER = "verl.rollout.vllm.receiver.WeightReceiver"


def engine_arguments(folder: str, settings: RemoteSettings, device: str) -> dict[str, Any]:
    """Arguments of ``vllm.EngineArgs``.

    The weights are made up at the start (``load_format=dummy``), as the trainer's are written over them before
    anything is generated.
    """
    eager = device == "cpu" if settings.enforce_eager is None else settings.enforce_eager
    arguments: dict[str, Any] = {
        "model": folder,
        "load_format": "dummy",
        "dtype": settings.dtype or "auto",
        "seed": settings.seed,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enforce_eager": eager,
        "enable_chunked_prefill": settings.enable_chunked_prefill,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "trust_remote_code": settings.trust_remote_code,
        "enable_sleep_mode": settings.sleep and device == "cuda",
        # of the distribution that was drawn from: temperature and filters applied
        "logprobs_mode": "processed_logprobs",
        # the model's own sampling defaults must not slip into ours
        "generation_config": "vllm",
        "worker_extension_cls": RECEIVER,
        "disable_log_stats": True,
    }
    return {**arguments, **settings.engine_kwargs}


class Adapter:
    """An engine in this process (its workers may be others)."""

    def __init__(self, folder: str, settings: RemoteSettings, device: str, eos_token_ids: Sequence[int]):
        from vllm import EngineArgs, LLMEngine

        self.engine = LLMEngine.from_engine_args(EngineArgs(**engine_arguments(folder, settings, device)))
        self.eos = tuple(eos_token_ids)
        self.max_model_len = self.engine.model_config.max_model_len
        self._names: dict[str, str] = {}  # of the unfinished requests: our id → vLLM's

    # ---- requests --------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        prompt = {"prompt_token_ids": [int(i) for i in request.prompt_ids]}
        self._names[request.id] = self.engine.add_request(request.id, prompt, self._sampling(request))

    def _sampling(self, request: Request) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = request.params
        stops = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *self.eos)
        return SamplingParams(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            min_tokens=params.min_tokens,
            seed=None if params.greedy else request.seed,
            stop=list(params.stop),
            # one list of ids decides, so that vLLM's own idea of the eos token does not matter
            stop_token_ids=sorted(set(stops)),
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(params.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    @property
    def busy(self) -> bool:
        return bool(self._names)

    def step(self) -> list[Completion]:
        """One step of the engine; the requests that it finished."""
        return [self._finished(output) for output in self.engine.step() if output.finished]

    def _finished(self, output: Any) -> Completion:
        self._names.pop(output.request_id, None)
        done = output.outputs[0]
        reason = done.finish_reason if done.finish_reason in ("stop", "length") else "abort"
        return completion(output.request_id, done.token_ids, done.logprobs, reason)

    def abort(self, ids: Iterable[str] | None) -> list[Completion]:
        """End these requests (all if None); what they have written."""
        wanted = list(self._names) if ids is None else [i for i in ids if i in self._names]
        written = []
        for i in wanted:
            state = self.engine.output_processor.request_states[self._names[i]]
            written.append(
                completion(i, state.detokenizer.output_token_ids, state.logprobs_processor.logprobs, "abort")
            )
        self.engine.abort_request([self._names.pop(i) for i in wanted], internal=True)
        return written

    # ---- weights and memory ----------------------------------------------------------------------------------------

    def open_weights(self, table: list[tuple]) -> None:
        """Tell the workers where the trainer's weights lie. Bytes pass every transport between vLLM's processes."""
        self.engine.collective_rpc("verl_open", args=(pickle.dumps(table),))

    def load_weights(self) -> float:
        """Take over the weights as they are now; seconds of the slowest worker."""
        seconds = self.engine.collective_rpc("verl_load")
        self.engine.reset_prefix_cache()
        return max(float(s) for s in seconds)

    def sleep(self) -> None:
        """Give memory back; the weights are gone then."""
        self.engine.reset_prefix_cache()
        self.engine.sleep(level=2)

    def wake(self, tags: list[str]) -> None:
        self.engine.wake_up(tags)


def completion(request_id: str, tokens: Sequence[int], table: Any, reason: str) -> Completion:
    """``table``: vLLM's flat log-probs, in which each position begins with the sampled token."""
    log_probs = [table.logprobs[start] for start in table.start_indices][: len(tokens)]
    return Completion(request_id, np.array(tokens, np.int64), np.array(log_probs, np.float32), reason)
