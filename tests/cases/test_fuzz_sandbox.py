"""Programs of any statements: a score of 0 or the right one, nothing outside touched, no process left behind."""

from __future__ import annotations

import os
import sys
import time

import psutil
import pytest
from cases_fuzz import fuzz, texts
from hypothesis import given
from hypothesis import strategies as st

from verl.rewards.code import compute_score, enforced_here

ISOLATED = sys.platform == "linux" and all(enforced_here().values())
MARK = f"verl_fuzz_sandbox_{os.getpid()}"
TRIES = [
    "print('4')",
    "import os; os._exit(0)",
    "import sys; sys.exit(0)",
    "raise SystemExit",
    "x = bytearray(1 << 33)",
    "import sys; sys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
    "import os; os.write(1, b'4' * (1 << 22))",
    "import os; os.close(1)",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "import os; os.fork()",
    f"import os, sys\nif os.fork() == 0:\n    os.setsid()\n    os.execv(sys.executable, [sys.executable, '-c', "
    f"'import time; time.sleep(60)', {MARK!r}])",
    "import ctypes; ctypes.string_at(0)",
    "import os, shutil; shutil.rmtree({victim!r}, ignore_errors=True)",
    "open({victim!r} + '/kept', 'w').write('changed')",
    "import os; os.rename({victim!r} + '/kept', 'mine')",
    "import builtins; builtins.print = None",
    "import sys; sys.stdout = sys.stderr = None",
    "input()",
]


@pytest.mark.skipif(not ISOLATED, reason="this kernel has no landlock or no namespaces for us")
@given(steps=st.lists(st.sampled_from(TRIES) | texts.map(repr) | texts, max_size=3), wanted=st.booleans())
@fuzz(15)
def test_any_statements_give_a_score_and_leave_nothing(tmp_path, steps, wanted):
    victim = tmp_path / "victim"
    victim.mkdir(exist_ok=True)
    (victim / "kept").write_text("as it was")
    code = "\n".join(step.replace("{victim!r}", repr(str(victim))) for step in steps)
    output = "4" if wanted else "no program prints this"
    result = compute_score(f"```python\n{code}\n```", {"inputs": [""], "outputs": [output]}, case_s=3.0)
    assert result["score"] in ((0.0, 1.0) if wanted else (0.0,))
    if steps == ["print('4')"] and wanted:
        assert result["score"] == 1.0
    assert (victim / "kept").read_text() == "as it was" and list(victim.iterdir()) == [victim / "kept"]
    if any(MARK in step for step in steps):
        until = time.monotonic() + 5
        while left() and time.monotonic() < until:
            time.sleep(0.05)
        assert not left()


def left():
    """Processes of these programs that still run."""
    return [p.pid for p in psutil.process_iter(["cmdline"]) if MARK in (p.info["cmdline"] or [])]
