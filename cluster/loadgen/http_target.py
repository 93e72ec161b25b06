"""The target over HTTP: any OpenAI-compatible server, completions or chat completions, streamed."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, Self
from urllib.parse import urlsplit

from aiohttp import (
    ClientConnectorError,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    ConnectionTimeoutError,
    TCPConnector,
)

from kvferry.cluster.client_security import PLAIN, ClientSecurity, check_way
from kvferry.cluster.errors import ClusterUnreachable, NotReady, StreamError
from kvferry.cluster.loadgen.errors import BadLoad
from kvferry.cluster.loadgen.measures import Receipt
from kvferry.cluster.loadgen.sse_answer import AnswerReader, error_of
from kvferry.cluster.loadgen.targets import About, Clock, Request
from kvferry.kv_cache.errors import KVFerryError
from kvferry.protos import kvferry_pb2 as pb

COMPLETIONS, CHAT_COMPLETIONS = "/v1/completions", "/v1/chat/completions"
CONNECT_TIMEOUT_S = 10.0
REMEDY = "give a url with https, or no key"


class HttpTarget:
    """One pool of connections to the server at ``url``; made inside a running loop.

    ``body`` are fields that every request has beside its own; null takes one away. ``key`` goes
    into the Authorization header, if there is one; of ``security`` only TLS is looked at. A request
    fails if nothing comes for ``read_timeout_s``; None: it waits. Raises BadLoad and
    TokenInTheClear.
    """

    def __init__(
        self,
        url: str,
        model: str = "",
        body: Mapping[str, Any] | None = None,
        key: str | None = None,
        clock: Clock = time.monotonic,
        read_timeout_s: float | None = None,
        security: ClientSecurity = PLAIN,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise BadLoad(f"url: got {url!r}, wanted http://HOST:PORT or https://HOST")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._body = dict(body or {})
        self._clock = clock
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if key is not None:
            _check_way(url)
            headers["Authorization"] = f"Bearer {key}"
        self._session = ClientSession(
            connector=TCPConnector(limit=0, ssl=security.ssl_context() or True),
            timeout=ClientTimeout(
                total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=read_timeout_s
            ),
            headers=headers,
            auto_decompress=False,
        )

    async def about(self) -> About:
        """From the list of models. Raises NotReady if there is none to ask for."""
        models = await self._get("/v1/models")
        listed = [m for m in (models or {}).get("data") or () if isinstance(m, dict)]
        if not self._model:
            if not listed:
                raise NotReady(f"{self._url}/v1/models lists no model: name one (model)")
            self._model = str(listed[0]["id"])
        mine: Mapping[str, Any] = next((m for m in listed if m.get("id") == self._model), {})
        version = await self._get("/version")
        return About(
            kind="openai",
            address=self._url,
            model=self._model,
            server_version=str(version["version"]) if version and "version" in version else None,
            max_model_len=mine.get("max_model_len"),
        )

    async def _get(self, path: str) -> dict[str, Any] | None:
        """An object; None where the server has none there."""
        try:
            async with self._session.get(self._url + path) as response:
                if response.status in (401, 403):
                    raise await _refusal(response)
                found = _json(await response.read()) if response.status == 200 else None
        except (ClientError, OSError) as error:
            raise self._typed(error) from error
        return found if isinstance(found, dict) else None

    async def send(self, request: Request, receipt: Receipt) -> None:
        """See ``Target.send``."""
        path, content = request_body(request, self._model, self._body)
        clock, reader = self._clock, AnswerReader(receipt)
        receipt.sent_at = clock()
        try:
            async with self._session.post(self._url + path, data=content) as response:
                if response.status != 200:
                    raise await _refusal(response)
                async for piece in response.content.iter_any():
                    reader.feed(piece, clock())
        except (ClientError, OSError) as error:
            raise self._typed(error) from error
        reader.end()

    def _typed(self, error: Exception) -> KVFerryError:
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        if isinstance(error, ClientConnectorError | ConnectionTimeoutError):
            return ClusterUnreachable(f"nothing answers at {self._url} ({said})")
        return StreamError(said)

    async def status(self) -> pb.StatusResponse | None:
        """None: such a server does not tell."""
        return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._session.close()


def request_body(request: Request, model: str, more: Mapping[str, Any]) -> tuple[str, bytes]:
    """Path and body of a request; ``more`` is laid over it, and what is null there is left out."""
    prompt = request.prompt
    fields: dict[str, Any] = {
        "model": model,
        "max_tokens": request.output_tokens,
        "temperature": request.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if request.ignore_eos:
        fields["ignore_eos"] = True
    if prompt.messages is not None:
        path = CHAT_COMPLETIONS
        fields["messages"] = list(prompt.messages)
        if prompt.tools:
            fields["tools"] = list(prompt.tools)
    else:
        path = COMPLETIONS
        fields["prompt"] = prompt.text if prompt.token_ids is None else list(prompt.token_ids)
    fields |= more
    given = {name: value for name, value in fields.items() if value is not None}
    return path, json.dumps(given, separators=(",", ":")).encode()


def _check_way(url: str) -> None:
    """Raise TokenInTheClear if a key would be sent to another machine without TLS."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 80
    except ValueError as error:
        raise BadLoad(f"url: got {url!r}: {error}") from error
    if parts.scheme != "https":
        check_way(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", REMEDY)


async def _refusal(response: ClientResponse) -> KVFerryError:
    """What a status other than 200 means."""
    body = _json(await response.read())
    return error_of(body, response.status, response.headers.get("Retry-After"))


def _json(content: bytes) -> Any:
    """The value, or the text of what is none."""
    try:
        return json.loads(content)
    except ValueError:
        return content[:500].decode(errors="replace")
