"""Programs of a model: what is counted, and what the sandbox keeps from them."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.errors import RewardError
from verl.rewards.code import Limits, compute_score, enforced_here, extract_program, run_program
from verl.rewards.code.scorer import same_output
from verl.rewards.router import default_compute_score

ISOLATED = sys.platform == "linux" and all(enforced_here().values())
needs_isolation = pytest.mark.skipif(not ISOLATED, reason="this kernel has no landlock or no namespaces for us")
SHORT = Limits(wall_s=20)


def fenced(code: str) -> str:
    return f"So:\n```python\n{code}\n```\nDone."


def test_the_last_python_block_is_the_program():
    text = "```python\na\n```\n```json\n{}\n```\n```py\nb\n```\n```text\nc\n```"
    assert extract_program(text) == "b\n"
    assert extract_program("no code") is None
    assert extract_program("```python\n\n```") is None
    assert extract_program("```python\nprint(1)") == "print(1)"  # cut off by the length limit


def test_text_tests_give_the_share_that_passed():
    tests = json.dumps({"inputs": ["3\n", "4\n", "x\n"], "outputs": ["6", "9", "?"]})
    result = compute_score(fenced("print(int(input()) * 2)"), tests)
    assert result == {"score": 1 / 3, "acc": False, "tests_timed_out": 0}
    assert compute_score("no program", tests)["score"] == 0.0
    assert compute_score(fenced("print(int(input()) * 2)"), {"inputs": ["3"], "outputs": ["6 \n"]})["acc"] is True


@pytest.mark.parametrize(
    "program", ["def add(a, b):\n    return a + b", "class Solution:\n    def add(self, a, b):\n        return a + b"]
)
def test_functions_are_called_with_their_arguments(program):
    tests = {"inputs": [[1, 2], "3\n4"], "outputs": [3, [7]], "fn_name": "add"}
    assert compute_score(fenced(program), tests)["score"] == 1.0
    assert compute_score(fenced(program.replace("+", "-")), tests)["score"] == 0.0
    assert compute_score(fenced("print('add')"), tests)["score"] == 0.0


@pytest.mark.parametrize("ending", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit"])
def test_leaving_early_with_success_passes_nothing(ending):
    wrong = fenced(f"def f():\n    return 1\n{ending}")
    for tests in (
        "assert f() == 2",
        {"inputs": [[]], "outputs": [1], "fn_name": "f"},
        {"assert_case": ["assert True"]},
    ):
        assert compute_score(wrong, tests)["score"] == 0.0
    assert compute_score(fenced("def f():\n    return 2"), "assert f() == 2")["score"] == 1.0


@pytest.mark.parametrize("bad", ["", "  ", {}, {"inputs": ["1"]}, {"inputs": ["1"], "outputs": []}, [1], 7, "[]", "{}"])
def test_a_ground_truth_without_tests_is_an_error(bad):
    with pytest.raises(RewardError, match=r"tests|inputs"):
        compute_score(fenced("pass"), bad)


@pytest.mark.parametrize(
    ("printed", "expected", "equal"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1  2", "1 2", True),
        ("0.3333333", "0.33333334", True),
        ("0.3", "0.4", False),
        ("10000001", "10000000", False),  # whole numbers are not rounded
        ("1\n2", "1 2", False),
        ("", "0", False),
        ("nan.", "nan", False),
    ],
)
def test_outputs_are_compared_word_by_word(printed, expected, equal):
    assert same_output(printed, expected) is equal


def test_endless_loops_and_endless_output_end():
    result = compute_score(fenced("while True:\n    pass"), {"inputs": ["1"], "outputs": ["1"]}, case_s=1.0)
    assert result == {"score": 0.0, "acc": False, "tests_timed_out": 1}
    flood = run_program("import os\nwhile True:\n    os.write(1, b'a' * 100000)", limits=SHORT)
    assert flood.returncode not in (0, None) and len(flood.stdout) == 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS holds on Linux")
def test_memory_is_limited():
    assert "MemoryError" in run_program("x = bytearray(3 << 30)", limits=SHORT).stderr
    result = compute_score(
        fenced("x = bytearray(200 << 20); print(1)"), {"inputs": [""], "outputs": ["1"]}, memory_limit_mb=128
    )
    assert result["score"] == 0.0


@needs_isolation
def test_there_is_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepted = []
        threading.Thread(target=lambda: accepted.append(server.accept()), daemon=True).start()
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=5)\nprint('through')"
        outcome = run_program(code, limits=SHORT)
        assert "through" not in outcome.stdout and "OSError" in outcome.stderr
        assert not accepted


@needs_isolation
def test_files_of_others_are_neither_read_nor_written(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("token")
    assert "PermissionError" in run_program(f"print(open({str(secret)!r}).read())", limits=SHORT).stderr
    assert "PermissionError" in run_program(f"open({str(tmp_path / 'new')!r}, 'w')", limits=SHORT).stderr
    assert "PermissionError" in run_program(f"import os; os.remove({str(secret)!r})", limits=SHORT).stderr
    assert secret.read_text() == "token"
    own = run_program("open('mine', 'w').write('1'); print(open('mine').read())", limits=SHORT)
    assert own.stdout == "1\n"


def test_the_environment_of_the_run_is_not_passed_on(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "abc")
    assert "abc" not in run_program("import os; print(dict(os.environ))", limits=SHORT).stdout


@needs_isolation
def test_a_child_that_left_its_session_is_ended_too():
    mark = f"verl_escape_{os.getpid()}"
    code = (
        "import os, sys, time\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        f"        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)', {mark!r}])\n"
        "    os._exit(0)\n"
        "time.sleep(1)"
    )
    outcome = run_program(code, limits=SHORT)
    assert outcome.returncode == 0, outcome.stderr
    end = time.monotonic() + 30
    while (left := [p.pid for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]) and (
        time.monotonic() < end
    ):
        time.sleep(0.05)
    assert not left


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.text(max_size=60), st.text(max_size=20))
def test_any_text_is_a_program_with_a_score(code, stdin):
    result = compute_score(f"```python\n{code}\n```", {"inputs": [stdin], "outputs": ["never printed by chance"]})
    assert result["score"] == 0.0


def test_the_default_scorer_runs_programs():
    tests = json.dumps({"inputs": ["2"], "outputs": ["4"]})
    answer = fenced("print(int(input()) ** 2)")
    assert default_compute_score("taco", answer, tests)["score"] == 1.0
    assert default_compute_score("apps", answer, tests, memory_limit_mb=512, sandbox_fusion_url=None)["acc"] is True
    with pytest.raises(RewardError, match="built-in sandbox"):
        default_compute_score("apps", answer, tests, sandbox_fusion_url="http://x")
