"""The OpenAI-compatible HTTP server: /v1/models, /v1/completions, /v1/chat/completions, /health."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from verl._version import __version__
from verl.errors import DataError, VerlError
from verl.serving.loop import Closing, EngineLoop, Event, Failed, Finished, Progress, Wanted
from verl.serving.model import ServedModel
from verl.serving.replies import Json, LogProbs, Reply, text_log_probs
from verl.serving.requests import ApiError, ChatRequest, CompletionRequest, flat_problem
from verl.serving.text import TextStream, response_text

POLL_SECONDS = 0.1  # between two looks whether a client that waits for a whole answer is still there


class Service:
    """One model under one or several names, and what the endpoints do with it."""

    def __init__(self, model: ServedModel, names: Sequence[str], api_key: str | None = None):
        self.model, self.names, self.api_key = model, list(names), api_key
        self.loop = EngineLoop(model)
        self.log_probs = LogProbs(model.tokenizer)
        self.started = int(time.time())

    def check_model(self, name: str | None) -> str:
        """The name under which the client knows the model; the first one if it gives none."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise ApiError(
                f"The model `{name}` does not exist; there is {', '.join(self.names)}.",
                status=404, kind="not_found_error", param="model", code="model_not_found",
            )  # fmt: skip
        return name

    def card(self, name: str) -> Json:
        return {
            "id": name, "object": "model", "created": self.started, "owned_by": "verl",
            "max_model_len": self.model.context,
        }  # fmt: skip

    def completion_prompts(self, body: CompletionRequest) -> list[list[int]]:
        model = self.model
        return [model.encode_text(p) if isinstance(p, str) else model.check_ids(p) for p in body.prompts()]

    async def events(self, wanted: Sequence[Wanted], http: Request | None) -> AsyncGenerator[Event, None]:
        """What happens with the responses, until all are finished. Leaving early, and a client's leaving, abort them.

        ``http``: the request to watch; None where its connection ends the iteration by itself.
        """
        queue: asyncio.Queue[Event] = asyncio.Queue()
        here = asyncio.get_running_loop()
        try:
            number = self.loop.submit(wanted, lambda event: here.call_soon_threadsafe(queue.put_nowait, event))
        except Exception as error:  # the engine has failed before
            raise _as_api_error(error) from error
        left = len(wanted)
        try:
            while left:
                try:
                    event = await asyncio.wait_for(queue.get(), POLL_SECONDS if http else None)
                except asyncio.TimeoutError:
                    if http is not None and await http.is_disconnected():
                        return
                    continue
                if isinstance(event, Failed):
                    raise _as_api_error(event.error) from event.error
                left -= isinstance(event, Finished)
                yield event
        finally:
            if left:
                self.loop.abort(number)

    def wanted(self, body: CompletionRequest | ChatRequest, prompts: Sequence[Sequence[int]]) -> list[Wanted]:
        """n responses to each prompt."""
        limit = body.limit if isinstance(body, ChatRequest) else body.max_tokens
        echo = isinstance(body, CompletionRequest) and body.echo
        top = body.top
        if body.stream and top and isinstance(body, ChatRequest):
            raise ApiError("top_logprobs is not offered for streams; logprobs is.", param="top_logprobs")
        if isinstance(body, CompletionRequest):
            if body.best_of not in (None, body.n):
                raise ApiError("best_of is not offered here.", param="best_of", code="unsupported_parameter")
            if body.stream and (echo or (top or 0) > 1):
                raise ApiError("echo and logprobs above 1 are not offered for streams.", param="stream")
            if not limit and not echo:
                raise ApiError("max_tokens 0 needs echo.", param="max_tokens")
        wanted = []
        for prompt, seed in zip(
            [p for p in prompts for _ in range(body.n)], body.seeds(len(prompts) * body.n), strict=True
        ):
            params = None if limit == 0 else body.params(self.model.room_for(prompt, limit))
            wanted.append(
                Wanted(prompt, params, seed, echo and top is not None, None if body.stream else top, body.stream)
            )
        return wanted

    # whole answers

    async def whole(self, body: CompletionRequest | ChatRequest, prompts: list[list[int]], reply: Reply, http: Request):
        wanted = self.wanted(body, prompts)
        done: dict[int, Finished] = {}
        async with contextlib.aclosing(self.events(wanted, http)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    done[event.index] = event
        if len(done) < len(wanted):
            return JSONResponse(None, 499)  # the client has gone
        choices = [self._choice(body, reply, wanted[i], done[i]) for i in range(len(wanted))]
        reply.completion_tokens = sum(len(event.completion.token_ids) for event in done.values())
        return JSONResponse(reply.whole(choices))

    def _choice(self, body: CompletionRequest | ChatRequest, reply: Reply, wanted: Wanted, done: Finished) -> Json:
        tokens = done.completion.token_ids.tolist()
        skip = body.skip_special_tokens
        text = response_text(self.model.tokenizer, tokens, body.stop, skip_special=skip)
        log_probs = None
        if isinstance(body, ChatRequest):
            if body.logprobs:
                values = done.scores.chosen if done.scores else done.completion.log_probs.tolist()
                log_probs = self.log_probs.chat(tokens, values, done.scores)
        else:
            if body.logprobs is not None:
                log_probs = text_log_probs(self.log_probs, wanted.prompt, done, echo=body.echo, top=body.logprobs)
            if body.echo:
                before = self.model.tokenizer.decode(list(wanted.prompt), skip_special_tokens=skip)
                text = f"{before}{text}"
        return reply.choice(done.index, text, log_probs, done.completion.finish_reason)

    # streamed answers

    async def stream(self, body: CompletionRequest | ChatRequest, wanted: list[Wanted], reply: Reply):
        """Server-sent events: a piece for each bit of new text, then the usage if asked for, then [DONE]."""
        streams = [
            TextStream(self.model.tokenizer, body.stop, skip_special=body.skip_special_tokens) for _ in wanted
        ]  # fmt: skip
        try:
            if reply.chat:
                yield _event(reply.piece([reply.part(i, "", None, None, first=True) for i in range(len(wanted))]))
            async with contextlib.aclosing(self.events(wanted, None)) as events:
                async for event in events:
                    if piece := self._piece(body, reply, streams, event):
                        yield _event(reply.piece([piece]))
            if body.include_usage:
                yield _event(reply.piece([], usage=True))
            yield "data: [DONE]\n\n"
        except Exception as error:  # the headers are gone: the error is an event
            yield _event(_as_api_error(error).body)

    def _piece(self, body, reply: Reply, streams: list[TextStream], event: Event) -> Json | None:
        last = isinstance(event, Finished)
        if isinstance(event, Finished):
            tokens = event.completion.token_ids.tolist()[event.rest :]
            values = event.completion.log_probs.tolist()[event.rest :]
        else:
            assert isinstance(event, Progress)
            tokens, values = event.tokens, event.log_probs
        reply.completion_tokens += len(tokens)
        text = streams[event.index].push(tokens, last=last)
        log_probs = None
        if body.logprobs not in (None, False):
            chat = isinstance(body, ChatRequest)
            log_probs = self.log_probs.chat(tokens, values, None) if chat else self.log_probs.text(tokens, values, None)
        reason = event.completion.finish_reason if isinstance(event, Finished) else None
        if not text and reason is None and log_probs is None:
            return None  # half a character, or what may become a stop text
        return reply.part(event.index, text, log_probs, reason)


def _event(body: Json) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Closing):
        return ApiError(str(error), status=503, kind="server_error", code="closing")
    if isinstance(error, DataError):
        too_long = "do not fit" in str(error)
        return ApiError(str(error), code="context_length_exceeded" if too_long else None)
    if isinstance(error, VerlError):
        return ApiError(str(error))
    message = f"the engine failed ({type(error).__name__}: {error}); restart the server"
    return ApiError(message, status=500, kind="server_error", code="engine_failed")


def make_app(model: ServedModel, names: Sequence[str] | None = None, api_key: str | None = None) -> FastAPI:
    """The ASGI application. It owns the model until it is shut down.

    Args:
        names: under which clients ask for the model; None: its own.
        api_key: that clients must send as bearer token; None: nobody is asked.
    """
    service = Service(model, names or [model.name], api_key)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.loop.close)

    app = FastAPI(title="verl", version=__version__, lifespan=lifespan)
    app.state.service = service
    _add_errors(app)
    _add_routes(app, service)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    def allowed(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if service.api_key is not None and not hmac.compare_digest(given.encode(), service.api_key.encode()):
            raise ApiError(
                "Incorrect API key provided.", status=401, kind="authentication_error", code="invalid_api_key"
            )

    guarded = [Depends(allowed)]

    @app.get("/health")
    async def health() -> JSONResponse:
        healthy = service.loop.failure is None
        return JSONResponse(
            {"status": "ok" if healthy else "failed", "running": service.loop.running}, 200 if healthy else 503
        )

    @app.get("/v1/models", dependencies=guarded)
    async def models() -> Json:
        return {"object": "list", "data": [service.card(name) for name in service.names]}

    @app.get("/v1/models/{name:path}", dependencies=guarded)
    async def one_model(name: str) -> Json:
        return service.card(service.check_model(name))

    async def answer(body: CompletionRequest | ChatRequest, prompts: list[list[int]], kind: str, http: Request) -> Any:
        reply = Reply(kind, service.check_model(body.model), sum(map(len, prompts)))
        if not body.stream:
            return await service.whole(body, prompts, reply, http)
        wanted = service.wanted(body, prompts)
        return StreamingResponse(service.stream(body, wanted, reply), media_type="text/event-stream")

    @app.post("/v1/completions", dependencies=guarded)
    async def completions(body: CompletionRequest, http: Request) -> Any:
        body.refuse_unknown()
        service.check_model(body.model)
        return await answer(body, service.completion_prompts(body), "text_completion", http)

    @app.post("/v1/chat/completions", dependencies=guarded)
    async def chat(body: ChatRequest, http: Request) -> Any:
        body.refuse_unknown()
        service.check_model(body.model)
        prompt = service.model.encode_chat([message.plain() for message in body.messages])
        return await answer(body, [prompt], "chat.completion", http)


def _add_errors(app: FastAPI) -> None:
    def response(error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.status)

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return response(error)

    @app.exception_handler(VerlError)
    async def refused(_: Request, error: VerlError) -> JSONResponse:
        return response(_as_api_error(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        if "json" not in (given := request.headers.get("content-type", "none")):
            why = f"the body is read as JSON only with the header Content-Type: application/json (it was: {given})"
            return response(ApiError(why))
        message, name = flat_problem(error.errors())
        return response(ApiError(message, param=name))

    @app.exception_handler(HTTPException)
    async def missing(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        code = "unknown_url" if error.status_code in (404, 405) else None
        return response(ApiError(message, status=error.status_code, code=code))

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> JSONResponse:
        return response(_as_api_error(error))
