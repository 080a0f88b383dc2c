"""Stands in for ``verl.rollout.remote.host``: the same protocol, over Hugging Face modules in place of vLLM.

Run as a module it is a process; :class:`InThread` is the same without one.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from verl.rollout.hf import HFEngine
from verl.rollout.remote import host
from verl.rollout.remote.client import EngineProcess
from verl.rollout.vllm.receiver import WeightReceiver


class FakeAdapter(WeightReceiver):
    """``engine_kwargs={"fault": ...}`` names a way to misbehave."""

    def __init__(self, folder, settings, device, eos_token_ids):
        self.fault = settings.engine_kwargs.get("fault", "")
        if self.fault == "no start":
            raise ValueError("first line\nthe model is not supported")
        config = AutoConfig.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings.dtype)).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.hf = HFEngine(self.model, tokenizer, tuple(eos_token_ids), max_num_seqs=settings.max_num_seqs)
        self.max_model_len = settings.max_model_len or config.max_position_embeddings
        self.loads = 0

    busy = property(lambda self: bool(self.hf.pending))

    def add(self, request):
        self.hf.submit([request])

    def step(self):
        if self.fault == "raises" and self.loads > 1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        done = self.hf.poll()
        for completion in done:  # vLLM gives the log-probs of what was drawn from
            if completion.sampled_log_probs is not None:
                completion.log_probs, completion.sampled_log_probs = completion.sampled_log_probs, None
        return done

    def abort(self, ids):
        self.hf.abort(ids)
        return self.hf.poll()

    def open_weights(self, table):
        self.verl_open(pickle.dumps(table))

    @torch.no_grad()
    def load_weights(self):
        self.loads += 1
        if self.fault == "stale" and self.loads > 1:
            return 0.0
        state = self.model.state_dict()
        for name, tensor in self._verl_weights.items():
            state[name].copy_(tensor)
        self.model.tie_weights()
        return 0.0

    def sleep(self):
        raise AssertionError("there is nothing to give back on a CPU")


class InThread(EngineProcess):
    """The host as a thread of this process: it starts at once."""

    def __init__(self, program, environment=None):
        self.title = program.title
        self._folder = tempfile.TemporaryDirectory(prefix="fake-vllm-")
        self.log = Path(self._folder.name) / "vllm.log"
        self.log.touch()
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        fd = theirs.detach()
        self.thread = threading.Thread(target=self._run, args=(fd,), daemon=True)
        self.process = SimpleNamespace(poll=lambda: None if self.thread.is_alive() else 0)
        self.thread.start()

    def _run(self, fd):
        connection = Connection(fd)
        host.serve(connection, FakeAdapter)
        connection.close()

    def close(self):
        self.connection.close()
        self.thread.join(10)
        self._folder.cleanup()


if __name__ == "__main__":
    os._exit(host.serve(Connection(int(sys.argv[1])), FakeAdapter))
