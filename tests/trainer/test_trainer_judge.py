"""A run that is scored by a judge behind an address."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from learning_helpers import make_learner
from tiny_models import save_tiny_model

from verl.data import arithmetic_task
from verl.errors import ConfigError


class Handler(BaseHTTPRequestHandler):
    """Marks an answer by its number of digits."""

    def do_POST(self):
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        mark = sum(character.isdigit() for character in text.removeprefix("Rate: "))
        data = json.dumps({"choices": [{"message": {"content": f"{mark}"}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def test_a_judge_scores_a_run(tmp_path):
    model = save_tiny_model(tmp_path / "model")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        settings = {
            "data__max_prompt_length": 32,
            "data__max_response_length": 5,
            "reward__judge__url": f"http://127.0.0.1:{server.server_port}/v1",
            "reward__judge__prompt": "Rate: {response}",
            "reward__judge__scale": 5,
        }
        trainer = make_learner(model, tmp_path / "run", "grpo", arithmetic_task("train", 5), **settings)
        metrics = trainer.fit()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert metrics["reward/failed"] == 0 and 0 < metrics["critic/score/max"] <= 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["score"] == pytest.approx(sum(c.isdigit() for c in row["response"]) / 5)


def test_two_scorers_are_one_too_many(tmp_path):
    with pytest.raises(ConfigError, match=r"reward_model.enable and reward.judge.url are given together"):
        make_learner(
            tmp_path, tmp_path / "run", "grpo", arithmetic_task("train", 5), reward__judge__url="http://x/v1",
            reward_model__enable=True, reward_model__model__path=str(tmp_path),
        )  # fmt: skip
