"""Reading the body of a request: its size, its time, its JSON.

Does not know what it means.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request

from kvferry.cluster.errors import Cancelled
from kvferry.cluster.http_door.failures import BodyTooLarge, BodyTooSlow, NotJson
from kvferry.engine.models.checkpoint import strict_json
from kvferry.engine.request import InvalidRequest

LARGE_BODY_BYTES = 1 << 14  # read on a thread, so that other streams go on meanwhile


async def read_body(request: Request, max_bytes: int, limit_s: float) -> bytes:
    """The whole body. Raises NotJson, BodyTooLarge, BodyTooSlow, Cancelled.

    A web page can make a browser send anything to any address, but JSON only where it may.
    """
    kind = request.headers.get("content-type", "")
    media = kind.partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        raise NotJson(f"content-type: got {kind!r:.80}, wanted application/json")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(declared, max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(limit_s):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise Cancelled("the client left before its request had come")
                body += message.get("body", b"")
                if len(body) > max_bytes:
                    raise _too_large("more", max_bytes)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise BodyTooSlow(
            f"the body did not come within {limit_s:g} s (server.slow_client_limit): send faster"
        ) from None


def _too_large(size: str, max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body has {size} bytes, wanted at most {max_bytes} (server.max_message_bytes): "
        "send less"
    )


def parse_json(body: bytes) -> Any:
    """What a JSON text says. Raises InvalidRequest."""
    try:
        return strict_json(body)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply; send flatter JSON") from None
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
