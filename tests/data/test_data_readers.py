"""Files of every kind give the same rows; what is wrong is said with file and line."""

from __future__ import annotations

import json
import os

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_helpers import write_jsonl

from verl.data.readers import read_hub, read_rows
from verl.errors import DataError

ROWS = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}, {"prompt": "ü\u2028c", "n": 3}]


def all_rows(source, split="train"):
    return list(read_rows(source, split))


def test_parquet_jsonl_json_and_arrow_give_the_same_rows(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    write_jsonl(tmp_path / "lines.json", ROWS)
    (tmp_path / "list.json").write_text(json.dumps(ROWS), encoding="utf-8-sig")
    with pa.OSFile(str(tmp_path / "file.arrow"), "wb") as sink, pa.ipc.new_file(sink, pa.schema([("n", "int64")])) as w:
        w.write_table(pa.table({"n": [1]}))
    for name in ("a.parquet", "a.jsonl", "lines.json", "list.json"):
        assert all_rows(tmp_path / name) == ROWS, name
    assert all_rows(str(tmp_path / "file.arrow")) == [{"n": 1}]


def test_a_list_of_files_is_one_sequence_that_knows_where_each_row_is_from(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"prompt": "x"}\n\n{"prompt": "y", "more": [1]}\n')
    rows = read_rows([str(tmp_path / "a.parquet"), str(tmp_path / "b.jsonl")])
    assert [row["prompt"] for row in rows] == ["a", "b", "ü\u2028c", "x", "y"]
    assert rows.columns == ["prompt", "n", "more"]
    assert rows.where(1).endswith("a.parquet, row 1")
    assert rows.where(4).endswith("b.jsonl, line 3 (row 1)")
    with pytest.raises(IndexError):
        rows[5]


def test_rows_in_memory_are_taken_as_they_are():
    rows = read_rows(ROWS)
    assert list(rows) == ROWS and rows.where(2) == "rows, row 2"


def test_datasets_folders_single_and_with_splits(tmp_path):
    train, test = datasets.Dataset.from_list(ROWS), datasets.Dataset.from_list(ROWS[:1])
    train.save_to_disk(tmp_path / "single", num_shards=2)
    datasets.DatasetDict(train=train, test=test).save_to_disk(tmp_path / "both")
    assert all_rows(tmp_path / "single") == ROWS
    assert all_rows(tmp_path / "both") == ROWS
    assert all_rows(tmp_path / "both", "validation") == ROWS[:1]  # the test split serves
    assert all_rows(tmp_path / "both" / "test") == ROWS[:1]
    train.select([2, 0]).save_to_disk(tmp_path / "selected")
    assert all_rows(tmp_path / "selected") == [ROWS[2], ROWS[0]]


def test_a_folder_of_split_files(tmp_path):
    for name in ("train-00001-of-00002", "train-00000-of-00002", "test", "training_notes"):
        pq.write_table(pa.table({"prompt": [name]}), tmp_path / f"{name}.parquet")
    assert [row["prompt"] for row in all_rows(tmp_path)] == ["train-00000-of-00002", "train-00001-of-00002"]
    assert all_rows(tmp_path, "validation") == [{"prompt": "test"}]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"without a dataset for the split 'train'.*found nothing"):
        read_rows(tmp_path / "empty")


def test_parquet_with_metadata_of_another_datasets_version_is_read(tmp_path):
    feature = {"info": {"features": {"prompt": {"_type": "ListOfTomorrow", "feature": {"dtype": "string"}}}}}
    table = pa.table({"prompt": ["a"]}).replace_schema_metadata({"huggingface": json.dumps(feature)})
    pq.write_table(table, tmp_path / "a.parquet")
    assert all_rows(tmp_path / "a.parquet") == [{"prompt": "a"}]


def test_parquet_gets_no_columns_from_pandas_or_from_folder_names(tmp_path):
    folder = tmp_path / "lang=en"
    folder.mkdir()
    pd.DataFrame({"prompt": ["a", "b", "c"]})[lambda frame: frame.prompt != "b"].to_parquet(folder / "a.parquet")
    assert all_rows(folder / "a.parquet") == [{"prompt": "a"}, {"prompt": "c"}]


def test_missing_file_names_the_nearest(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(DataError, match=r"no such data file: .*trian\.jsonl; did you mean .*train\.jsonl\?"):
        read_rows(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match=r"did you mean .*train\.jsonl\?"):
        read_rows(tmp_path / "train.parquet")
    (tmp_path / "data" / "fmt").mkdir(parents=True)
    write_jsonl(tmp_path / "data" / "fmt" / "train.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"did you mean data/fmt/train\.jsonl\?"):
        read_rows("$HOME/data/fmt/train.jsonl")
    with pytest.raises(DataError, match="no such data file"):  # its first part is a folder: not a hub name
        read_rows("data/train")


def test_home_and_variables_in_a_path_are_expanded(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert all_rows("~/train.jsonl") == all_rows("$HOME/train.jsonl") == ROWS


def test_what_the_datasets_package_loads_becomes_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "repository").mkdir()
    write_jsonl(tmp_path / "repository" / "train.jsonl", ROWS)
    write_jsonl(tmp_path / "repository" / "test.jsonl", ROWS[:1])
    name = str(tmp_path / "repository")
    part = read_hub(name, "train")
    assert [part.row(k) for k in range(len(part))] == ROWS
    assert part.source == name and part.where(0) == f"{name} (train), row 0"
    assert len(read_hub(name, "validation")) == 1
    with pytest.raises(DataError, match="has no split 'dev': it has train, test"):
        read_hub(name, "dev")


def test_hub_name_without_a_network_says_what_to_do(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"'nobody/nothing' is no file or folder here.*HF_ENDPOINT"):
        read_rows("nobody/nothing")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": \n', r"a\.jsonl, line 2: not valid JSON"),
        ("a.jsonl", b'{"prompt": "x"}\n[1, 2]\n', r"a\.jsonl, line 2: a row must be a JSON object.*list"),
        ("a.jsonl", b"\xff\xfe\x00", r"not UTF-8"),
        ("a.json", b'[{"prompt": "x"},\n', r"a\.json, line 2: not valid JSON"),
        ("a.json", b'[{"prompt": "x"}, 3]', r"a\.json, row 1: a row must be a JSON object"),
        ("a.parquet", b"not parquet", r"a\.parquet is not a readable parquet file"),
        ("a.arrow", b"not arrow", r"a\.arrow is not a readable Arrow file"),
        ("a.csv", b"prompt\nx\n", r"cannot read '\.csv' files; use one of \.arrow, \.json, \.jsonl, \.parquet"),
        ("a.jsonl", b"\n", r"the dataset is empty: no rows in .*a\.jsonl"),
    ],
)
def test_unreadable_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_rows(tmp_path / name)


def test_wrong_kinds_of_sources():
    with pytest.raises(DataError, match="no data"):
        read_rows([])
    with pytest.raises(DataError, match="a data file is a path or a hub name"):
        read_rows(["a.jsonl", {"prompt": "x"}])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", ROWS)
    file.chmod(0)
    with pytest.raises(DataError, match="no permission to read"):
        read_rows(file)
