"""The routes of the HTTP door, and what each does with its body.

Every answer, an error too, is JSON or a stream of JSON events. Knows FastAPI; how requests are
run and streamed is ``http_door.answer``'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI, Request, Response

from kvferry.cluster.errors import Cancelled, NotReady
from kvferry.cluster.http_door.answer import JSON_TYPE, Answer, Plan, failure_response, json_bytes
from kvferry.cluster.http_door.bodies import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    parse_body,
)
from kvferry.cluster.http_door.failures import MethodNotAllowed, NoSuchRoute, contract_error
from kvferry.cluster.http_door.guard import (
    Admits,
    Guard,
    caller_of,
    check_guarded,
    known_caller,
    peer_of,
)
from kvferry.cluster.http_door.reading import LARGE_BODY_BYTES, parse_json, read_body
from kvferry.cluster.http_door.shapes import ChatShape, CompletionShape, Json, Wanted, token_text
from kvferry.cluster.http_door.translate import (
    Ask,
    chat_ask,
    completion_asks,
    renamed,
    tokenize_ask,
)
from kvferry.cluster.metrics.exposition import render
from kvferry.cluster.router_node import RouterNode
from kvferry.cluster.server_limits import ServerLimits
from kvferry.engine.request import InvalidRequest
from kvferry.kv_cache.errors import KVFerryError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Door:
    """What the routes share.

    Attributes:
        wall_clock: seconds of the epoch.
        draining: whether new work is refused, because the server stops.
    """

    node: RouterNode
    limits: ServerLimits
    wall_clock: Callable[[], float]
    draining: bool = False

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """The body of a request. Raises what refuses it."""
        if self.draining:
            raise NotReady("the server is shutting down; try again later")
        limits = self.limits
        body = await read_body(request, limits.max_message_bytes, limits.slow_client_limit_s)
        if len(body) < LARGE_BODY_BYTES:
            return parse_body(kind, parse_json(body))
        return await asyncio.to_thread(lambda: parse_body(kind, parse_json(body)))

    async def completions(self, request: Request) -> Response:
        """Texts or token ids, continued."""
        received_at = self.node.clock()
        with self._counting():
            body = await self.read(request, CompletionBody)
            asks = completion_asks(body)
            wanted = replace(self._wanted(body, body.logprobs is not None), echo=body.echo)
        shape = CompletionShape(self.node.intake.tokenizer, wanted)
        return self._answer(request, body, asks, shape, received_at)

    async def chat_completions(self, request: Request) -> Response:
        """A conversation, answered."""
        received_at = self.node.clock()
        with self._counting():
            body = await self.read(request, ChatBody)
            asks = [chat_ask(body, self.node.intake.model.max_model_len)]
            wanted = self._wanted(body, body.logprobs)
        shape = ChatShape(self.node.intake.tokenizer, wanted)
        return self._answer(request, body, asks, shape, received_at)

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        """Counts what is refused here, before the intake would. Who leaves is not refused."""
        try:
            yield
        except Exception as error:  # whatever it is, it is counted and goes on to the handlers
            if not isinstance(error, Cancelled):
                self.node.router.recorder.rejected(contract_error(error))
            raise

    def _wanted(self, body: GenerationBody, logprobs: bool) -> Wanted:
        if body.stream and body.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs: not given in streams; ask without stream")
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("stream_options: given without stream; set stream to true")
        return Wanted(
            logprobs,
            body.prompt_logprobs is not None,
            body.return_token_ids,
            body.skip_special_tokens is not False,
        )

    def _answer(
        self,
        request: Request,
        body: GenerationBody,
        asks: list[Ask],
        shape: CompletionShape | ChatShape,
        received_at: float,
    ) -> Response:
        options = body.stream_options
        plan = Plan(
            asks,
            caller_of(request.scope),
            peer_of(request.scope),
            shape,
            received_at,
            int(self.wall_clock()),
            self.node.intake.model.name,
            body.stream,
            options is not None and options.include_usage,
        )
        return Answer(self.node, self.limits.slow_client_limit_s, plan)

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or conversation."""
        body = await self.read(request, TokenizeBody)
        wanted, names = tokenize_ask(body)
        intake = self.node.intake
        try:
            ids = await self.node.take_in(intake.tokenize_input, wanted)
        except InvalidRequest as error:
            raise type(error)(renamed(str(error), names)) from error
        strings = [token_text(intake.tokenizer, each) for each in ids]
        return _json(
            {
                "count": len(ids),
                "max_model_len": intake.model.max_model_len,
                "tokens": ids,
                "token_strs": strings if body.return_token_strs else None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        body = await self.read(request, DetokenizeBody)
        intake = self.node.intake
        intake.check_model(body.model)
        size = intake.model.vocab_size
        wrong = next((each for each in body.tokens if not 0 <= each < size), None)
        if wrong is not None:
            raise InvalidRequest(f"tokens: got {wrong}, wanted 0 to {size - 1}")
        text = await asyncio.to_thread(intake.tokenizer.decode, body.tokens, False)
        return _json({"prompt": text})

    async def models(self) -> Response:
        """The one served model, as a list."""
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> Response:
        """The served model, by its name."""
        self.node.intake.check_model(name)
        return _json(self._model())

    def _model(self) -> Json:
        served = self.node.intake.model
        return {
            "id": served.name,
            "object": "model",
            "created": int(self.wall_clock()),
            "owned_by": "kvferry",
            "max_model_len": served.max_model_len,
        }

    async def health(self) -> Response:
        """Whether the door answers."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Whether a request could be served now; why not is told to callers only."""
        reasons = self.node.router.workers.not_ready_reasons()
        if self.draining:
            reasons = ["the server is shutting down"]
        if reasons:
            is_stranger = known_caller(request.scope) is None
            raise NotReady("not ready" if is_stranger else "; ".join(reasons))
        return _json({"ready": True})

    async def metrics(self, request: Request) -> Response:
        """What is counted, in Prometheus' text format; rendered beside the loop."""
        families = self.node.metrics()
        accept = request.headers.get("accept", "")
        text, content_type = await asyncio.to_thread(render, lambda: families, accept)
        return Response(text, headers={"content-type": content_type})


def make_app(door: Door) -> FastAPI:
    """The application: routes, whom each admits, and errors in OpenAI's shape."""
    # None of FastAPI's own pages: they load scripts from elsewhere.
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    guard = Guard(door.node.access.gate, door.node.refusals)
    guard.stand_before(app)
    for whom, method, path, endpoint in (
        (Admits.CALLERS, "POST", "/v1/completions", door.completions),
        (Admits.CALLERS, "POST", "/v1/chat/completions", door.chat_completions),
        (Admits.CALLERS, "GET", "/v1/models", door.models),
        (Admits.CALLERS, "GET", "/v1/models/{name:path}", door.model),
        (Admits.CALLERS, "POST", "/tokenize", door.tokenize),
        (Admits.CALLERS, "POST", "/detokenize", door.detokenize),
        (Admits.ANYBODY, "GET", "/health", door.health),
        (Admits.ANYBODY, "GET", "/ready", door.ready),
        (Admits.OPERATORS, "GET", "/metrics", door.metrics),
    ):
        app.router.add_api_route(
            path, endpoint, methods=[method], route_class_override=guard.routes_for(whom)
        )
    check_guarded(app)
    handlers: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
        404: _no_such_route,
        405: _wrong_method,
        KVFerryError: _failed,
        Exception: _failed,
    }
    for kind, handler in handlers.items():
        app.exception_handler(kind)(handler)
    return app


async def _no_such_route(request: Request, error: Exception) -> Response:
    return failure_response(NoSuchRoute(f"nothing is served at {request.url.path}"))


async def _wrong_method(request: Request, error: Exception) -> Response:
    path = request.url.path
    return failure_response(MethodNotAllowed(f"{path} is not served by {request.method}"))


async def _failed(request: Request, error: Exception) -> Response:
    return failure_response(error)


def _json(body: Json) -> Response:
    return Response(json_bytes(body), media_type=JSON_TYPE)
