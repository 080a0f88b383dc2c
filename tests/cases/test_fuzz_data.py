"""Data files from outside: whatever they hold, a message or the right rows."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases_fuzz import fuzz, good_messages, refused, rows, scalars, values
from data_helpers import byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from verl.data import PromptDataset, PromptLoader
from verl.rewards.rows import row_arguments
from verl.rollout.base import Completion, SamplingParams
from verl.rollout.rows import make_requests, sample_rows

TOKENIZER = byte_tokenizer()
LIMIT = 64


def use(file, **settings):
    """Read a file and use every row as a training step does; the dataset, or None and the message."""

    def work():
        data = PromptDataset(file, TOKENIZER, max_prompt_length=LIMIT, **settings)
        batch = PromptLoader(data, len(data), shuffle=False).next_batch()
        requests = make_requests(batch, 1, SamplingParams(2), 0)
        done = [Completion(r.id, np.array([5, 6]), np.zeros(2, np.float32), "stop") for r in requests]
        samples = sample_rows(requests, done, prompt_width=LIMIT, response_width=2, pad_id=0)
        for name, column in batch.non_tensor_batch.items():
            if name not in ("uid", "prompt_ids"):
                samples.non_tensor_batch[name] = column
        row_arguments(samples, TOKENIZER)
        return data

    data, message = refused(work)
    if data is not None:
        check(data)
    return data, message


def check(data):
    for k in range(len(data)):
        row = data[k]
        assert 0 < len(row["prompt_ids"]) <= LIMIT
        assert isinstance(row["extra_info"], dict) and isinstance(row["reward_model"], dict)
        text = row["raw_prompt"]
        if isinstance(text, str) and len(text.encode()) <= LIMIT:
            assert TOKENIZER.decode(row["prompt_ids"]) == text  # the ids are those of this row's own prompt


modes = st.sampled_from(
    [{"truncation": "left"}, {"filter_overlong_prompts": True}, {"truncation": "error"}, {"truncation": "middle"}]
)
broken_lines = st.sampled_from(
    [b"{", b"[]", b"3", b"null", b'"x"', b"{}", b"\xff\xfe\x00", b'{"prompt": "\xc3"}', b'{"prompt": "\\ud800"}',
     b'{"prompt": NaN}', b"[" * 100_000, b'{"a":' * 100_000, b'{"prompt": ' + b"9" * 5000 + b"}", b"\x00", b"  ",
     b'{"prompt": "a", "prompt": "b"}', b'{"prompt": 1e999}', b"\xef\xbb\xbf{}"]
)  # fmt: skip


@given(
    lines=st.lists(rows.map(lambda row: json.dumps(row).encode()) | broken_lines, min_size=1, max_size=4),
    mode=modes,
    ending=st.sampled_from([".jsonl", ".json"]),
)
@fuzz(100)
def test_json_lines_of_anything(tmp_path_factory, lines, mode, ending):
    file = tmp_path_factory.getbasetemp() / f"drawn{ending}"
    file.write_bytes(b"\n".join(lines))
    data, message = use(file, **mode)
    assert (data is None) == (message is not None)


@given(drawn=st.lists(rows | values, max_size=4), mode=modes)
@fuzz(60)
def test_a_json_list_of_anything(tmp_path_factory, drawn, mode):
    file = tmp_path_factory.getbasetemp() / "drawn_list.json"
    file.write_text(json.dumps(drawn))
    data, message = use(file, **mode)
    assert (data is None) == (message is not None)


@given(
    good=st.lists(good_messages, min_size=2, max_size=4), bad=rows, place=st.integers(0, 3), column=st.text(max_size=5)
)
@fuzz(60)
def test_one_bad_row_is_named_and_good_rows_are_read_unchanged(good, bad, place, column):
    table = [{"prompt": prompt, "n": k, column or "c": k} for k, prompt in enumerate(good)]
    data, _ = use(table, truncation="left")
    if column != "prompt":
        assert [data[k]["n"] for k in range(len(data))] == list(range(len(good)))
        assert [data[k]["raw_prompt"] for k in range(len(data))] == good
    place = min(place, len(table))
    table.insert(place, {"prompt": None, **{k: v for k, v in bad.items() if k != "prompt"}})
    data, message = use(table, truncation="left")
    assert data is None and f"row {place}" in message


# ---- parquet ---------------------------------------------------------------------------------------------------------


def text_array(pieces: list[bytes | None], large: bool = False) -> pa.Array:
    """A string array of any bytes, also such as are no UTF-8."""
    binary = pa.array(pieces, pa.large_binary() if large else pa.binary())
    return pa.Array.from_buffers(pa.large_string() if large else pa.string(), len(binary), binary.buffers())


def columns(length):
    """Arrays of ``length`` rows of many Arrow types."""
    raw = st.lists(
        st.none() | st.binary(max_size=8) | st.text(max_size=8).map(str.encode), min_size=length, max_size=length
    )

    def of(kind, strategy):
        return st.lists(st.none() | strategy, min_size=length, max_size=length).map(lambda items: pa.array(items, kind))

    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    chat = st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", None]), "content": st.text(max_size=5)}), max_size=3
    )
    return st.one_of(
        raw.map(text_array),
        raw.map(lambda pieces: text_array(pieces, large=True)),
        raw.map(lambda pieces: pa.array(pieces, pa.binary())),
        of(pa.string(), st.text(min_size=1, max_size=8)),
        of(pa.string(), st.sampled_from(["a", "b"])).map(lambda array: array.dictionary_encode()),
        of(pa.int64(), st.integers(-9, 9)),
        of(pa.float32(), st.floats(width=32)),
        of(pa.bool_(), st.booleans()),
        of(pa.timestamp("us"), st.datetimes()),
        of(pa.decimal128(9, 2), st.decimals(-99, 99, places=2)),
        of(pa.list_(message), chat),
        of(pa.list_(pa.list_(message)), st.lists(chat, max_size=2)),
        of(pa.list_(pa.int32()), st.lists(st.integers(0, 9), max_size=3)),
        of(message, st.fixed_dictionaries({"role": st.text(max_size=4), "content": st.text(max_size=4)})),
        st.just(pa.nulls(length)),
    )


@st.composite
def tables(draw):
    length = draw(st.integers(0, 3))
    names = draw(
        st.lists(
            st.sampled_from(
                ["prompt", "question", "answer", "messages", "chosen", "rejected", "data_source", "reward_model",
                 "extra_info", "ground_truth", "uid", "instruction", "output", "__index_level_0__"]
            ),
            unique=True, max_size=4,
        )
    )  # fmt: skip
    return pa.table({name: draw(columns(length)) for name in draw(st.just(["prompt"]) | st.just([])) + names if name})


@given(table=tables(), mode=modes)
@fuzz(80)
def test_parquet_of_any_types(tmp_path_factory, table, mode):
    file = tmp_path_factory.getbasetemp() / "drawn.parquet"
    pq.write_table(table, file)
    data, message = use(file, **mode)
    assert (data is None) == (message is not None)


@given(data=st.data(), ending=st.sampled_from([".parquet", ".arrow", ".jsonl", ".json"]))
@fuzz(80)
def test_files_that_were_cut_or_changed(tmp_path_factory, data, ending):
    table = pa.table({"prompt": ["one", "two", "three"] * 20, "ground_truth": ["1", "2", None] * 20})
    file = tmp_path_factory.getbasetemp() / f"cut{ending}"
    if ending == ".parquet":
        pq.write_table(table, file, compression=data.draw(st.sampled_from(["none", "snappy", "zstd"])))
    elif ending == ".arrow":
        with pa.ipc.new_stream(file, table.schema) as out:
            out.write_table(table)
    else:
        lines = [json.dumps(row) for row in table.to_pylist()]
        file.write_text("\n".join(lines) if ending == ".jsonl" else f"[{','.join(lines)}]")
    whole = bytearray(file.read_bytes())
    if data.draw(st.booleans()):
        whole = whole[: data.draw(st.integers(0, len(whole) - 1))]
    for _ in range(data.draw(st.integers(0, 3))):
        if whole:
            whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(bytes(whole))
    data, message = use(file)
    assert (data is None) == (message is not None)


@pytest.mark.parametrize(
    "broken", ["[]", "{}", "", '{"_data_files": 3}', '{"_data_files": [{}]}', '{"splits": [1]}', "x"]
)
@pytest.mark.parametrize("name", ["state.json", "dataset_dict.json"])
def test_dataset_folders_with_a_damaged_index(tmp_path, name, broken):
    (tmp_path / name).write_text(broken)
    data, message = use(tmp_path)
    assert data is None and str(tmp_path) in message


@pytest.mark.parametrize("ending", [".parquet", ".jsonl", ".json", ".arrow", ".csv", ""])
def test_empty_files_and_folders(tmp_path, ending):
    (tmp_path / f"empty{ending}").write_bytes(b"")
    for place in (tmp_path / f"empty{ending}", tmp_path, tmp_path / "none"):
        data, message = use(place)
        assert data is None and str(place) in message


@given(
    item=values | scalars,
    source=scalars | st.lists(scalars, max_size=2) | st.dictionaries(st.text(max_size=2), scalars, max_size=1),
)
@fuzz(60)
def test_ground_truths_and_data_sources_of_any_type_reach_the_scorer(item, source):
    data, message = use([{"prompt": "p", "data_source": source, "reward_model": {"ground_truth": item}}])
    assert message is None
    assert data[0]["reward_model"]["ground_truth"] is item or data[0]["reward_model"]["ground_truth"] == item
