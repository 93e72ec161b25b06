"""Every error has one status, and survives the way over gRPC."""

from __future__ import annotations

import subprocess
import sys
from typing import Any
from urllib.parse import quote

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster import errors
from kvferry.cluster.errors import (
    STATUS,
    Cancelled,
    ClusterUnreachable,
    DeadlineExceeded,
    Internal,
    KVFerryError,
    Overloaded,
    Status,
    StreamError,
    WorkerLost,
    from_grpc,
    status_of,
    to_grpc,
)
from kvferry.engine.request import InvalidRequest
from kvferry.kv_transfer.connector import IncompatiblePeer, TransferFailed


class FailedCall(grpc.RpcError):
    """A failed call as grpc reports it."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: Any = ()) -> None:
        self._parts = (code, details, metadata)

    def code(self) -> grpc.StatusCode:
        return self._parts[0]

    def details(self) -> str:
        return self._parts[1]

    def trailing_metadata(self) -> Any:
        return self._parts[2]


def over_the_wire(exc: BaseException, request_id: str = "") -> KVFerryError:
    failure = to_grpc(exc, request_id)
    return from_grpc(FailedCall(failure.code, failure.details, failure.trailing_metadata))


def test_table_is_the_published_one() -> None:
    published = {
        "InvalidRequest": Status("INVALID_ARGUMENT", 400),
        "PromptTooLong": Status("INVALID_ARGUMENT", 400),
        "UnknownModel": Status("NOT_FOUND", 404),
        "UnknownRequest": Status("NOT_FOUND", 404),
        "Unauthenticated": Status("UNAUTHENTICATED", 401),
        "PermissionDenied": Status("PERMISSION_DENIED", 403),
        "Overloaded": Status("RESOURCE_EXHAUSTED", 429),
        "NotReady": Status("UNAVAILABLE", 503),
        "WorkerLost": Status("UNAVAILABLE", 503),
        "RequestPoisoned": Status("ABORTED", 500),
        "Cancelled": Status("CANCELLED", 499),
        "DeadlineExceeded": Status("DEADLINE_EXCEEDED", 504),
        "TransferFailed": Status("INTERNAL", 500),
        "Internal": Status("INTERNAL", 500),
    }
    assert {cls.__name__: status for cls, status in STATUS.items()} == published


@pytest.mark.parametrize("cls", STATUS)
def test_every_class_survives_the_wire(cls: type[KVFerryError]) -> None:
    back = over_the_wire(cls("got 3, wanted 2"))
    assert type(back) is cls
    assert str(back) == "got 3, wanted 2"


@given(st.none() | st.floats(0, 1e6))
def test_overloaded_carries_its_retry_delay_to_the_millisecond(delay: float | None) -> None:
    back = over_the_wire(Overloaded("queue full", retry_after_s=delay))
    assert isinstance(back, Overloaded)
    if delay is None:
        assert back.retry_after_s is None
    else:
        assert back.retry_after_s == pytest.approx(delay, abs=0.0006)


def test_subclasses_take_the_row_of_the_nearest_ancestor() -> None:
    assert status_of(IncompatiblePeer("x")) == STATUS[TransferFailed]
    assert type(over_the_wire(IncompatiblePeer("x"))) is TransferFailed
    assert status_of(StreamError("x")) == STATUS[Internal]
    assert status_of(ClusterUnreachable("x")).grpc == "UNAVAILABLE"


def test_errors_that_are_not_ours_become_internal_and_keep_their_name() -> None:
    back = over_the_wire(ZeroDivisionError("division by zero"))
    assert type(back) is Internal
    assert str(back) == "ZeroDivisionError: division by zero"


def test_request_id_goes_into_the_metadata() -> None:
    metadata = dict(to_grpc(WorkerLost("gone"), "abc").trailing_metadata)
    assert metadata == {"kvferry-error": "WorkerLost", "kvferry-request-id": "abc"}


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.UNAVAILABLE, ClusterUnreachable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, Cancelled),
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.UNIMPLEMENTED, Internal),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Internal),
    ],
)
def test_statuses_without_our_metadata_are_typed_too(
    code: grpc.StatusCode, cls: type[KVFerryError]
) -> None:
    assert type(from_grpc(FailedCall(code, "no more", None))) is cls


def test_unreachable_names_the_endpoint_and_what_to_do() -> None:
    error = from_grpc(FailedCall(grpc.StatusCode.UNAVAILABLE, "refused"), "10.0.0.1:5")
    assert "10.0.0.1:5" in str(error)
    assert "kvferry serve" in str(error)


def test_tree_in_the_docstring_names_every_error_of_the_table() -> None:
    assert errors.__doc__ is not None
    assert all(cls.__name__ in errors.__doc__ for cls in STATUS)


def test_importing_the_client_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys, kvferry.cluster.client, kvferry.cluster.errors\n"
        "print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("unit", ["x", "é", "😀", "\x1b[31m", "a\nb"])
def test_a_message_of_any_length_and_any_characters_crosses_the_wire_as_one_line(unit: str) -> None:
    failure = to_grpc(errors.UnknownModel(f"model {unit * 9000} is not served here"))
    assert len(quote(failure.details)) < 5000, "headers of more than 8 KiB end the stream"
    assert failure.details.isprintable()
    assert failure.details.startswith("model ")
    assert to_grpc(ValueError(unit * 9000)).details.startswith("ValueError: ")
