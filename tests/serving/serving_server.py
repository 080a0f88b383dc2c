"""A real server in this process: uvicorn on a free port, over a tiny model."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from verl.serving.app import make_app
from verl.serving.model import LoadOptions, ServedModel, load_model
from verl.serving.server import open_port


def tiny(folder, **options) -> ServedModel:
    return load_model(str(folder), LoadOptions(device="cpu", dtype="float32", **options))


@contextmanager
def running(model: ServedModel, **options) -> Iterator[str]:
    """The base URL of a server that answers while the block runs."""
    app = make_app(model, **options)
    with open_port("127.0.0.1", 0) as sock:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=2))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()
