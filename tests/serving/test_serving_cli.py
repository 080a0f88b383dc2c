"""verl generate and verl chat, as typed."""

from __future__ import annotations

import json
import sys

import pytest
from tiny_models import save_tiny_model

from verl.cli.chat import Chat, _read_line
from verl.cli.main import main
from verl.serving.answers import Sampling, answer_all, stream_answer
from verl.serving.model import LoadOptions, load_model
from verl.serving.prompts import read_prompts

CPU = ["--device", "cpu", "--dtype", "float32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def model(folder):
    return load_model(str(folder), LoadOptions(device="cpu", dtype="float32"))


@pytest.fixture
def plain(tmp_path):
    """A model without a chat template."""
    folder = save_tiny_model(tmp_path / "plain")
    (folder / "chat_template.jinja").unlink()
    return load_model(str(folder), LoadOptions(device="cpu", dtype="float32"))


def test_streamed_and_batched_answers_are_the_same(model):
    sampling = Sampling(max_tokens=30, seed=4)
    pieces = list(stream_answer(model, "1+2=", sampling, chat=False))
    assert len(pieces) > 5
    [(_, _, answer)] = answer_all(model, ["1+2="], sampling, chat=False)
    assert "".join(pieces) == answer.text and model.engine.pending == 0


def test_stopping_early_leaves_the_engine_free(model):
    pieces = stream_answer(model, "1+2=", Sampling(max_tokens=100, ignore_eos=True), chat=False)
    next(pieces)
    pieces.close()
    assert model.engine.pending == 0 and not model.engine.scheduler.active


def test_generate_prints_answers_alone_on_standard_output(folder, model, capsys):
    command = ["generate", str(folder), "--prompt", "1+2=", "--raw", "--max-tokens", "20", "--seed", "3", *CPU]
    assert main(command) == 0
    out, err = capsys.readouterr()
    from verl.cli.terminal import printable

    [(_, _, answer)] = answer_all(model, ["1+2="], Sampling(max_tokens=20, seed=3), chat=False)
    assert out == printable(answer.text) + "\n"
    assert "tiny: " in err and "engine native" in err


def test_generate_from_a_file_to_json_lines(folder, tmp_path, capsys):
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out" / "answers.jsonl"
    prompts.write_text("1+1=\n\n2+2=\n3+3=\n")
    typed = ["--prompts", str(prompts), "--limit", "2", "--n", "3", "--max_tokens=6", "--output", str(out), *CPU]
    assert main(["generate", str(folder), *typed]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["prompt"], row["sample"]) for row in rows] == [(p, k) for p in ("1+1=", "2+2=") for k in range(3)]
    assert all(row["finish_reason"] in ("stop", "length") and row["tokens"] <= 6 for row in rows)
    assert all(row["log_prob"] < 0 for row in rows) and len({row["response"] for row in rows}) > 2
    assert f"6 answers in {out}" in capsys.readouterr().out


def test_a_least_length_and_a_penalty_on_repeating(folder, tmp_path, capsys):
    """Both reach the engine: no answer ends too early, and none holds a token twice."""
    prompts, out = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("".join(f"{i}+{i}=\n" for i in range(8)))
    typed = ["generate", str(folder), "--prompts", str(prompts), "--raw", "--output", str(out), *CPU]

    def answers(*more: str) -> list[dict]:
        assert main([*typed, *more]) == 0
        return [json.loads(line) for line in out.read_text().splitlines()]

    assert min(row["tokens"] for row in answers("--max_tokens", "40")) < 30, "a random model ends early by itself"
    assert min(row["tokens"] for row in answers("--max_tokens", "40", "--min-tokens", "30")) >= 30
    greedy = ["--temperature", "0", "--ignore_eos", "--max_tokens", "12"]
    loose, strict = answers(*greedy), answers(*greedy, "--repetition-penalty", "1e6")
    assert any(len(set(row["response"])) < len(row["response"]) for row in loose)
    assert [row["response"] for row in strict] != [row["response"] for row in loose]


def test_many_answers_are_shown_under_their_prompts(folder, capsys):
    command = ["generate", str(folder), "--prompt", "1+1=", "--prompt", "2+2=", "--n", "2", "--max-tokens", "3", *CPU]
    assert main(command) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("> ", "["))]
    assert [line[:5] for line in lines if line.startswith(">")] == ["> 1+1", "> 2+2"]
    assert sum(line.startswith("[1]") for line in lines) == sum(line.startswith("[2]") for line in lines) == 2


def test_prompts_of_every_layout(tmp_path):
    rows = [{"instruction": "Add", "input": "1 2", "output": "3"}, {"instruction": "Go", "input": "", "output": "x"}]
    (tmp_path / "alpaca.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prompts = read_prompts(tmp_path / "alpaca.jsonl")
    assert [p[0]["content"] for p in prompts] == ["Add\n\n1 2", "Go"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt", "a", "--prompts", "f"], "not both"),
        (["--prompts", "missing.txt"], "missing.txt"),
        (["--prompt", "a", "--top_p", "0"], "0 < top_p"),
        (["--prompt", "a", "--repetition_penalty", "0"], "repetition_penalty is 0.0; it must be above 0"),
        (["--prompt", "a", "--max_tokens", "5", "--min_tokens", "6"], "min_tokens is 6; it must be between 0 and"),
        (["--prompt", "a", "--min_tokens", "600"], "min_tokens is 600"),
        (["--prompt", "a", "--max_tokens", "9999"], "the model takes 256 tokens"),
        (["--prompt", "a", "--max_model_len", "9999"], "more than the model's 256 positions"),
        (["--prompt", "a", "--step", "3"], "has no steps: it is not a run folder"),
        (["--prompt", "a", "--tempature", "3"], "unrecognized arguments: --tempature"),
    ],
)
def test_mistakes_are_one_sentence(folder, arguments, said, capsys):
    assert main(["generate", str(folder), *arguments, *CPU]) == 2
    err = capsys.readouterr().err.splitlines()
    assert said in err[-1] and err[-1].startswith("error: ")


def test_standard_input_is_a_prompt(folder, monkeypatch, capsys):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("1+1=\n"))
    assert main(["generate", str(folder), "--max-tokens", "2", *CPU]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["generate", str(folder), *CPU]) == 2


def lines(*entries):
    rest = list(entries)
    return lambda: rest.pop(0) if rest else None


def test_a_chat_has_history_and_forgets_it(model, capsys):
    chat = Chat(model, Sampling(max_tokens=4, temperature=0.0))
    chat.run(lines("one", "two", "", "/undo"))
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] and chat.messages[0]["content"] == "one"
    with_history = chat._conversation()
    chat.run(lines("/reset", "/system be brief", "one"))
    assert chat._conversation()[0] == {"role": "system", "content": "be brief"}
    assert len(chat.messages) == 2 and with_history[0]["role"] == "user"
    first = capsys.readouterr().out
    assert "The conversation is forgotten." in first and "The system message is set." in first


def test_the_answer_depends_on_the_history(model):
    chat = Chat(model, Sampling(max_tokens=8, temperature=0.0))
    chat.run(lines("hello"))
    alone = chat.messages[-1]["content"]
    chat.run(lines("hello"))
    assert chat.messages[-1]["content"] != alone


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set temperature=0.25", "temperature is 0.25 now."),
        ("/set temperature=-1", "temperature stays 0.0"),
        ("/set top_k=x", "top_k stays -1"),
        ("/set repetition_penalty=1.5", "repetition_penalty is 1.5 now."),
        ("/set repetition_penalty=0", "repetition_penalty stays 1.0"),
        ("/set min_tokens=600", "min_tokens is 600 now."),
        ("/set min_tokens=-1", "min_tokens stays 0"),
        ("/set colour=red", "/set takes temperature"),
        ("/nonsense", "There is no command /nonsense."),
        ("/help", "/reset       forget the conversation"),
    ],
)
def test_commands(model, line, said, capsys):
    Chat(model, Sampling(temperature=0.0)).run(lines(line, "/quit", "never reached"))
    out = capsys.readouterr().out
    assert said in out and "never" not in out


def test_too_long_a_conversation_is_told_and_taken_back(model, capsys):
    chat = Chat(model, Sampling(max_tokens=4, temperature=0.0))
    chat.run(lines("1" * 300))
    assert chat.messages == [] and "/reset forgets" in capsys.readouterr().out


def test_an_interrupted_answer_is_kept_as_far_as_it_came(model, capsys, monkeypatch):
    from verl.serving import answers

    real = answers.stream_answer

    def interrupted(*args, **kwargs):
        for n, piece in enumerate(real(*args, **kwargs)):
            if n == 2:
                raise KeyboardInterrupt
            yield piece

    monkeypatch.setattr(answers, "stream_answer", interrupted)
    chat = Chat(model, Sampling(max_tokens=40, temperature=0.0, ignore_eos=True))
    chat.run(lines("hi"))
    assert chat.messages[-1]["role"] == "assistant" and chat.messages[-1]["content"]
    assert "[stopped]" in capsys.readouterr().out and model.engine.pending == 0


def test_a_model_without_a_chat_template_talks_in_plain_text(plain, capsys):
    chat = Chat(plain, Sampling(max_tokens=4, temperature=0.0))
    chat.run(lines("one", "two"))
    assert len(chat.messages) == 4
    assert "no chat template" in capsys.readouterr().out
    ids = plain.encode_chat(chat.messages[:3])
    text = plain.tokenizer.decode(ids)
    assert text.startswith("User: one") and text.endswith("Assistant:") and "\nUser:" in chat._sampling().stop


def test_chat_from_a_pipe(folder, monkeypatch, capsys):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\\\nthere\n/quit\n"))
    assert main(["chat", str(folder), "--max-tokens", "3", "--temperature", "0", *CPU]) == 0
    assert "/help lists commands" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\\\nb\nc"))
    assert [_read_line(), _read_line(), _read_line()] == ["a\nb", "c", None]


def test_control_codes_in_answers_do_nothing():
    from verl.cli.terminal import printable

    assert printable("a\x1b[31mb\r\nc\td\x07") == "a\\x1b[31mb\nc\td\\x07"
