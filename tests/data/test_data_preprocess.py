"""The GSM8K script and its functions, on every kind of source."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import pytest
from data_helpers import byte_tokenizer, write_jsonl

from verl.data.preprocess import PROMPT_SCHEMA, gsm8k_ground_truth, main, preprocess_gsm8k
from verl.data.rl_dataset import PromptDataset
from verl.errors import DataError

ROOT = Path(__file__).resolve().parents[2]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
TRAIN = [
    {"question": f"What is {k}+{k}?", "answer": f"{k}+{k}=<<{k}+{k}={2 * k}>>{2 * k}\n#### {2 * k}"} for k in range(5)
]
TEST = [{"question": "Big?", "answer": "It is\n#### 1,234,567"}]


def check(folder, train=TRAIN, test=TEST):
    for split, raw in (("train", train), ("test", test)):
        table = pq.read_table(folder / f"{split}.parquet")
        assert table.schema.equals(PROMPT_SCHEMA)
        rows = table.to_pylist()
        assert len(rows) == len(raw)
        for index, (row, source) in enumerate(zip(rows, raw, strict=True)):
            assert row["data_source"] == "openai/gsm8k" and row["ability"] == "math"
            assert [message["role"] for message in row["prompt"]] == ["user"]
            assert row["prompt"][0]["content"].startswith(source["question"] + " ")
            assert '"####"' in row["prompt"][0]["content"]
            truth = source["answer"].split("#### ")[1].replace(",", "")
            assert row["reward_model"] == {"style": "rule", "ground_truth": truth}
            assert row["extra_info"] == {"split": split, "index": index, **source}
    assert sorted(file.name for file in folder.iterdir()) == ["test.parquet", "train.parquet"]


def make_source(kind: str, folder: Path) -> Path:
    train, test = datasets.Dataset.from_list(TRAIN), datasets.Dataset.from_list(TEST)
    if kind == "jsonl":
        write_jsonl(folder / "test.jsonl", TEST)
        return write_jsonl(folder / "train.jsonl", TRAIN)
    if kind == "parquet":
        test.to_parquet(folder / "test.parquet")
        train.to_parquet(folder / "train.parquet")
        return folder / "train.parquet"
    if kind == "mixed endings":
        write_jsonl(folder / "test.jsonl", TEST)
        train.to_parquet(folder / "train.parquet")
        return folder / "train.parquet"
    if kind == "folder of files":
        write_jsonl(folder / "test.jsonl", TEST)
        write_jsonl(folder / "train.jsonl", TRAIN)
        return folder
    datasets.DatasetDict(train=train, test=test).save_to_disk(folder / "disk")
    return folder / "disk" if kind == "arrow" else folder / "disk" / "train"


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "mixed endings", "folder of files", "arrow", "arrow split"])
def test_every_kind_of_source(tmp_path, kind):
    source = tmp_path / "raw"
    source.mkdir()
    written = preprocess_gsm8k(str(make_source(kind, source)), tmp_path / "new" / "folder")
    assert list(written) == ["train", "test"]
    check(tmp_path / "new" / "folder")


def test_one_split_only(tmp_path):
    source = write_jsonl(tmp_path / "train.jsonl", TRAIN)
    assert list(preprocess_gsm8k(str(source), tmp_path / "a")) == ["train"]
    (tmp_path / "raw").mkdir()
    write_jsonl(tmp_path / "raw" / "train.jsonl", TRAIN)
    assert list(preprocess_gsm8k(str(tmp_path / "raw"), tmp_path / "b")) == ["train"]
    test = write_jsonl(tmp_path / "test_small.jsonl", TEST)
    assert list(preprocess_gsm8k(str(test), tmp_path / "c")) == ["test"]


@pytest.mark.parametrize("where", ["clone", "parent"])
def test_the_script_from_the_clone_and_from_its_parent(tmp_path, where):
    source = make_source("parquet", tmp_path)
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "verl").symlink_to(ROOT)
    cwd = ROOT if where == "clone" else tmp_path / "link"
    script = "examples/data_preprocess/gsm8k.py" if where == "clone" else "verl/examples/data_preprocess/gsm8k.py"
    command = [sys.executable, script, "--data_source", str(source), "--local_dir", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "train: 5 rows ->" in done.stdout and "test: 1 rows ->" in done.stdout
    check(tmp_path / "out")


def test_the_other_names_of_the_options(tmp_path, capsys):
    source = str(make_source("jsonl", tmp_path))
    assert main(["--local_dataset_path", source, "--local_save_dir", str(tmp_path / "out")]) == 0
    check(tmp_path / "out")
    assert main(["--data_source", source, "--local_dir", "a", "--local_save_dir", "b"]) == 2
    assert "--local_save_dir and --local_dir mean the same" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("x #### 42", "42"),
        ("####42", "42"),
        ("#### 1,234", "1234"),
        ("#### -5", "-5"),
        ("#### 0.5", "0.5"),
        ("#### $7 a day", "7"),
        ("#### 5 #### 6", "6"),
    ],
)
def test_ground_truth(answer, truth):
    assert gsm8k_ground_truth(answer, "row") == truth


def test_wrong_sources_are_one_sentence(tmp_path, capsys):
    out = ["--local_dir", str(tmp_path / "out")]
    write_jsonl(tmp_path / "train.jsonl", TRAIN)
    assert main(["--data_source", str(tmp_path / "trian.jsonl"), *out]) == 2
    assert "did you mean" in capsys.readouterr().err
    preprocess_gsm8k(str(tmp_path / "train.jsonl"), tmp_path / "done")
    assert main(["--data_source", str(tmp_path / "done" / "train.parquet"), *out]) == 2
    assert "in the prompt schema already" in capsys.readouterr().err
    bad = write_jsonl(tmp_path / "bad.jsonl", [*TRAIN, {"question": "q", "answer": "no number"}])
    with pytest.raises(DataError, match=r"bad\.jsonl, line 6 .*no number after '####'"):
        preprocess_gsm8k(str(bad), tmp_path / "out")
    (tmp_path / "file").write_text("x")
    assert main(["--data_source", str(tmp_path / "train.jsonl"), "--local_dir", str(tmp_path / "file")]) == 2
    assert "cannot write to" in capsys.readouterr().err


def test_raw_rows_and_converted_rows_are_the_same_prompts(tmp_path):
    source = make_source("jsonl", tmp_path)
    written = preprocess_gsm8k(str(source), tmp_path / "out")
    raw = PromptDataset(source, byte_tokenizer())
    converted = PromptDataset(written["train"], byte_tokenizer())
    for position in range(len(raw)):
        for column in ("raw_prompt", "reward_model", "data_source"):
            assert raw[position][column] == converted[position][column]


@pytest.mark.skipif(not GSM8K.is_dir(), reason=f"the GSM8K files are not at {GSM8K}")
def test_the_real_files(tmp_path):
    written = preprocess_gsm8k(str(GSM8K / "train.jsonl"), tmp_path)
    assert {split: pq.read_metadata(file).num_rows for split, file in written.items()} == {"train": 7473, "test": 1319}
    for file in written.values():
        truths = [model["ground_truth"] for model in pq.read_table(file)["reward_model"].to_pylist()]
        assert all(truth.lstrip("-").replace(".", "", 1).isdigit() for truth in truths)
