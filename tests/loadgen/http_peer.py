"""A small OpenAI-compatible server that answers from scripts: aiohttp's own, in a thread.

``choices`` make the chunks of an answer from its number of tokens; ``usage`` says whether the last
chunk tells it. A script by the prompt's first word may refuse, break off or hold.
"""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any, Self

from aiohttp import web


class HttpPeer:
    """A context manager; ``url`` is where it listens, ``requests`` are the bodies that came.

    Attributes:
        gives_ids: chunks carry token ids where they were asked for.
        gives_usage: the last chunk tells the usage where it was asked for.
        per_chunk: tokens in one chunk.
        finish_reason: why answers end; None: they do not say.
        trouble: prompts (or first messages) that do not end well: a status to refuse with,
            ``break`` after the first chunk, an ``error`` event then, or ``hold``.
    """

    def __init__(
        self, *, gives_ids: bool = True, gives_usage: bool = True, per_chunk: int = 1
    ) -> None:
        self.gives_ids, self.gives_usage, self.per_chunk = gives_ids, gives_usage, per_chunk
        self.trouble: dict[str, int | str] = {}
        self.finish_reason: str | None = "length"
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.keys: list[str | None] = []
        self.holding, self.left = threading.Event(), threading.Event()
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="http-peer")

    async def _models(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("Authorization"))
        return web.json_response({"data": [{"id": "peer", "max_model_len": 64}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append((request.path, body))
        prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        trouble = self.trouble.get(prompt if isinstance(prompt, str) else "")
        if isinstance(trouble, int):
            error = {"error": {"message": "no room", "type": "overloaded", "code": None}}
            return web.json_response(error, status=trouble, headers={"Retry-After": "2"})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self._stream(response, body, trouble, "messages" in body)
        except asyncio.CancelledError:
            self.left.set()
            raise
        return response

    async def _stream(
        self,
        response: web.StreamResponse,
        body: dict[str, Any],
        trouble: str | None,
        is_chat: bool,
    ) -> None:
        async def event(value: object) -> None:
            text = value if isinstance(value, str) else json.dumps(value)
            await response.write(f"data: {text}\n\n".encode())

        if is_chat:
            await event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        count = body["max_tokens"]
        for first in range(0, count, self.per_chunk):
            ids = list(range(first, min(first + self.per_chunk, count)))
            text = "".join(f" w{number}" for number in ids)
            choice: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
            if self.gives_ids and body.get("return_token_ids"):
                choice["token_ids"] = ids
            await event({"choices": [choice]})
            if trouble == "error":
                await event({"error": {"message": "lost", "type": "x", "code": 503}})
            if trouble == "hold":
                self.holding.set()
                await asyncio.Event().wait()
            if trouble is not None:
                return
        if self.finish_reason is not None:
            ending = {"text": "", "delta": {}, "finish_reason": self.finish_reason}
            await event({"choices": [ending]})
        if self.gives_usage and body.get("stream_options", {}).get("include_usage"):
            await event(
                {
                    "choices": [],
                    "usage": {
                        "prompt_tokens": 7,
                        "completion_tokens": count,
                        "prompt_tokens_details": {"cached_tokens": 3},
                    },
                }
            )
        await event("[DONE]")

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        self._started.set()
        await self._stop.wait()
        await runner.cleanup()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(30)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive()
