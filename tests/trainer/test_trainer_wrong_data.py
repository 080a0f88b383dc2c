"""Data that cannot be learned from, through the command line: file, row, what to do; and counts of what is left out."""

from __future__ import annotations

import json

import pytest
from tiny_models import save_tiny_model

from verl.cli.main import main

PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
LABEL = {"prompt": "1+1=", "completion": "2", "label": True}
ANSWER = {"prompt": "1+1=", "response": "2"}
FAST = [
    "trainer.total_training_steps=1",
    "trainer.save_final=false",
    "actor_rollout_ref.model.dtype=float32",
    "trainer.device=cpu",
    "data.max_length=32",
    "data.train_batch_size=2",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def train(model, tmp_path, monkeypatch, capfd):
    """``train(algorithm, rows, *overrides)``: (exit code, what was said)."""
    monkeypatch.chdir(tmp_path)

    def run(algorithm, rows, *overrides):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = ["data.train_files=rows.jsonl", f"actor_rollout_ref.model.path={model}"]
        code = main(["train", algorithm, *files, *FAST, *overrides])
        said = capfd.readouterr()
        return code, said.out + said.err

    return run


@pytest.mark.parametrize(
    ("algorithm", "row", "bad", "message"),
    [
        ("dpo", PAIR, {"chosen": " "}, "'chosen' has no text of an assistant, so nothing to learn"),
        ("dpo", PAIR, {"rejected": "2"}, "chosen and rejected are equal"),
        ("dpo", PAIR, {"prompt": None}, "the row needs a 'prompt' too"),
        ("dpo", PAIR, {"chosen": "2" * 64}, "'chosen': length 69 > max_length 32; raise data.max_length"),
        ("dpo", PAIR, {"rejected": None}, "column 'rejected' is null or missing"),
        ("kto", LABEL, {"label": "yes"}, "label must be true or false, got 'yes'"),
        ("kto", LABEL, {"label": 1}, "label must be true or false, got 1"),
        ("kto", LABEL, {"completion": ""}, "'completion' has no text"),
        ("sft", ANSWER, {"response": "  "}, "column 'response' is empty"),
        ("sft", ANSWER, {"response": "2" * 64}, "length 69 > max_length 32"),
        ("rm", PAIR, {"rejected": "2"}, "chosen and rejected are equal"),
    ],
)
def test_a_bad_row_is_named_and_can_be_left_out(train, algorithm, row, bad, message):
    rows = [row, row, {**row, **bad}, row, row]
    code, said = train(algorithm, rows)
    assert code == 2, said
    error = said[said.index("error: ") :]
    assert "rows.jsonl, line 3 (row 2)" in error and message in error
    assert "correct the row, or leave such rows out with data.on_bad_row=drop" in error
    code, said = train(algorithm, rows, "data.on_bad_row=drop")
    assert code == 0, said
    assert "1 of 5 rows are left out (1 " in said and "line 3 (row 2)" in said
    assert "step:1" in said or "step 1/1" in said


@pytest.mark.parametrize(
    ("algorithm", "rows", "message"),
    [
        ("dpo", [ANSWER], "has no column 'chosen' and no column 'rejected', which learning from pairs needs; its"),
        ("kto", [PAIR], "has no column 'completion' and no column 'label'"),
        ("rm", [LABEL], "has no column 'chosen'"),
        ("sft", [LABEL | {"completion": 3}], "line 1 (row 0)"),
        ("sft", [{"question_text": "1"}], "has no layout to learn from: its columns are question_text"),
    ],
)
def test_a_missing_column_names_those_that_are_there(train, algorithm, rows, message):
    code, said = train(algorithm, rows * 4)
    assert code == 2 and message in said and "rows.jsonl" in said


def test_nothing_left_is_an_error(train):
    code, said = train("dpo", [{**PAIR, "rejected": "2"}] * 3, "data.on_bad_row=drop")
    assert code == 2 and "no row can be used: 3 of 3 rows are left out (3 chosen equals rejected)" in said


def test_cut_rows_are_counted(train):
    code, said = train("sft", [ANSWER, ANSWER, {**ANSWER, "response": "2" * 64}], "data.truncation=keep_start")
    assert code == 0 and "1 of 3 rows are cut to 32 tokens" in said


def test_a_name_that_does_not_exist(train):
    code, said = train("dpoo", [PAIR] * 2)
    assert code == 2 and "algorithm.name='dpoo' is not a preset" in said and "dpo" in said
