"""The generative judge against a server of this process."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from verl.errors import RewardError
from verl.rewards.judge import Judge


@pytest.fixture
def server():
    """``server.answer(messages) -> (status, content)`` is what it says; ``server.seen`` are the requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                http.seen.append((self.path, self.headers.get("Authorization"), body))
                status, content = http.answer(body["messages"][0]["content"])
            data = json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    lock = threading.Lock()
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.seen = []
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    http.url = f"http://127.0.0.1:{http.server_port}/v1"
    yield http
    http.shutdown()
    thread.join()
    http.server_close()


def batch(*answers):
    return {"prompts": ["Say it."] * len(answers), "responses": list(answers), "ground_truth": ["ok"] * len(answers)}


def test_the_last_number_is_the_mark(server):
    server.answer = lambda text: (200, "I think 3 of 10 words... so: 7" if "good" in text else "0.5")
    results = Judge(server.url, "m")(batch("good", "bad"))
    assert [result.score for result in results] == [0.7, 0.05]
    path, key, body = server.seen[0]
    assert path == "/v1/chat/completions" and body["model"] == "m" and body["temperature"] == 0
    assert "Question:\nSay it.\n\nAnswer:\n" in body["messages"][0]["content"] and key is None


def test_the_key_comes_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", "abc")
    server.answer = lambda text: (200, "1")
    Judge(server.url, "m", api_key_variable="MY_KEY")(batch("x"))
    assert server.seen[0][1] == "Bearer abc"


def test_an_answer_cannot_fill_in_the_places_of_the_prompt(server):
    server.answer = lambda text: (200, "1")
    Judge(server.url, "m", "{ground_truth} | {response} | {prompt}")(batch("{ground_truth}"))
    assert server.seen[0][2]["messages"][0]["content"] == "ok | {ground_truth} | Say it."


@pytest.mark.parametrize("reply", ["no idea", "11", "-1", ""])
def test_a_reply_without_a_mark_fails_the_row_and_no_other(server, reply):
    server.answer = lambda text: (200, reply if "odd" in text else "10")
    odd, fine = Judge(server.url, "m")(batch("odd", "fine"))
    assert odd.score is None and "no number from 0 to 10" in odd.error
    assert fine.score == 1.0


def test_it_asks_again_when_that_may_help(server):
    answers = iter([(503, ""), (200, "10")])
    server.answer = lambda text: next(answers)
    assert Judge(server.url, "m")(batch("x"))[0].score == 1.0
    server.answer = lambda text: (401, "")
    result = Judge(server.url, "m")(batch("x"))[0]
    assert result.score is None and "401" in result.error
    assert len(server.seen) == 3


def test_nobody_there_fails_the_row():
    result = Judge("http://127.0.0.1:9", "m", retries=0, timeout_s=2)(batch("x"))[0]
    assert result.score is None and "did not answer" in result.error


def test_what_cannot_be_used_is_told():
    with pytest.raises(RewardError, match="base address"):
        Judge("localhost:8000", "m")
    with pytest.raises(RewardError, match=r"no \{response\}"):
        Judge("http://x", "m", "Rate it")
