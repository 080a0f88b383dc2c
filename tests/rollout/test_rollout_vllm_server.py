"""VLLMServerEngine against a small HTTP server that answers as vLLM's does, over Hugging Face modules."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_model, make_tokenizer

from verl.errors import RolloutError
from verl.hybrid import make_twin
from verl.rollout import Request, SamplingParams
from verl.rollout.hf import HFEngine
from verl.rollout.remote import probe
from verl.rollout.remote.settings import RemoteSettings
from verl.rollout.vllm.server import NEEDED, Server, VLLMServerEngine


class FakeServer(ThreadingHTTPServer):
    """``paths``: what it offers. ``fault``: a way to misbehave."""

    daemon_threads = True

    def __init__(self, paths=NEEDED, fault="", longest=64):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.paths, self.fault, self.longest = paths, fault, longest
        self.lock, self.calls = threading.Lock(), []
        self.model = make_model("llama", seed=5)
        self.engine = HFEngine(self.model, make_tokenizer(), ())
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, path, body):
        if path == "/openapi.json":
            return {"paths": {path: {} for path in self.paths}}
        if path == "/v1/models":
            return {"data": [{"id": "served", "max_model_len": self.longest}]}
        self.calls.append((path, body))
        if path == "/collective_rpc":
            folder = Path(body["kwargs"]["weights_path"])
            assert (folder / "config.json").is_file()
            self.model.load_state_dict(load_file(folder / "model.safetensors"))
            return {"results": [None]}
        return self._completion(body) if path == "/v1/completions" else None

    def _completion(self, body):
        if self.fault == "no ids":
            return {"choices": [{"finish_reason": "stop", "text": "?", "logprobs": None}]}
        assert body["model"] == "served" and body["ignore_eos"]
        params = SamplingParams(
            body["max_tokens"], body["temperature"], body["top_k"], body["top_p"], body["min_p"],
            stop_token_ids=tuple(body["stop_token_ids"]),
        )  # fmt: skip
        with self.lock:
            done = self.engine.generate([Request("x", np.array(body["prompt"]), params, body["seed"])])[0]
        values = done.log_probs if done.sampled_log_probs is None else done.sampled_log_probs
        if self.fault == "raw log-probs":
            values = values * 0.5
        choice = {"token_ids": done.token_ids.tolist(), "finish_reason": done.finish_reason}
        return {"choices": [{**choice, "logprobs": {"token_logprobs": values.tolist()}}]}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._reply(None)

    def do_POST(self):
        length = int(self.headers["Content-Length"] or 0)
        self._reply(json.loads(self.rfile.read(length)) if length else None)

    def _reply(self, body):
        broken = self.server.fault == "error" and self.path == "/v1/completions"
        content = b"out of order" if broken else json.dumps(self.server.answer(self.path, body)).encode()
        self.send_response(500 if broken else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        """Quiet."""


@pytest.fixture
def serve():
    servers = []

    def start(**about):
        servers.append(FakeServer(**about))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def engine_for(model, server, **settings):
    settings = RemoteSettings(max_num_seqs=4, server_url=server.url, **{"max_model_len": 48, **settings})
    return VLLMServerEngine(make_twin(model), make_tokenizer(), (1,), settings)


def requests_for(params, name="r", count=4):
    return [Request(f"{name}{i}", np.array([7, 8, 9 + i // 2]), params, seed=10 + i) for i in range(count)]


def test_the_same_tokens_from_weights_that_were_handed_over(serve, tmp_path):
    server, model = serve(), make_model("llama")
    engine = engine_for(model, server, server_weights_dir=str(tmp_path / "weights"))
    here = HFEngine(make_twin(model), make_tokenizer(), (1,))
    for round_ in range(2):
        for k, params in enumerate((SamplingParams(10, temperature=0), SamplingParams(10, 0.7, top_k=4))):
            requests = requests_for(params, f"{round_}/{k}/")
            for request, ours, theirs in zip(requests, engine.generate(requests), here.generate(requests), strict=True):
                assert ours.token_ids.tolist() == theirs.token_ids.tolist()
                np.testing.assert_allclose(ours.log_probs, probe.model_log_probs(model, request, ours), atol=1e-4)
                assert (ours.sampled_log_probs is None) == (not params.filtered)
        assert engine.take_metrics()["rollout/weight_probe_diff"] < 1e-4
        with torch.no_grad():
            model.lm_head.weight.add_(0.3 * torch.randn_like(model.lm_head.weight))
        engine.weights_changed()
    assert [path for path, _ in server.calls].count("/reset_prefix_cache") == 3
    folders = list((tmp_path / "weights").iterdir())
    assert len(folders) == 1
    del engine
    assert not folders[0].exists()


def test_aborted_rows_come_out_and_late_answers_are_dropped(serve):
    engine = engine_for(make_model("llama"), serve())
    engine.submit(requests_for(SamplingParams(20, ignore_eos=True)))
    engine.abort(["r0", "unknown"])
    assert [(c.request_id, c.finish_reason) for c in engine.poll() if c.finish_reason == "abort"] == [("r0", "abort")]
    rest = set()
    while engine.pending:
        rest |= {c.request_id for c in engine.poll()}
    assert rest <= {"r1", "r2", "r3"} and "r0" not in rest
    engine.weights_changed()
    assert len(engine.generate(requests_for(SamplingParams(3), "more"))) == 4


def test_a_server_that_cannot_take_weights_is_refused_at_once(serve):
    with pytest.raises(
        RolloutError, match=r"has no /collective_rpc, /reset_prefix_cache\): start it with VLLM_SERVER_"
    ):
        engine_for(make_model("llama"), serve(paths=("/v1/completions",)))
    with pytest.raises(RolloutError, match=r"serves sequences of 32 tokens.*--max-model-len 48"):
        engine_for(make_model("llama"), serve(longest=32))


@pytest.mark.parametrize(
    "fault, said",
    [
        ("no ids", r"answered /v1/completions without what is needed \(KeyError: 'token_ids'\)"),
        ("error", r"answered /v1/completions with status 500: out of order"),
        ("raw log-probs", r"leaves the temperature out of its log-probs.*--logprobs-mode processed_logprobs"),
    ],
)
def test_wrong_answers_are_one_sentence(fault, said, serve):
    engine = engine_for(make_model("llama"), serve(fault=fault))
    with pytest.raises(RolloutError, match=said):
        engine.generate(requests_for(SamplingParams(3)))


def test_no_server_at_all(serve):
    server = serve()
    engine = engine_for(make_model("llama"), server)
    engine.generate(requests_for(SamplingParams(3)))
    server.shutdown()
    server.server_close()
    engine.server._threads.connection = None
    with pytest.raises(RolloutError, match=r"does not answer \(ConnectionRefusedError.*go on from the last checkpoint"):
        engine.weights_changed()
    for url in ("ftp://x", "", "http://"):
        with pytest.raises(RolloutError, match="is no address"):
            Server(url)
