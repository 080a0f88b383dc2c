"""Worker processes under functions that hang, die, print and fork: the rest of the batch must not notice."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import types

import pytest
import rewards_toys

from verl.errors import RewardError
from verl.rewards import RewardRunner, inspect_function, load_reward_function
from verl.rewards.hosts import ProcessHost
from verl.rewards.source import UnsendableError, pack, unpack
from verl.rewards.wire import SocketChannel

LIMIT_S = 1.0


def run(runner, make_batch, infos, limit=40):
    batch = make_batch([str(k % 30) for k in range(len(infos))], extra_info=infos)
    return runner.score(batch).result(timeout=limit)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("act", ["regex", "c sleep", "sleep", "spin"])
def test_a_hanging_row_is_ended_and_its_siblings_are_scored(tokenizer, make_batch, act):
    with RewardRunner(rewards_toys.misbehave, tokenizer, num_workers=2, timeout_s=LIMIT_S) as runner:
        run(runner, make_batch, [{"act": "none"}] * 2)
        start = time.monotonic()
        result = run(runner, make_batch, [{"act": "none"}, {"act": act}, {"act": "none"}, {"act": "none"}])
        assert time.monotonic() - start < LIMIT_S + 25  # of the 60 that the row would take
        assert result.batch["score_valid"].tolist() == [True, False, True, True]
        metrics = result.meta_info["metrics"]
        assert metrics["reward/timeouts"] == 1 == metrics["reward/failed"]
        assert "no result after 1 s" in result.non_tensor_batch["reward_error"][1]
        assert run(runner, make_batch, [{"act": "none"}] * 4).batch["score_valid"].all()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ("exit", "exited with code 3"),
        ("segfault", "died of signal 11"),
        ("sys.exit", "SystemExit: leaving"),
        ("unsendable", "cannot be sent"),
        ("recursion", "RecursionError"),
    ],
)
def test_a_dying_row_is_reported_and_its_siblings_are_scored(tokenizer, make_batch, act, message):
    with RewardRunner(rewards_toys.misbehave, tokenizer, num_workers=1, timeout_s=20) as runner:
        result = run(runner, make_batch, [{"act": "none"}, {"act": act}, {"act": "none"}])
    assert result.batch["score_valid"].tolist() == [True, False, True]
    assert message in result.non_tensor_batch["reward_error"][1]
    assert result.meta_info["metrics"]["reward/timeouts"] == 0


@pytest.mark.parametrize("act", ["print", "fork"])
def test_printing_and_forking_do_not_disturb_the_answers(tokenizer, make_batch, capfd, act):
    with RewardRunner(rewards_toys.misbehave, tokenizer, num_workers=1, timeout_s=20) as runner:
        result = run(runner, make_batch, [{"act": act}, {"act": "none"}, {"act": act}])
    assert result.batch["token_level_scores"].sum(1).tolist() == [1.0, 1.0, 1.0]
    if act == "print":
        assert capfd.readouterr().out.count("printed") == 20000


def test_what_a_row_started_dies_with_it(tokenizer, make_batch):
    seconds = f"98{os.getpid()}"  # recognisable among all processes
    with RewardRunner(rewards_toys.misbehave, tokenizer, num_workers=1, timeout_s=LIMIT_S) as runner:
        run(runner, make_batch, [{"act": "child", "seconds": seconds}])
        listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert f"sleep {seconds}" not in listing


def test_workers_start_quickly_and_without_torch(tokenizer, make_batch):
    with RewardRunner(rewards_toys.torch_loaded, tokenizer, num_workers=1) as runner:
        assert runner.score(make_batch(["good"])).result(timeout=20).batch["token_level_scores"].sum() == 0.0
    host = ProcessHost(pack(inspect_function(rewards_toys.torch_loaded)), False, False, 5.0)
    assert host.receive(10.0) == ("ready",)
    assert host.end() == "was ended"


def test_many_async_rows_at_once_each_under_its_own_limit(tokenizer, make_batch):
    infos = [{"wait": 0.5}] * 40 + [{"wait": 30}] + [{"act": "raise"}]
    with RewardRunner(rewards_toys.polite, tokenizer, num_workers=1, timeout_s=1.5) as runner:
        run(runner, make_batch, [{}])
        start = time.monotonic()
        result = run(runner, make_batch, infos)
        assert time.monotonic() - start < 15  # one after another they would take 20
    assert result.batch["score_valid"].tolist() == [True] * 40 + [False, False]
    assert result.meta_info["metrics"]["reward/timeouts"] == 1
    assert "async trouble" in result.non_tensor_batch["reward_error"][41]


@pytest.mark.parametrize("culprit", [{"block": 60}, {"block": 1.3, "wait": 60}, {"act": "exit"}])
def test_an_async_row_that_blocks_or_dies_takes_nobody_along(tokenizer, make_batch, culprit):
    infos = [{"wait": 0.3}, culprit, {"wait": 0.3}, {"wait": 0.3}]
    with RewardRunner(rewards_toys.polite, tokenizer, num_workers=2, timeout_s=LIMIT_S) as runner:
        result = run(runner, make_batch, infos)
        assert result.batch["score_valid"].tolist() == [True, False, True, True]
        assert result.meta_info["metrics"]["reward/timeouts"] == ("block" in culprit)
        assert run(runner, make_batch, [{}] * 3).batch["score_valid"].all()


@pytest.mark.parametrize("fn", [rewards_toys.polite, rewards_toys.misbehave])
def test_without_a_limit_rows_take_their_time(tokenizer, make_batch, fn):
    infos = [{"wait": 0.3, "act": "none"}] * 3
    with RewardRunner(fn, tokenizer, num_workers=1, timeout_s=None) as runner:
        assert run(runner, make_batch, infos).batch["score_valid"].all()


def test_a_function_that_cannot_be_loaded_in_a_worker_fails_with_its_cause(tokenizer, make_batch, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def compute_score(solution_str):\n    return 1\n")
    function = load_reward_function(file)
    file.write_text("raise RuntimeError('changed meanwhile')\n")
    with RewardRunner(function, tokenizer, num_workers=2) as runner:
        runner.begin_step()
        result = runner.score(make_batch(["1", "2", "3"])).result(timeout=20)
        assert not result.batch["score_valid"].any()
        with pytest.raises(RewardError, match="changed meanwhile"):
            runner.end_step()


def test_a_module_that_kills_the_worker_while_loading_does_not_loop(tokenizer, make_batch, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        f"import os\nif os.getpid() != {os.getpid()}: os._exit(9)\ndef compute_score(solution_str): return 1\n"
    )
    with RewardRunner(load_reward_function(file), tokenizer, num_workers=1) as runner:
        result = runner.score(make_batch(["1", "2"])).result(timeout=20)
    assert "exited with code 9 while loading" in result.non_tensor_batch["reward_error"][1]


def test_functions_travel_by_path_where_they_can_and_by_value_where_they_must():
    sent = pack(inspect_function(rewards_toys.last_word))
    assert unpack(sent) is rewards_toys.last_word and len(sent) < 200
    made = types.ModuleType("made_at_run_time")
    exec("factor = 3\ndef scaled(solution_str): return factor * len(solution_str)", made.__dict__)
    sys.modules[made.__name__] = made
    try:
        sent = pack(inspect_function(made.scaled))
    finally:
        del sys.modules[made.__name__]
    assert unpack(sent)("ab") == 6
    offset = 2
    assert unpack(pack(inspect_function(lambda solution_str, plus: plus + offset, {"plus": 1})))(solution_str="") == 3
    big = bytes(65 * 2**20)
    with pytest.raises(UnsendableError, match="65 MiB"):
        pack(inspect_function(lambda solution_str: len(big)))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a worker together with a killed driver")
def test_no_worker_outlives_a_killed_driver(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys, time
            sys.path.insert(0, {os.path.dirname(__file__)!r})
            import rewards_toys
            from verl.rewards.contract import inspect_function
            from verl.rewards.hosts import ProcessHost
            from verl.rewards.pool import CallPool
            from verl.rewards.source import pack
            packed = pack(inspect_function(rewards_toys.misbehave))
            pool = CallPool(lambda: ProcessHost(packed, False, False, 60.0), slots=1, timeout_s=60.0)
            pid = pool.submit({{"solution_str": "", "extra_info": {{"act": "pid"}}}}).result(timeout=30)
            pool.submit({{"solution_str": "", "extra_info": {{"act": "regex"}}}})
            time.sleep(0.3)
            print(int(pid.value.score), flush=True)
            time.sleep(60)
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    worker = int(driver.stdout.readline())
    assert alive(worker)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    deadline = time.monotonic() + 5
    while alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(worker)


class Watched(socket.socket):
    """Notes how often its time-out is set."""

    limits: list

    def settimeout(self, value):
        self.limits.append(value)
        super().settimeout(value)


def test_the_time_out_of_a_socket_in_use_is_never_changed():
    """A ``recv`` that began as another thread called ``settimeout`` would ask the kernel without a pause for ever."""
    Watched.limits = []
    here, there = socket.socketpair()
    channel, other = SocketChannel(Watched(fileno=here.detach())), SocketChannel(there)
    got = []
    reader = threading.Thread(target=lambda: got.extend(iter(channel.receive, None)))
    reader.start()
    for i in range(200):
        channel.send(("out", i))
        other.send(("in", i))
        assert other.receive(30.0) == ("out", i)
    with pytest.raises(TimeoutError):
        other.receive(0.01)
    other.close()
    reader.join(30)
    assert got == [("in", i) for i in range(200)]
    assert len(Watched.limits) == 1
    channel.close()
    assert channel.receive() is None
