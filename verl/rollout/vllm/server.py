"""VLLMServerEngine: rollouts in a vLLM server that runs already, here or on another machine.

Requests go to its OpenAI completions address as token ids, one HTTP request a response, so rows come as they finish.
New weights are written as a checkpoint into a folder that both sides see, and the server is told to load it.
"""

from __future__ import annotations

import http.client
import json
import queue
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.errors import RolloutError
from verl.rollout.base import Completion, Request
from verl.rollout.remote.engine import WAIT_S, RemoteRequests, write_model_folder
from verl.rollout.remote.settings import RemoteSettings
from verl.rollout.remote.weights import checkpoint_tensors, memory_folder

NEEDED = ("/v1/completions", "/collective_rpc", "/reset_prefix_cache")
HOW = "start it with VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs"
TIMEOUT_S = 600.0


class Server:
    """JSON over HTTP, a connection a thread.

    Raises:
        RolloutError: from every method, if the server does not answer or refuses.
    """

    def __init__(self, url: str):
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RolloutError(f"rollout.server_url={url} is no address; give one such as http://localhost:8000")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._address, self._path = parts.netloc, parts.path.rstrip("/").removesuffix("/v1")
        self._threads = threading.local()

    def get(self, path: str) -> Any:
        return self._call("GET", path, None)

    def post(self, path: str, body: Any = None) -> Any:
        return self._call("POST", path, body)

    def _call(self, method: str, path: str, body: Any) -> Any:
        status, content = self._exchange(method, self._path + path, None if body is None else json.dumps(body))
        if status != 200:
            reason = content.decode(errors="replace").strip()[-400:] or "no reason given"
            raise RolloutError(f"The vLLM server at {self.url} answered {path} with status {status}: {reason}")
        try:
            return json.loads(content) if content.strip() else None
        except ValueError:
            raise RolloutError(f"The vLLM server at {self.url} answered {path} with no JSON.") from None

    def _exchange(self, method: str, path: str, body: str | None) -> tuple[int, bytes]:
        """A connection that the server has closed meanwhile is opened again, once."""
        for kept in (getattr(self._threads, "connection", None), None):
            connection = kept or self._kind(self._address, timeout=TIMEOUT_S)
            self._threads.connection = None
            try:
                connection.request(method, path, body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                content = response.read()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if kept is None:
                    raise RolloutError(
                        f"The vLLM server at {self.url} does not answer ({type(error).__name__}: {error}). When it "
                        "runs again, run the same command again to go on from the last checkpoint."
                    ) from error
                continue
            self._threads.connection = connection
            return response.status, content
        raise AssertionError("unreachable")


class VLLMServerEngine(RemoteRequests):
    """The rollout interface over a server.

    Args:
        twin: the rollout twin; its parameters are the live ones.
        settings: ``server_url`` is needed.

    Raises:
        RolloutError: there is no server, it serves another model, or it takes no new weights.
    """

    name, title = "vllm_server", "vLLM"

    def __init__(
        self,
        twin: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: tuple[int, ...],
        settings: RemoteSettings,
    ):
        super().__init__(twin, settings)
        if settings.server_url is None:
            raise RolloutError("rollout.name=vllm_server needs rollout.server_url, the address of the server.")
        self.eos = tuple(eos_token_ids)
        self.server = Server(settings.server_url)
        self.model = self._examine()
        self._tokenizer = tokenizer
        self._folder: Path | None = None
        self._stale = True
        self._answers: queue.SimpleQueue[Completion | RolloutError] = queue.SimpleQueue()
        self._unanswered, self._dropped = 0, set[str]()
        self._pool = ThreadPoolExecutor(settings.max_num_seqs, thread_name_prefix="vllm-server")
        self._shutdown = weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)

    def _examine(self) -> str:
        """The name of the model; sees that weights can be handed over."""
        paths = (self.server.get("/openapi.json") or {}).get("paths", {})
        missing = [path for path in NEEDED if path not in paths]
        if missing:
            raise RolloutError(
                f"The vLLM server at {self.server.url} cannot take new weights (it has no {', '.join(missing)}): {HOW}"
            )
        card = self.server.get("/v1/models")["data"][0]
        longest, wanted = card.get("max_model_len"), self.settings.max_model_len
        if longest is not None and wanted is not None and longest < wanted:
            raise RolloutError(
                f"The vLLM server at {self.server.url} serves sequences of {longest} tokens, and prompt and response "
                f"may have {wanted}: start it with --max-model-len {wanted}"
            )
        self.settings = replace(self.settings, max_model_len=longest)
        return card["id"]

    # ---- the interface ---------------------------------------------------------------------------------------------

    def submit(self, requests: Iterable[Request]) -> None:
        requests = list(requests)
        for request in requests:
            self._check(request)
        if self._stale:
            self._take_over_weights()
        for request in requests:
            self._out[request.id] = request
            self._unanswered += 1
            self._pool.submit(self._answer, request)

    def poll(self) -> list[Completion]:
        done, self._finished = self._finished, []
        for completion in done:  # aborted ones: an answer that still comes finds nobody
            self._dropped.add(completion.request_id)
        wait = 0.0 if done else WAIT_S
        while self._unanswered:
            try:
                answer = self._answers.get(timeout=wait) if wait else self._answers.get_nowait()
            except queue.Empty:
                break
            wait = 0.0
            self._unanswered -= 1
            if isinstance(answer, RolloutError):
                raise answer
            if answer.request_id in self._dropped:
                self._dropped.discard(answer.request_id)
            else:
                done.append(answer)
        return self._take(done)

    def abort(self, ids: Iterable[str] | None = None) -> None:
        """The server goes on with what it has begun, and its answers are dropped: they come out empty."""
        finished = {completion.request_id for completion in self._finished}
        for name in set(self._out) if ids is None else set(ids) & set(self._out):
            if name not in finished:
                self._finished.append(_completion(name, (), (), "abort"))

    def close(self) -> None:
        """Ask nothing more; the server itself is not ours to end."""
        self._shutdown()

    def weights_changed(self) -> None:
        if self._out:
            raise RolloutError("The weights changed while responses were being written; abort them first.")
        self._stale = True
        self._take_over_weights()

    # ---- the server ------------------------------------------------------------------------------------------------

    def _answer(self, request: Request) -> None:
        """In a thread of the pool: whatever comes of it is put into the queue."""
        try:
            self._answers.put(self._completed(request))
        except RolloutError as error:
            self._answers.put(error)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            self._answers.put(
                RolloutError(
                    f"The vLLM server at {self.server.url} answered /v1/completions without what is needed "
                    f"({type(error).__name__}: {error}); versions from 0.24 on give token ids and log-probs"
                )
            )

    def _completed(self, request: Request) -> Completion:
        params = request.params
        stops = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *self.eos)
        body = {
            "model": self.model,
            "prompt": [int(i) for i in request.prompt_ids],
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "min_tokens": params.min_tokens,
            "seed": request.seed,
            "stop": list(params.stop),
            "stop_token_ids": sorted(set(stops)),
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        choice = self.server.post("/v1/completions", body)["choices"][0]
        reason = choice["finish_reason"] if choice["finish_reason"] in ("stop", "length") else "abort"
        return _completion(request.id, choice["token_ids"], choice["logprobs"]["token_logprobs"], reason)

    def _take_over_weights(self) -> None:
        started = time.perf_counter()
        self._drain()
        tensors = {name: tensor.detach() for name, tensor in checkpoint_tensors(self.twin).items()}
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if self._folder is None:
            self._folder = self._new_folder(size)
        # a new file in place of the old one: the server may still have that one mapped
        unfinished = self._folder / "unfinished"
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, unfinished, {"format": "pt"})
        unfinished.replace(self._folder / "model.safetensors")
        self.server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}})
        self.server.post("/reset_prefix_cache")
        self._measured.add("timing_s/weight_sync", time.perf_counter() - started, reduce="sum")
        self._stale = False
        self._probe(f" If the server leaves the temperature out of its log-probs, {HOW}.")

    def _drain(self) -> None:
        """Wait for answers that nobody wants any more: the server must be idle when its weights change."""
        while self._unanswered:
            self._answers.get(timeout=TIMEOUT_S)
            self._unanswered -= 1
        self._dropped.clear()

    def _new_folder(self, size: int) -> Path:
        if self.settings.server_weights_dir is None:
            parent = memory_folder(2 * size)
        else:
            parent = Path(self.settings.server_weights_dir)
            parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="verl-weights-", dir=parent))
        folder.chmod(0o755)
        self._remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        write_model_folder(self.twin, self._tokenizer, folder)
        return folder


def _completion(request_id: str, tokens: Any, log_probs: Any, reason: str) -> Completion:
    ids, values = np.array(tokens, np.int64), np.array(log_probs, np.float32)
    if len(ids) != len(values):
        raise ValueError(f"{len(ids)} tokens and {len(values)} log-probs")
    return Completion(request_id, ids, values, reason)
