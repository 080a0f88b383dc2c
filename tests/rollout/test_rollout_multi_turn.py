"""Conversations: ids, masks, limits, tools, and a whole training step over them."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tiny_models import make_tokenizer

from verl.errors import ConfigError, RolloutError
from verl.protocol import DataProto
from verl.rollout.base import Completion, RolloutEngine, SamplingParams
from verl.rollout.multi_turn import (
    MultiTurnSettings,
    TurnTemplate,
    load_environment,
    schemas_of,
    stream_conversations,
)
from verl.rollout.multi_turn.environment import cut_text
from verl.rollout.multi_turn.parsing import parse_tool_calls
from verl.rollout.rows import make_requests, sample_rows

QWEN = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = str(Path(__file__).with_name("multi_turn_tools.py"))
END = "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer():
    made = make_tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", END]})
    made.chat_template = QWEN
    return made


def prompt_batch(prompts, tokenizer=None, **columns):
    template = TurnTemplate(tokenizer).prompts
    ids = np.empty(len(prompts), dtype=object)
    raw = np.empty(len(prompts), dtype=object)
    for i, prompt in enumerate(prompts):
        ids[i], raw[i] = np.asarray(template.encode_many([prompt])[0]), prompt
    uids = np.array([f"u{i}" for i in range(len(prompts))], dtype=object)
    return DataProto(non_tensor_batch={"uid": uids, "prompt_ids": ids, "raw_prompt": raw, **columns})


class Script(RolloutEngine):
    """An engine that says what it is told to: ``lines[request id]`` are texts with their finish reasons."""

    name = "script"

    def __init__(self, tokenizer, lines, end=END):
        self.tokenizer, self.lines, self.end = tokenizer, lines, end
        self.queue, self.seen, self.aborted = [], {}, 0

    def submit(self, requests):
        self.queue += requests
        self.seen.update((r.id, r) for r in requests)

    def poll(self):
        request = self.queue.pop(0)
        text, reason = self.lines[request.id]
        ids = np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"])[: request.params.max_tokens]
        if reason == "stop" and self.end:
            ids = np.append(ids, self.tokenizer.convert_tokens_to_ids(self.end))
        return [Completion(request.id, ids, np.full(len(ids), -0.5, np.float32), reason)]

    def abort(self, ids=None):
        self.aborted += len(self.queue)
        self.queue = self.queue[:1]

    @property
    def pending(self):
        return len(self.queue)

    def weights_changed(self):
        raise AssertionError("not used")


def talk(tokenizer, engine, environment, batch, n=1, max_tokens=200, **settings):
    settings = replace(MultiTurnSettings(max_response_chars=1000), **settings)
    requests = make_requests(batch, n, SamplingParams(max_tokens), 7)
    pieces = stream_conversations(
        engine, requests, batch, environment, TurnTemplate(tokenizer), settings, run_seed=7,
        rows_of=partial(sample_rows, prompt_width=120, response_width=max_tokens, pad_id=0),
    )  # fmt: skip
    return DataProto.concat(list(pieces))


def say(content, role="tool"):
    return [{"role": role, "content": content}]


def test_B37_the_ids_are_those_of_the_whole_templated_conversation(tokenizer):
    """verl issue 6921: the line end after each end-of-turn token was lost."""
    prompt = [{"role": "user", "content": "add"}]
    engine = Script(tokenizer, {"u0/0": ("call", "stop"), "u0/0#1": ("it is 3", "stop")})
    replies = iter([say("3"), None])
    row = talk(tokenizer, engine, lambda messages, row: next(replies), prompt_batch([prompt], tokenizer))
    whole = [
        *prompt, {"role": "assistant", "content": "call"}, *say("3"), {"role": "assistant", "content": "it is 3"},
    ]  # fmt: skip
    text = tokenizer.apply_chat_template(whole, tokenize=False)
    expected = tokenizer(text.rstrip("\n"), add_special_tokens=False)["input_ids"]  # nothing follows the last turn
    mask = row.batch["attention_mask"][0].bool()
    assert row.batch["input_ids"][0][mask].tolist() == expected
    given = "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
    sampled = row.batch["response_mask"][0]
    lengths = [5, len(tokenizer(given)["input_ids"]), 8]
    assert sampled[: sum(lengths)].tolist() == [1] * 5 + [0] * lengths[1] + [1] * 8 and sampled.sum() == 13
    assert row.batch["rollout_log_probs"][0][: sum(lengths)].tolist() == [-0.5] * 5 + [0.0] * lengths[1] + [-0.5] * 8
    assert row.non_tensor_batch["__num_turns__"].tolist() == [3]
    assert row.non_tensor_batch["finish_reason"].tolist() == ["stop"]


def test_the_next_turn_continues_the_ids_with_noise_of_its_own(tokenizer):
    engine = Script(tokenizer, {"u0/0": ("a", "stop"), "u0/0#1": ("b", "stop"), "u0/0#2": ("c", "stop")})
    replies = iter([say("x"), say("y", "user"), None])
    talk(tokenizer, engine, lambda m, r: next(replies), prompt_batch([[{"role": "user", "content": "q"}]], tokenizer))
    first, second, third = (engine.seen[name] for name in ("u0/0", "u0/0#1", "u0/0#2"))
    assert second.prompt_ids[: len(first.prompt_ids)].tolist() == first.prompt_ids.tolist()
    assert third.prompt_ids[: len(second.prompt_ids)].tolist() == second.prompt_ids.tolist()
    assert len({first.seed, second.seed, third.seed}) == 3
    assert second.params.max_tokens == 200 - (len(second.prompt_ids) - len(first.prompt_ids))


@pytest.mark.parametrize(
    ("limits", "turns"), [({"max_assistant_turns": 1}, 1), ({"max_assistant_turns": 2}, 3), ({"max_user_turns": 0}, 1)]
)
def test_limits_of_turns(tokenizer, limits, turns):
    engine = Script(tokenizer, {"u0/0": ("a", "stop"), **{f"u0/0#{i}": ("b", "stop") for i in range(1, 5)}})
    batch = prompt_batch([[{"role": "user", "content": "q"}]], tokenizer)
    row = talk(tokenizer, engine, lambda m, r: say("x"), batch, **limits)
    assert row.non_tensor_batch["__num_turns__"].tolist() == [turns]


def test_a_reply_without_room_ends_the_row_after_the_policys_own_words(tokenizer):
    engine = Script(tokenizer, {"u0/0": ("abc", "stop")})
    batch = prompt_batch([[{"role": "user", "content": "q"}]], tokenizer)
    row = talk(tokenizer, engine, lambda m, r: say("x" * 30), batch, max_tokens=40)
    assert row.batch["response_mask"].sum() == row.batch["attention_mask"][:, 120:].sum() == 4
    assert row.non_tensor_batch["finish_reason"].tolist() == ["length"]
    cut = talk(tokenizer, Script(tokenizer, {"u0/0": ("abc", "length")}), lambda m, r: 1 / 0, batch, max_tokens=3)
    assert cut.batch["response_mask"].tolist() == [[1, 1, 1]]  # a turn without an end is not answered


def test_plain_prompts_stay_plain(tokenizer):
    engine = Script(tokenizer, {"u0/0": ("1+1=", "stop"), "u0/0#1": ("ok", "stop")}, end=None)
    replies = iter([say("2\n"), None])
    row = talk(tokenizer, engine, lambda m, r: next(replies), prompt_batch(["sum: "], tokenizer))
    mask = row.batch["attention_mask"][0].bool()
    assert tokenizer.decode(row.batch["input_ids"][0][mask]) == "sum: 1+1=2\nok"
    assert row.batch["response_mask"][0][:8].tolist() == [1, 1, 1, 1, 0, 0, 1, 1]


def test_environments_work_at_the_same_time_and_see_their_row(tokenizer):
    together = threading.Barrier(4, timeout=20)
    rows = []

    def environment(messages, row):
        if len(messages) > 2:
            return None
        together.wait()  # passes only if all four are asked before one is answered
        rows.append(row["secret"])
        return say(row["secret"])

    lines = {f"u{i}/{k}{turn}": ("a", "stop") for i in range(2) for k in range(2) for turn in ("", "#1")}
    batch = prompt_batch(
        [[{"role": "user", "content": q}] for q in "pq"], tokenizer, secret=np.array(["s0", "s1"], dtype=object)
    )
    out = talk(tokenizer, Script(tokenizer, lines), environment, batch, n=2)
    assert sorted(rows) == ["s0", "s0", "s1", "s1"]
    for i, name in enumerate(out.non_tensor_batch["sample_id"]):
        text = tokenizer.decode(out.batch["responses"][i][out.batch["attention_mask"][i, 120:].bool()])
        assert f"s{name[1]}" in text
    assert out.meta_info["metrics"].results()["num_turns/mean"] == 3


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("text", "returns a list of messages"),
        ([{"role": "tool"}], "needs 'role' and a text"),
        ([{"role": "assistant", "content": "me"}], "may not speak as the assistant"),
    ],
)
def test_a_wrong_reply_is_one_sentence_and_nothing_is_left_running(tokenizer, reply, message):
    lines = {f"u0/{k}": ("a", "stop") for k in range(4)}
    engine = Script(tokenizer, lines)
    batch = prompt_batch([[{"role": "user", "content": "q"}]], tokenizer)
    with pytest.raises(RolloutError, match=message):
        talk(tokenizer, engine, lambda m, r: reply, batch, n=4)
    assert not engine.queue


def test_a_failing_or_slow_environment_is_named(tokenizer):
    batch = prompt_batch([[{"role": "user", "content": "q"}]], tokenizer)
    with pytest.raises(RolloutError, match=r"failed on u0/0: ZeroDivisionError"):
        talk(tokenizer, Script(tokenizer, {"u0/0": ("a", "stop")}), lambda m, r: 1 / 0, batch)
    with pytest.raises(RolloutError, match=r"longer than 0.05 s.*timeout_s"):
        talk(tokenizer, Script(tokenizer, {"u0/0": ("a", "stop")}), lambda m, r: time.sleep(1), batch, timeout_s=0.05)


def test_a_template_that_cannot_continue_is_named(tokenizer):
    template = TurnTemplate(tokenizer, chat_template="{% for m in messages %}{{ raise_exception('no') }}{% endfor %}")
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, *say("x")]
    with pytest.raises(RolloutError, match=r"role tool.*custom_chat_template"):
        template.continuation(messages[:1], messages, 0)
    doubled = TurnTemplate(tokenizer, chat_template="{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}")
    with pytest.raises(RolloutError, match="once and as it is"):
        doubled.continuation(messages[:1], messages, 0)


def test_calls_are_read():
    text = 'x <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><tool_call>{"name": 3}</tool_call>'
    good, bad = parse_tool_calls(text, "hermes")
    assert (good.name, good.arguments, good.problem) == ("f", {"a": 1}, None) and "needs" in bad.problem
    assert parse_tool_calls("no call", "hermes") == []
    assert "no JSON" in parse_tool_calls("<tool_call>{</tool_call>", "hermes")[0].problem
    two = parse_tool_calls('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": [1]}}', "llama3_json")
    assert [call.name for call in two] == ["f", "g"] and two[1].arguments == {"x": [1]}
    assert parse_tool_calls("It is {3}", "llama3_json") == []


def call(name, **arguments):
    import json

    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_tools_of_a_file(tokenizer):
    environment = load_environment(MultiTurnSettings(tools=TOOLS, max_parallel_calls=2))
    assert [schema["function"]["name"] for schema in schemas_of(environment)] == ["add", "wait"]

    def ask(text):
        answer = environment([{"role": "assistant", "content": text}], {})
        return answer and [message["content"] for message in answer]

    assert ask(call("add", a=1, b=2)) == ["3"]
    assert ask(call("wait", word="ß")) == ['{"word": "ß", "score": NaN}']
    assert ask("nothing") is None
    assert ask(call("add", a=1)) == ["Error: TypeError: missing a required argument: 'b'"]
    assert "there is no tool '_helper'" in ask(call("_helper"))[0]
    assert ask(call("add", a=1, b=1) * 3)[1:] == ["2", "Error: only 2 call(s) a turn are run"]
    text = TurnTemplate(tokenizer, tools=schemas_of(environment)).prompts.encode_many(
        [[{"role": "user", "content": "q"}]]
    )
    assert "Adds two numbers" in tokenizer.decode(text[0])


def test_files_of_tools_that_cannot_be_used(tmp_path):
    for name, text, message in (
        ("no.py", None, "does not exist"),
        ("tools.yaml", "tools: []", "Python file"),
        ("empty.py", "x = 1", "no public function"),
    ):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_environment(MultiTurnSettings(tools=str(tmp_path / name)))
    (tmp_path / "bare.py").write_text("def f(x):\n    return x")
    with pytest.raises(ConfigError, match="'f' cannot be described"):
        schemas_of(load_environment(MultiTurnSettings(tools=str(tmp_path / "bare.py"))))


def test_long_replies_are_cut():
    assert cut_text("abcdef", 6, "left") == "abcdef"
    assert cut_text("abcdef", 2, "left") == "(cut)...ef"
    assert cut_text("abcdef", 2, "right") == "ab...(cut)"
    assert cut_text("abcdef", 3, "middle") == "ab...(cut)...f"
