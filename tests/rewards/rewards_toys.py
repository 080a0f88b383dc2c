"""Reward functions for the tests of the workers, in a module that worker processes import: nothing heavy here."""

import asyncio
import ctypes
import os
import re
import subprocess
import sys
import time


def last_word(solution_str, ground_truth):
    """1 when the last word is the truth; some words misbehave."""
    if "crash" in solution_str:
        raise ValueError("cannot read this")
    return float(solution_str.split()[-1] == ground_truth)


def detailed(data_source, solution_str, ground_truth, extra_info=None):
    if data_source == "plain":
        return 0.5
    return {"score": 1.0, "acc": solution_str == "good", "pred": solution_str}


def misbehave(solution_str, extra_info):
    """Do what ``extra_info["act"]`` says, then score 1."""
    act = extra_info["act"]
    if act == "regex":
        re.match(r"(a+)+$", "a" * 40 + "b")  # holds the interpreter for longer than anybody waits
    elif act == "c sleep":
        ctypes.CDLL(None).sleep(60)
    elif act == "sleep":
        time.sleep(60)
    elif act == "spin":
        while True:
            pass
    elif act == "exit":
        os._exit(3)
    elif act == "sys.exit":
        sys.exit("leaving")
    elif act == "segfault":
        ctypes.string_at(0)
    elif act == "print":
        print("printed " * 10000)
        os.write(1, b"\x00\x01 raw bytes\n")
        sys.stderr.write("to stderr\n")
    elif act == "fork":
        if os.fork() == 0:
            return 0.25  # the child must not answer in its parent's place
        time.sleep(0.2)
    elif act == "child":
        subprocess.Popen(["sleep", extra_info["seconds"]])
        time.sleep(60)
    elif act == "unsendable":
        return {"score": 1.0, "what": lambda: 0}
    elif act == "recursion":
        return misbehave(solution_str, extra_info)
    elif act == "pid":
        return os.getpid()
    return 1.0


async def polite(solution_str, extra_info):
    """Wait as told; ``block`` keeps the whole event loop from running."""
    if "block" in extra_info:
        time.sleep(extra_info["block"])
    if extra_info.get("act") == "exit":
        os._exit(5)
    if extra_info.get("act") == "raise":
        raise ValueError("async trouble")
    await asyncio.sleep(extra_info.get("wait", 0.0))
    return 1.0


def torch_loaded(solution_str):
    return "torch" in sys.modules
