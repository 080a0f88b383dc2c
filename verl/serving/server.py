"""Listening: the application of :mod:`verl.serving.app` behind uvicorn."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from types import FrameType

from verl.errors import ConfigError, MissingDependencyError
from verl.notices import notice
from verl.serving.model import ServedModel

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


def check_installed() -> None:
    """Raise MissingDependencyError, before a model is loaded, where the packages of the extra are not there."""
    import importlib.util

    for package in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(package, "verl serve", "fastapi uvicorn")


def open_port(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Who connects before the server runs waits for it.

    Raises:
        ConfigError: the address cannot be had.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen()  # at once: two servers that still load could both be bound to one port
    except OSError as error:
        raise ConfigError(
            f"{host}:{port} cannot be listened on ({error.strerror or error}); choose another --port or --host"
        ) from error
    return sock


def serve(
    model: ServedModel,
    sock: socket.socket,
    *,
    names: Sequence[str] | None = None,
    api_key: str | None = None,
    log_level: str = "warning",
) -> None:
    """Answer until interrupted."""
    import uvicorn

    from verl.serving.app import make_app

    app = make_app(model, names, api_key)

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            app.state.service.loop.stop_soon()  # a stream that goes on would hold the server
            super().handle_exit(sig, frame)

    host = sock.getsockname()[0]
    if host not in LOCAL_HOSTS and api_key is None:
        notice(f"The server listens on {host} and asks nobody for a key: --api_key sets one.")
    config = uvicorn.Config(app, log_level=log_level, timeout_graceful_shutdown=5)
    Server(config).run(sockets=[sock])
