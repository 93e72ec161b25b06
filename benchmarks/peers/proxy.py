"""A proxy in front of a prefill and a decode server of vLLM. Runs in the peer's environment.

    python -m benchmarks.peers.proxy PORT PREFILL_URL DECODE_URL

``POST /v1/completions`` goes to the prefill server first, then to the decode server, whose answer
is passed on as it comes. ``GET /health`` says that the proxy runs.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

from benchmarks.peers.hand_over import decode_request, prefill_request

PATH = "/v1/completions"


class Proxy:
    """Two servers and one session for both."""

    def __init__(self, prefill_url: str, decode_url: str) -> None:
        self._prefill, self._decode = prefill_url + PATH, decode_url + PATH
        self._session: ClientSession | None = None

    async def session(self, app: web.Application) -> AsyncIterator[None]:
        """Open while the application runs."""
        timeout = ClientTimeout(total=None, sock_read=600)
        async with ClientSession(timeout=timeout, connector=TCPConnector(limit=0)) as session:
            self._session = session
            yield

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """One completion over both servers."""
        assert self._session is not None
        asked = await request.json()
        async with self._session.post(self._prefill, json=prefill_request(asked)) as prefilled:
            if prefilled.status != 200:
                return web.Response(status=prefilled.status, body=await prefilled.read())
            body = decode_request(asked, await prefilled.json())
        async with self._session.post(self._decode, json=body) as decoded:
            response = web.StreamResponse(status=decoded.status)
            response.content_type = decoded.content_type
            await response.prepare(request)
            async for chunk in decoded.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    def application(self) -> web.Application:
        """Its routes."""
        app = web.Application(client_max_size=64 << 20)
        app.cleanup_ctx.append(self.session)
        app.router.add_post(PATH, self.complete)
        app.router.add_get("/health", _healthy)
        return app


async def _healthy(request: web.Request) -> web.Response:
    return web.Response(text="ok")


def main(port: str, prefill_url: str, decode_url: str) -> None:
    """Serve on 127.0.0.1 until SIGTERM."""
    app = Proxy(prefill_url, decode_url).application()
    web.run_app(app, host="127.0.0.1", port=int(port), print=None, access_log=None)


if __name__ == "__main__":
    main(*sys.argv[1:])
