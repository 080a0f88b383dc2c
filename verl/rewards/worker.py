"""What runs inside a worker: load one function, then answer one message per call until the stream ends.

A worker is a process started by :mod:`verl.rewards.hosts` (never a fork, and never a second run of the user's script),
or a thread of the driver for functions that cannot be sent. This module must not import torch: a worker has to start
in a fraction of a second.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from verl.rewards.contract import RewardResult, normalise_result
from verl.rewards.source import unpack
from verl.rewards.wire import Channel, SocketChannel

# A timer of the event loop that fires this much late means that some function blocked the loop.
_LOOP_LAG_S = 0.2
_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> None:
    """Entry of a worker process: ``descriptor`` is its inherited end of the socket, ``parent`` the driver's pid."""
    _die_with(parent)
    sys.stdout.reconfigure(line_buffering=True)  # what was printed must not be lost when the process is killed
    channel = SocketChannel(socket.socket(fileno=descriptor))
    message = channel.receive()
    if message is None:
        return
    _, packed, is_async, take_first, timeout_s = message
    try:
        fn = unpack(packed)
    except (Exception, SystemExit) as error:
        channel.send(("unloadable", error_text(error)))
        return
    channel.send(("ready",))
    run = serve_async if is_async else serve
    run(channel, fn, timeout_s, lambda value: normalise_result(value, take_first=take_first), pickled=True)


def serve(
    channel: Channel,
    fn: Callable[..., Any],
    timeout_s: float | None,
    finish: Callable[[Any], Any],
    *,
    pickled: bool,
) -> None:
    """Answer calls one by one. The limit is the driver's business: it ends this worker."""
    mine = os.getpid()
    while (message := channel.receive()) is not None:
        _, number, arguments = message
        start = time.monotonic()
        try:
            value = fn(**(pickle.loads(arguments) if pickled else arguments))
            if inspect.isawaitable(value):
                value = asyncio.run(_awaited(value))
            answer = finish(value)
        except (Exception, SystemExit) as error:
            answer = RewardResult(None, error=error_text(error))
        if os.getpid() != mine:
            os._exit(0)  # a child forked by the function came back here; only its parent may answer
        channel.send(("done", number, time.monotonic() - start, _sendable(answer) if pickled else answer))


def serve_async(
    channel: Channel,
    fn: Callable[..., Any],
    timeout_s: float | None,
    finish: Callable[[Any], Any],
    *,
    pickled: bool,
) -> None:
    """Answer many calls at once on one event loop, each under its own limit."""

    async def call(number: int, arguments: Any) -> None:
        start = time.monotonic()
        task = asyncio.ensure_future(_awaited(fn(**(pickle.loads(arguments) if pickled else arguments))))
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if not done:
            task.cancel()
            blocked = time.monotonic() - start > timeout_s + _LOOP_LAG_S
            channel.send(("again" if blocked else "late", number))
            return
        answer = finish(task.result())
        channel.send(("done", number, time.monotonic() - start, _sendable(answer) if pickled else answer))

    async def guarded(number: int, arguments: Any) -> None:
        start = time.monotonic()
        try:
            await call(number, arguments)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            answer = RewardResult(None, error=error_text(error))
            channel.send(("done", number, time.monotonic() - start, _sendable(answer) if pickled else answer))

    async def loop() -> None:
        running: set[asyncio.Task[None]] = set()  # the loop itself keeps only weak references
        ended = asyncio.Event()
        here = asyncio.get_running_loop()

        def start(message: tuple[Any, ...] | None) -> None:
            if message is None:
                ended.set()
                return
            task = here.create_task(guarded(message[1], message[2]))
            running.add(task)
            task.add_done_callback(running.discard)

        def read() -> None:
            while (message := channel.receive()) is not None:
                here.call_soon_threadsafe(start, message)
            here.call_soon_threadsafe(start, None)

        threading.Thread(target=read, daemon=True, name="verl-reward-reader").start()
        await ended.wait()

    asyncio.run(loop())


def error_text(error: BaseException) -> str:
    """The traceback from the user's first line on; ours above it say nothing about the fault."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).strip()


async def _awaited(value: Any) -> Any:
    return await value


def _sendable(answer: Any) -> bytes:
    try:
        return pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # the extra info may hold anything
        text = f"its extra info cannot be sent to the driver: {type(error).__name__}: {error}"
        return pickle.dumps(RewardResult(None, error=text))


def _die_with(parent: int) -> None:
    """Ask the kernel to end this process with its driver, even while C code holds the interpreter (Linux only;
    elsewhere a worker ends when it next reads its socket)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
