"""The server, used by the real openai client over HTTP."""

from __future__ import annotations

import json
import threading
import time

import httpx
import numpy as np
import openai
import pytest
import torch
from serving_server import running, tiny
from tiny_models import save_tiny_model

from verl.errors import ConfigError
from verl.rollout.base import SamplingParams, request_seed
from verl.serving.loop import EngineLoop
from verl.serving.model import request

PROMPT = "12+30="
MESSAGES = [{"role": "user", "content": "12+30=?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny(save_tiny_model(tmp_path_factory.mktemp("served") / "tiny"))


@pytest.fixture(scope="module")
def url(model):
    with running(model) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=url, api_key="-", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same model outside the server."""
    return tiny(save_tiny_model(tmp_path_factory.mktemp("alone") / "tiny"))


def expected(alone, ids, *, seed=None, **params):
    """(tokens, completion) of the engine by itself."""
    params = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.0, **params}
    number = 0 if seed is None else request_seed(seed, "request", 0)
    done = alone.engine.generate([request("a", ids, SamplingParams(**params), number)])[0]
    return done.token_ids.tolist(), done


def test_models(client):
    listed = client.models.list().data
    assert [card.id for card in listed] == ["tiny"] and listed[0].owned_by == "verl"
    assert listed[0].max_model_len == 256
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("gpt-4")


def test_completion_equals_the_engine(client, alone):
    ids = alone.encode_text(PROMPT)
    tokens, _ = expected(alone, ids)
    reply = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
    )
    assert reply.object == "text_completion" and reply.id.startswith("cmpl-")
    assert reply.choices[0].text == alone.tokenizer.decode(tokens, skip_special_tokens=True)
    assert reply.choices[0].finish_reason == "length"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(ids), 12)
    assert reply.usage.total_tokens == len(ids) + 12


def test_token_ids_and_many_prompts(client, alone):
    texts = ["1+1=", "2+2=", "3+3="]
    by_text = client.completions.create(model="tiny", prompt=texts, max_tokens=6, temperature=0)
    by_ids = client.completions.create(
        model="tiny", prompt=[alone.encode_text(text) for text in texts], max_tokens=6, temperature=0
    )
    single = [client.completions.create(model="tiny", prompt=t, max_tokens=6, temperature=0) for t in texts]
    assert [c.index for c in by_text.choices] == [0, 1, 2]
    assert [c.text for c in by_text.choices] == [c.text for c in by_ids.choices] == [r.choices[0].text for r in single]


def test_chat_uses_the_template_and_ends_at_the_end(client, alone):
    ids = alone.encode_chat(MESSAGES)
    assert alone.tokenizer.decode(ids).endswith("<|im_start|>assistant\n")
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12, temperature=0)
    tokens, done = expected(alone, ids, ignore_eos=False)
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content == alone.tokenizer.decode(tokens, skip_special_tokens=True)
    assert reply.choices[0].finish_reason == done.finish_reason and reply.object == "chat.completion"
    parts = [{"role": "user", "content": [{"type": "text", "text": "12+"}, {"type": "text", "text": "30=?"}]}]
    again = client.chat.completions.create(model="tiny", messages=parts, max_completion_tokens=12, temperature=0)
    assert again.choices[0].message.content == reply.choices[0].message.content


def test_streams_give_the_same_text(client):
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 40, "temperature": 1.0, "seed": 5, "n": 2}
    whole = client.chat.completions.create(**asked)
    pieces = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    texts = ["", ""]
    reasons: list[str | None] = [None, None]
    for piece in pieces[:-1]:
        for choice in piece.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [c.message.content for c in whole.choices]
    assert reasons == [c.finish_reason for c in whole.choices]
    assert pieces[0].choices[0].delta.role == "assistant" and len(pieces) > 10
    assert pieces[-1].choices == [] and pieces[-1].usage == whole.usage
    assert len({piece.id for piece in pieces}) == 1

    stream = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, seed=3, stream=True)
    text = "".join(piece.choices[0].text for piece in stream)
    assert text == client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, seed=3).choices[0].text


def test_seeds(client):
    def text(seed, **more):
        reply = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=16, seed=seed, **more)
        return [choice.text for choice in reply.choices]

    assert text(1) == text(1) != text(2)
    four = text(1, n=4)
    assert len(set(four)) > 1 and four[:1] == text(1)
    assert text(None) != text(None)


def test_penalties_and_minimum_of_vllm(client):
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 30, "temperature": 0}
    plain = client.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0].text
    other = client.completions.create(**asked, extra_body={"ignore_eos": True, "repetition_penalty": 5.0})
    assert len(set(other.choices[0].text)) > len(set(plain))
    long = client.completions.create(**{**asked, "temperature": 1}, seed=1, extra_body={"min_tokens": 30})
    assert long.usage.completion_tokens == 30
    body = error_of(client, lambda: client.completions.create(**asked, extra_body={"min_tokens": 31}))
    assert "min_tokens is 31" in body["message"]


def test_stop_texts_are_cut_off(client, alone):
    ids = alone.encode_text(PROMPT)
    full = alone.tokenizer.decode(expected(alone, ids, max_tokens=40)[0], skip_special_tokens=True)
    stop = full[10:12]
    place = full.index(stop)
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "extra_body": {"ignore_eos": True}}
    reply = client.completions.create(**asked, stop=stop)
    assert reply.choices[0].text == full[:place] and reply.choices[0].finish_reason == "stop"
    assert reply.usage.completion_tokens == place + 2  # a character is a token here
    streamed = client.completions.create(**asked, stop=[stop], stream=True)
    assert "".join(piece.choices[0].text for piece in streamed) == full[:place]


def test_logprobs_are_those_of_a_plain_forward(client, alone):
    ids = alone.encode_text(PROMPT)
    tokens, _ = expected(alone, ids)
    with torch.no_grad():
        logits = alone.model(input_ids=torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
    wanted = logits.log_softmax(-1)
    chosen = wanted[torch.arange(12), tokens].tolist()
    asked = {"model": "tiny", "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
    for count in (0, 3):
        got = client.completions.create(**asked, prompt=PROMPT, logprobs=count).choices[0].logprobs
        np.testing.assert_allclose(got.token_logprobs, chosen, atol=1e-4)
        assert got.tokens == [alone.tokenizer.decode([t]) for t in tokens] and got.text_offset[:2] == [0, 1]
    assert [len(row) for row in got.top_logprobs] == [3] * 12
    best = {alone.tokenizer.decode([t]): v for t, v in enumerate(wanted[0].tolist())}
    for text, value in got.top_logprobs[0].items():
        assert value == pytest.approx(best[text], abs=1e-4)

    chat = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2
    )
    first = chat.choices[0].logprobs.content[0]
    assert first.top_logprobs[0].token == first.token and first.logprob == pytest.approx(first.top_logprobs[0].logprob)
    assert bytes(first.bytes).decode() == first.token
    streamed = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=4, temperature=0, logprobs=True, stream=True
    )
    values = [row.logprob for piece in streamed for c in piece.choices if c.logprobs for row in c.logprobs.content]
    np.testing.assert_allclose(values, [row.logprob for row in chat.choices[0].logprobs.content], atol=1e-4)


def test_echo_scores_a_prompt_without_writing(client, alone):
    ids = alone.encode_text("12+30=42")
    reply = client.completions.create(model="tiny", prompt="12+30=42", max_tokens=0, echo=True, logprobs=1)
    assert reply.choices[0].text == "12+30=42" and reply.usage.completion_tokens == 0
    got = reply.choices[0].logprobs
    with torch.no_grad():
        wanted = alone.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    assert got.token_logprobs[0] is None and got.tokens == list("12+30=42")
    np.testing.assert_allclose(got.token_logprobs[1:], [wanted[i, t].item() for i, t in enumerate(ids[1:])], atol=1e-4)
    longer = client.completions.create(model="tiny", prompt="12+30=42", max_tokens=3, echo=True, logprobs=1)
    assert len(longer.choices[0].logprobs.tokens) == len(ids) + longer.usage.completion_tokens


def test_clients_share_one_running_batch(client, model, alone):
    """A long request is running when short ones come; they are done before it is, and each has its own text."""
    results: dict[int, str] = {}

    def ask(i: int, tokens: int):
        reply = client.completions.create(
            model="tiny", prompt=f"{i}+{i}=", max_tokens=tokens, seed=i, extra_body={"ignore_eos": True}
        )
        results[i] = reply.choices[0].text
        order.append(i)

    order: list[int] = []
    threads = [threading.Thread(target=ask, args=(0, 240))]
    threads[0].start()
    sizes = []
    for i in range(1, 9):
        threads.append(threading.Thread(target=ask, args=(i, 8)))
        threads[-1].start()
        sizes.append(len(model.engine.scheduler.running))
    for thread in threads:
        thread.join()
    assert order[-1] == 0 and len(order) == 9
    for i in range(9):
        tokens, _ = expected(
            alone, alone.encode_text(f"{i}+{i}="), seed=i, temperature=1.0, max_tokens=240 if i == 0 else 8
        )
        assert results[i] == alone.tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(url, model, stream):
    body = {"model": "tiny", "prompt": "9+9=", "max_tokens": 240, "ignore_eos": True, "stream": stream}
    slow = model.engine.poll

    def slowly():
        time.sleep(0.02)
        return slow()

    model.engine.poll = slowly
    try:
        asking = httpx.stream("POST", f"{url}/completions", json=body, timeout=httpx.Timeout(30, read=0.5))
        with pytest.raises(httpx.ReadTimeout), asking as reply:
            for n, _ in enumerate(reply.iter_lines()):
                if n > 3:
                    raise httpx.ReadTimeout("enough")
        deadline = time.time() + 30
        while model.engine.pending and time.time() < deadline:
            time.sleep(0.02)
        assert model.engine.pending == 0 and len(model.engine.scheduler) == 0
    finally:
        model.engine.poll = slow


def error_of(client, call) -> dict:
    with pytest.raises(openai.BadRequestError) as caught:
        call()
    return caught.value.body


@pytest.mark.parametrize(
    ("changes", "param", "said"),
    [
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"presence_penalty": 1.0}, "presence_penalty", "not offered"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not offered"),
        ({"extra_body": {"tempature": 1}}, "tempature", "Unrecognized request argument"),
        ({"prompt": ""}, None, "the prompt is empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [1, 2, 9999]}, None, "token id 9999"),
        ({"stop": ""}, "stop", "may not be empty"),
        ({"max_tokens": 0}, "max_tokens", "needs echo"),
        ({"best_of": 3}, "best_of", "not offered"),
    ],
)
def test_errors_are_in_openais_format(client, changes, param, said):
    body = error_of(client, lambda: client.completions.create(**{"model": "tiny", "prompt": "1+1=", **changes}))
    assert body["type"] == "invalid_request_error" and body["param"] == param and said in body["message"]


def test_too_long_is_refused_by_its_code(client):
    body = error_of(client, lambda: client.completions.create(model="tiny", prompt="1" * 250, max_tokens=20))
    assert body["code"] == "context_length_exceeded" and "takes 256 tokens; 250 of the prompt" in body["message"]
    fits = client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body={"ignore_eos": True})
    assert fits.usage.total_tokens == 256  # no max_tokens: up to the end of the context


def test_neutral_values_of_what_is_not_offered_are_fine(client):
    client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=2, presence_penalty=0, tools=[], response_format={"type": "text"},
        user="me",
    )  # fmt: skip
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body = error_of(client, lambda: client.chat.completions.create(model="tiny", messages=MESSAGES, tools=tools))
    assert body["param"] == "tools"


def test_unknown_places_and_wrong_json(url):
    reply = httpx.get(f"{url}/engines")
    assert reply.status_code == 404 and reply.json()["error"]["code"] == "unknown_url"
    reply = httpx.post(f"{url}/completions", content="{", headers={"content-type": "application/json"})
    assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error"
    form = {"content-type": "application/x-www-form-urlencoded"}  # what curl -d says unless told otherwise
    reply = httpx.post(f"{url}/completions", content='{"prompt": "a"}', headers=form)
    assert reply.status_code == 400 and "Content-Type: application/json" in reply.json()["error"]["message"]
    reply = httpx.post(f"{url}/completions", content=b"\xff\x00", headers={"content-type": "application/json"})
    assert reply.status_code == 400 and reply.json()["error"]["code"] is None
    reply = httpx.post(f"{url}/chat/completions", json={"messages": [{"role": "user"}]})
    assert reply.status_code == 400 and "a message of the user needs content" in reply.json()["error"]["message"]
    assert httpx.get(url.removesuffix("/v1") + "/health").json()["status"] == "ok"


def test_the_raw_stream_is_server_sent_events(url):
    body = {"messages": MESSAGES, "max_tokens": 3, "stream": True}
    with httpx.stream("POST", f"{url}/chat/completions", json=body, timeout=30) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in reply.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    assert json.loads(lines[0][6:])["object"] == "chat.completion.chunk"


def test_keys_and_names(alone):
    with running(alone, names=["mine", "other"], api_key="geheim") as url:
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="x", max_retries=0).models.list()
        client = openai.OpenAI(base_url=url, api_key="geheim", max_retries=0)
        assert [card.id for card in client.models.list()] == ["mine", "other"]
        assert client.completions.create(model="other", prompt="1", max_tokens=1).model == "other"


def test_an_engine_that_fails_says_so_to_everybody(tmp_path):
    model = tiny(save_tiny_model(tmp_path / "tiny"))
    with running(model) as url:
        client = openai.OpenAI(base_url=url, api_key="-", max_retries=0)

        def broken():
            raise RuntimeError("device lost")

        model.engine.poll = broken
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="device lost"):
                client.completions.create(model="tiny", prompt="1")
        pieces = client.completions.create(model="tiny", prompt="1", stream=True)
        with pytest.raises(openai.APIError, match="device lost"):
            list(pieces)
        assert httpx.get(url.removesuffix("/v1") + "/health").status_code == 503


def test_a_model_without_a_chat_template_is_asked_in_plain_text(tmp_path, capsys):
    folder = save_tiny_model(tmp_path / "plain")
    (folder / "chat_template.jinja").unlink()
    model = tiny(folder)
    assert not model.template.has_template
    with running(model) as url:
        client = openai.OpenAI(base_url=url, api_key="-", max_retries=0)
        reply = client.chat.completions.create(model="plain", messages=MESSAGES, max_tokens=2, temperature=0)
        plain = client.completions.create(model="plain", prompt="12+30=?", max_tokens=2, temperature=0)
    assert reply.choices[0].message.content == plain.choices[0].text
    assert "no chat template" in capsys.readouterr().out


def test_the_simple_engine_serves_too(tmp_path):
    model = tiny(save_tiny_model(tmp_path / "tiny"), engine="hf")
    assert model.engine.name == "hf"
    with running(model) as url:
        client = openai.OpenAI(base_url=url, api_key="-", max_retries=0)
        whole = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, seed=3).choices[0].text
        pieces = list(client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, seed=3, stream=True))
        assert "".join(p.choices[0].text for p in pieces) == whole and len(pieces) > 5


def test_a_server_that_ends_tells_its_clients(tmp_path):
    model = tiny(save_tiny_model(tmp_path / "tiny"))
    slow = model.engine.poll
    model.engine.poll = lambda: time.sleep(0.2) or slow()  # 240 tokens take 48 s
    with running(model) as url:
        client = openai.OpenAI(base_url=url, api_key="-", max_retries=0)
        asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 240, "extra_body": {"ignore_eos": True}}
        stream = client.completions.create(**asked, stream=True)
        next(stream)
        assert model.engine.pending
        started = time.time()
        app_loop(model).stop_soon()
        with pytest.raises(openai.APIError, match="the server is closing"):
            list(stream)
        assert time.time() - started < 30  # nobody waits for the rest of the answer
        with pytest.raises(openai.InternalServerError, match="closing"):
            client.completions.create(**asked)


def app_loop(model):
    """The loop that runs a model: its thread holds it."""
    import gc

    return next(found for found in gc.get_objects() if isinstance(found, EngineLoop) and found.model is model)


def test_closing_the_loop_ends_its_thread(alone):
    loop = EngineLoop(alone)
    loop.close()
    with pytest.raises(Exception, match="closing"):
        loop.submit([], print)


def test_a_taken_port_is_one_sentence(capsys):
    from verl.cli.main import main
    from verl.serving.server import open_port

    with open_port("127.0.0.1", 0) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match="cannot be listened on"):
            open_port("127.0.0.1", port)
        assert main(["serve", "nothing", "--port", str(port)]) == 2
    assert f"127.0.0.1:{port} cannot be listened on" in capsys.readouterr().err
