"""The tree of errors, and the one table that maps it to gRPC and HTTP statuses.

Each class stands beside its cause; those that only the front door or a client can raise stand
here::

    KVFerryError                        kv_cache.errors
    ├── InvalidRequest                  engine.request
    │   ├── PromptTooLong
    │   └── ChatTemplateError           engine.chat_helper
    ├── HelperUnavailable               engine.chat_helper
    ├── TransferFailed                  kv_transfer.connector
    │   └── IncompatiblePeer
    ├── UnknownModel
    ├── UnknownRequest
    ├── Unauthenticated
    ├── PermissionDenied
    ├── Overloaded                      carries retry_after_s
    ├── NotReady
    │   ├── ClusterUnreachable          raised by clients
    │   └── NotPlaced                   start-up, growing
    ├── WorkerLost
    ├── RequestPoisoned
    ├── Cancelled
    ├── DeadlineExceeded
    ├── PortUnavailable                 start-up
    ├── Internal
    │   └── StreamError                 raised by clients
    ├── ConfigError                     cluster.config
    ├── UnusableSecret                  cluster.access.secret_files
    ├── TokenInTheClear                 cluster.client_security
    ├── BadLoad                         cluster.loadgen.errors
    ├── DeviceUnavailable               engine.device.choice
    ├── PinningFailed                   engine.device.cuda
    ├── KernelsUnavailable              engine.kernel_choice
    ├── HostTierTooSmall                worker.build
    ├── HostTierUnsupported             worker.build
    ├── HostMemoryUnavailable           worker.host_memory
    ├── DiskUnavailable                 worker.disk_folder
    └── ModelError                      engine.models.errors
        ├── UnsupportedModel
        ├── DamagedModel
        └── ModelMissing                engine.weights.files
            └── HubUnavailable          engine.weights.hub_download

What crosses the wire is the status and three entries of trailing metadata: ``kvferry-error`` (the
class name), ``kvferry-request-id`` and, for ``Overloaded``, ``retry-after-ms``. Knows neither
torch nor ray. An error with an ``exit_code`` ends a command with it; the others end it with 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import grpc

from kvferry.engine.request import InvalidRequest, PromptTooLong
from kvferry.kv_cache.errors import KVFerryError, one_line
from kvferry.kv_transfer.connector import TransferFailed

__all__ = [
    "ERROR_KEY",
    "REQUEST_ID_KEY",
    "RETRY_AFTER_KEY",
    "STATUS",
    "Cancelled",
    "ClusterUnreachable",
    "DeadlineExceeded",
    "GrpcFailure",
    "Internal",
    "InvalidRequest",
    "KVFerryError",
    "NotPlaced",
    "NotReady",
    "Overloaded",
    "PermissionDenied",
    "PortUnavailable",
    "PromptTooLong",
    "RequestPoisoned",
    "Status",
    "StreamError",
    "TransferFailed",
    "Unauthenticated",
    "UnknownModel",
    "UnknownRequest",
    "WorkerLost",
    "from_grpc",
    "public_class",
    "status_of",
    "to_grpc",
    "trailing_metadata",
]

ERROR_KEY = "kvferry-error"
REQUEST_ID_KEY = "kvferry-request-id"
RETRY_AFTER_KEY = "retry-after-ms"


class UnknownModel(KVFerryError):
    """The request names a model that this cluster does not serve; names both."""


class UnknownRequest(KVFerryError):
    """No request, or no worker, has this id."""


class Unauthenticated(KVFerryError):
    """The call carries no valid credentials."""


class PermissionDenied(KVFerryError):
    """The credentials do not allow this call."""


class Overloaded(KVFerryError):
    """The request was refused early because it could not be served in time.

    ``retry_after_s`` says when a retry has a chance, in seconds; None where that is not known.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotReady(KVFerryError):
    """A part that the request needs is not there yet, or not any more; a retry may find it."""


class ClusterUnreachable(NotReady):
    """Nothing answers at the endpoint."""

    exit_code = 4


class NotPlaced(NotReady):
    """Ray has no room for a worker, or none in time; names what it wanted and what there is."""


class WorkerLost(KVFerryError):
    """The workers that served the request died and no successor came in time."""


class RequestPoisoned(KVFerryError):
    """Every attempt at the request killed or broke its worker; it is not tried again."""


class Cancelled(KVFerryError):
    """The request was cancelled."""


class DeadlineExceeded(KVFerryError):
    """The caller's deadline passed."""


class PortUnavailable(KVFerryError):
    """The address to listen on is taken or not ours; names it."""

    exit_code = 3


class Internal(KVFerryError):
    """A fault of KVFerry itself."""


class StreamError(Internal):
    """A stream broke the contract: an index twice or left out, or no terminal event."""


@dataclass(frozen=True, slots=True)
class Status:
    """What callers see of an error: gRPC status name and HTTP status code."""

    grpc: str
    http: int


STATUS: dict[type[KVFerryError], Status] = {
    InvalidRequest: Status("INVALID_ARGUMENT", 400),
    PromptTooLong: Status("INVALID_ARGUMENT", 400),
    UnknownModel: Status("NOT_FOUND", 404),
    UnknownRequest: Status("NOT_FOUND", 404),
    Unauthenticated: Status("UNAUTHENTICATED", 401),
    PermissionDenied: Status("PERMISSION_DENIED", 403),
    Overloaded: Status("RESOURCE_EXHAUSTED", 429),
    NotReady: Status("UNAVAILABLE", 503),
    WorkerLost: Status("UNAVAILABLE", 503),
    RequestPoisoned: Status("ABORTED", 500),
    Cancelled: Status("CANCELLED", 499),
    DeadlineExceeded: Status("DEADLINE_EXCEEDED", 504),
    TransferFailed: Status("INTERNAL", 500),
    Internal: Status("INTERNAL", 500),
}

_BY_NAME = {cls.__name__: cls for cls in STATUS}

# For statuses without our metadata: set by gRPC itself, or by something between us.
_BY_STATUS: dict[str, type[KVFerryError]] = {
    "UNAVAILABLE": ClusterUnreachable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
    "UNAUTHENTICATED": Unauthenticated,
    "PERMISSION_DENIED": PermissionDenied,
    "INVALID_ARGUMENT": InvalidRequest,
}
_MAX_DETAILS_BYTES = 4096  # gRPC closes a stream whose headers exceed 8 KiB
_TOO_LARGE = "message larger than max"  # gRPC's own words, with both sizes


def public_class(exc: BaseException) -> type[KVFerryError]:
    """The nearest ancestor of ``exc`` in the table; ``Internal`` for whatever has none."""
    return next((cls for cls in type(exc).__mro__ if cls in STATUS), Internal)


def status_of(exc: BaseException) -> Status:
    """The row of the table that holds for ``exc``."""
    return STATUS[public_class(exc)]


@dataclass(frozen=True, slots=True)
class GrpcFailure:
    """The three arguments of ``ServicerContext.abort``."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str], ...]


def to_grpc(exc: BaseException, request_id: str = "") -> GrpcFailure:
    """How a server reports ``exc``; errors that are not ours become ``Internal``."""
    cls = public_class(exc)
    metadata = [(ERROR_KEY, cls.__name__)]
    if request_id:
        metadata.append((REQUEST_ID_KEY, request_id))
    if isinstance(exc, Overloaded) and exc.retry_after_s is not None:
        metadata.append((RETRY_AFTER_KEY, str(max(0, round(exc.retry_after_s * 1000)))))
    ours = isinstance(exc, KVFerryError)
    details = str(exc) if ours else one_line(f"{type(exc).__name__}: {exc}")
    return GrpcFailure(grpc.StatusCode[STATUS[cls].grpc], _fitting(details), tuple(metadata))


def _fitting(details: str) -> str:
    """As much of a message as headers take, where what is not ASCII grows threefold."""
    size = 0
    for place, character in enumerate(details):
        size += 1 if character.isascii() else 3 * len(character.encode("utf-8", "replace"))
        if size > _MAX_DETAILS_BYTES:
            return f"{details[:place]}..."
    return details


def trailing_metadata(error: grpc.RpcError) -> dict[str, str]:
    """The text entries of a failed call's trailing metadata."""
    # Both kinds of channel give pairs; the stubs describe neither as such.
    entries = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    return {key: value for key, value in entries if isinstance(value, str)}


def from_grpc(error: grpc.RpcError, endpoint: str = "the endpoint") -> KVFerryError:
    """The typed error that a client of ``endpoint`` raises: the inverse of ``to_grpc``."""
    metadata = trailing_metadata(error)
    status = error.code().name
    details = error.details() or status
    cls = _BY_NAME.get(metadata.get(ERROR_KEY, "")) or _BY_STATUS.get(status)
    if cls is None:
        if _TOO_LARGE in details:
            return InvalidRequest(f"{details}: shorten the request")
        return Internal(f"{status}: {details}")
    if cls is ClusterUnreachable:
        hint = " Does it want TLS (--tls-ca)?" if "Socket closed" in details else ""
        return cls(
            f"no cluster answers at {endpoint} ({details}); is 'kvferry serve' running?{hint}"
        )
    if issubclass(cls, Overloaded):
        milliseconds = metadata.get(RETRY_AFTER_KEY, "")
        return cls(details, int(milliseconds) / 1000 if milliseconds.isdigit() else None)
    return cls(details)
