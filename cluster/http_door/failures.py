"""Errors in OpenAI's shape, with the status of the one table.

``{"error": {"message", "type", "param", "code"}}``; the class goes in the header ``kvferry-error``
as it goes in gRPC's metadata. Errors of HTTP itself, which the table does not have, stand here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvferry.cluster.errors import (
    ERROR_KEY,
    REQUEST_ID_KEY,
    RETRY_AFTER_KEY,
    Internal,
    InvalidRequest,
    KVFerryError,
    Overloaded,
    PromptTooLong,
    UnknownModel,
    public_class,
    status_of,
)
from kvferry.kv_cache.errors import one_line

Json = dict[str, Any]

OPENAI_REQUEST_ID_KEY = "x-request-id"
"""The header in which OpenAI's client looks for what is REQUEST_ID_KEY in gRPC's metadata."""

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
# What OpenAI calls these; the others have the name of their class.
_CODES: Mapping[type[KVFerryError], str] = {
    PromptTooLong: "context_length_exceeded",
    UnknownModel: "model_not_found",
    Overloaded: "rate_limit_exceeded",
}
_FIELD = re.compile(r"([a-z_]\w*(?:\.\w+|\[\w+\])*): ")


class BadHttp(KVFerryError):
    """Refused before it is a request of the contract; each class has a status of its own."""

    http_status: ClassVar[int]


class NoSuchRoute(BadHttp):
    """Nothing is served at this path; names it."""

    http_status = 404


class MethodNotAllowed(BadHttp):
    """The path is served, but not by this method; names both."""

    http_status = 405


class BodyTooSlow(BadHttp):
    """The body did not come in time; names the limit."""

    http_status = 408


class BodyTooLarge(BadHttp):
    """The body is longer than is received; names the limit."""

    http_status = 413


class NotJson(BadHttp):
    """The content type is not JSON's; names what came."""

    http_status = 415


def contract_error(error: Exception) -> Exception:
    """What counts it: one of HTTP alone is to the contract a request that is none."""
    return InvalidRequest(str(error)) if isinstance(error, BadHttp) else error


@dataclass(frozen=True, slots=True)
class Failure:
    """How an error is told: status, body, headers."""

    status: int
    body: Json
    headers: Mapping[str, str]


def failure(error: BaseException, request_id: str = "") -> Failure:
    """How ``error`` is told; one that is not ours is Internal and names itself."""
    cls = type(error) if isinstance(error, BadHttp) else public_class(error)
    status = error.http_status if isinstance(error, BadHttp) else status_of(error).http
    message = str(error)
    if not isinstance(error, KVFerryError):
        message = one_line(f"{type(error).__name__}: {error}")
    body = {
        "error": {
            "message": message,
            "type": _TYPES.get(
                status, "server_error" if status >= 499 else "invalid_request_error"
            ),
            "param": _param(cls, message),
            "code": _CODES.get(cls, _snake_case(cls.__name__)),
        }
    }
    headers = {ERROR_KEY: cls.__name__}
    if request_id:
        headers[REQUEST_ID_KEY] = request_id
        headers[OPENAI_REQUEST_ID_KEY] = request_id
    if isinstance(error, Overloaded) and error.retry_after_s is not None:
        headers["retry-after"] = str(max(0, math.ceil(error.retry_after_s)))
        headers[RETRY_AFTER_KEY] = str(max(0, round(error.retry_after_s * 1000)))
    return Failure(status, body, headers)


def is_ours(error: BaseException) -> bool:
    """Whether a fault of the server has caused it, which is to be logged."""
    return public_class(error) is Internal and not isinstance(error, BadHttp)


def encoded(body: Json) -> bytes:
    """A JSON text; ASCII, so that whatever an error quotes can be sent."""
    return json.dumps(body).encode("ascii")


def _param(cls: type[KVFerryError], message: str) -> str | None:
    """The field that the message begins with."""
    if cls is UnknownModel:
        return "model"
    found = _FIELD.match(message) if issubclass(cls, InvalidRequest) else None
    return found[1] if found is not None else None


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
