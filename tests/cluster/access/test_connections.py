"""TLS at all three doors: plaintext, wrong and old certificates, garbage; refused and counted.

gRPC's own core makes its handshakes, and tells neither why one failed nor that it did: there the
refusal shows at the client only.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import serialization

from kvferry.cluster.access.secret_files import UnusableSecret
from kvferry.cluster.access.tls import ServerTls, TlsFiles
from kvferry.cluster.client import Client
from kvferry.cluster.errors import ClusterUnreachable
from tests.certificates import Authority
from tests.cluster.access.locked import OPERATOR, Locked
from tests.stack import LONG_S, Stack, eventually

PORTS = ("grpc", "http", "metrics")
TOLD = ("http", "metrics")
UNUSED: Any = (None, None, None)


def wait_refused(locked: Locked, port: str, wanted: Counter[str]) -> None:
    eventually("it is counted", lambda: locked.refused(port) == wanted, LONG_S)


def hand_shake(locked: Locked, port: str, context: ssl.SSLContext) -> bytes:
    """Speak TLS, then HTTP, and read on to the end. Raises OSError."""
    connection = socket.create_connection(locked.address(port), timeout=LONG_S)
    with connection, context.wrap_socket(connection, server_hostname="127.0.0.1") as secure:
        secure.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        said = b""
        while part := secure.recv(4096):
            said += part
        return said


def plaintext(locked: Locked, port: str) -> bytes:
    """Speak HTTP without TLS."""
    with socket.create_connection(locked.address(port), timeout=LONG_S) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        return read_to_end(connection)


def garbage(locked: Locked, port: str) -> bytes:
    """Bytes that are nothing."""
    with socket.create_connection(locked.address(port), timeout=LONG_S) as connection:
        connection.sendall(bytes(range(256)) * 4)
        return read_to_end(connection)


def read_to_end(connection: socket.socket) -> bytes:
    said = b""
    try:
        while part := connection.recv(4096):
            said += part
    except ConnectionError:
        pass
    return said


def wrong_authority(locked: Locked, port: str) -> bytes:
    """The client trusts another authority than the server's."""
    return hand_shake(locked, port, locked.context(ca=locked.theirs.ca))


def no_certificate(locked: Locked, port: str) -> bytes:
    """The client shows none."""
    return hand_shake(locked, port, ssl.create_default_context(cafile=locked.ours.ca))


def another_s_certificate(locked: Locked, port: str) -> bytes:
    """The client shows one that another authority has signed."""
    return hand_shake(locked, port, locked.context(pair=locked.theirs.pair("client")))


def expired_certificate(locked: Locked, port: str) -> bytes:
    """The client shows one that was good yesterday."""
    return hand_shake(locked, port, locked.context(pair=locked.ours.pair("client", expired=True)))


Attempt = Callable[[Locked, str], bytes]
ATTEMPTS: tuple[Attempt, ...] = (
    plaintext,
    garbage,
    wrong_authority,
    no_certificate,
    another_s_certificate,
    expired_certificate,
)


@pytest.mark.parametrize("attempt", ATTEMPTS)
@pytest.mark.parametrize("port", PORTS)
def test_a_connection_that_is_not_right_is_refused_and_the_next_is_served(
    locked: Locked, port: str, attempt: Attempt, caplog: pytest.LogCaptureFixture
) -> None:
    before = locked.refused(port)
    with caplog.at_level(logging.WARNING, "kvferry"):
        try:
            said = attempt(locked, port)
        except OSError:
            said = b""
        assert b"200" not in said and b"kvferry" not in said
        if port in TOLD:
            wanted = before + Counter({"tls": 1})
            wait_refused(locked, port, wanted)
            assert any(
                f"refused a connection to the {port} port (tls) from 127.0.0.1:"
                in record.getMessage()
                for record in caplog.records
            )
    assert_serves(locked, port)


def assert_serves(locked: Locked, port: str) -> None:
    if port == "grpc":
        with locked.client(OPERATOR) as client:
            assert client.status().ready
        return
    opened = locked.http(OPERATOR) if port == "http" else locked.scraper(OPERATOR)
    with opened as http:
        assert http.get("/metrics").status_code == 200


def test_grpc_s_own_clients_are_refused_likewise(locked: Locked) -> None:
    wrong = [
        locked.client(OPERATOR, ca=locked.theirs.ca),
        locked.client(OPERATOR, pair=locked.theirs.pair("client")),
        locked.client(OPERATOR, pair=locked.ours.pair("client", expired=True)),
        Client(locked.stack.endpoint, timeout_s=LONG_S),
    ]
    for client in wrong:
        with client, pytest.raises(ClusterUnreachable):
            client.status()


def test_a_slow_handshake_holds_up_nobody(locked: Locked) -> None:
    """Somebody who connects and says nothing has a connection, not the server."""
    silent = [socket.create_connection(locked.address(port)) for port in PORTS for _ in range(3)]
    try:
        for port in PORTS:
            assert_serves(locked, port)
    finally:
        for each in silent:
            each.close()


def test_garbage_at_plaintext_doors_is_refused_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Stack(tmp_path, http=True, metrics=True) as stack:
        open_ = Locked(stack, *UNUSED)
        for port in PORTS:
            with caplog.at_level(logging.WARNING, "kvferry"):
                said = garbage(open_, port)
            assert b"200" not in said
            if port in TOLD:
                wait_refused(open_, port, Counter({"malformed": 1}))
        with Client(stack.endpoint) as client:
            assert client.status().ready
    assert len([r for r in caplog.records if "(malformed)" in r.getMessage()]) == len(TOLD)


# --- certificates that cannot be used -----------------------------------------------------------


def test_files_that_do_not_fit_are_refused_at_start(
    authorities: tuple[Authority, Authority],
) -> None:
    ours, theirs = authorities
    one, other = ours.pair("127.0.0.1"), ours.pair("127.0.0.1")
    for files, problem in (
        (TlsFiles(one.cert, other.key), "no certificate and its key"),
        (TlsFiles(one.key, one.key), "no certificate and its key"),
        (TlsFiles(one.cert, one.key, one.key), r"server\.tls\.client_ca"),
        (TlsFiles(one.cert, one.key + "x"), r"server\.tls\.key: cannot read"),
    ):
        with pytest.raises(UnusableSecret, match=problem):
            ServerTls(files)
    assert not ServerTls(TlsFiles(one.cert, one.key)).asks_clients
    assert ServerTls(TlsFiles(one.cert, one.key, theirs.ca)).asks_clients


def test_a_key_with_a_password_is_refused_and_nobody_is_asked(
    authorities: tuple[Authority, Authority],
) -> None:
    pair = authorities[0].pair("127.0.0.1")
    with open(pair.key, "rb+") as file:
        key = serialization.load_pem_private_key(file.read(), None)
        encrypted = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
        file.seek(0)
        file.write(encrypted)
        file.truncate()
    with pytest.raises(UnusableSecret, match="password"):
        ServerTls(TlsFiles(pair.cert, pair.key))


def test_both_libraries_get_the_pair_that_was_checked(
    authorities: tuple[Authority, Authority], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happens to the files afterwards: they are read once."""
    pair = authorities[0].pair("127.0.0.1")
    wanted = (Path(pair.key).read_bytes(), Path(pair.cert).read_bytes())
    tls = ServerTls(TlsFiles(pair.cert, pair.key))
    Path(pair.key).unlink()
    Path(pair.cert).write_bytes(b"another")
    given: list[list[tuple[bytes, bytes]]] = []
    monkeypatch.setattr(
        grpc, "ssl_server_credentials", lambda pairs, *rest, **more: given.append(pairs)
    )
    tls.grpc_credentials()
    assert given == [[wanted]]

    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = tls.context().wrap_bio(to_server, to_client, server_side=True)
    client = ssl.create_default_context(cafile=authorities[0].ca).wrap_bio(
        to_client, to_server, server_hostname="127.0.0.1"
    )
    for side in (client, server, client):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    assert client.getpeercert(True) == ssl.PEM_cert_to_DER_cert(wanted[1].decode())


def test_an_authority_of_the_system_is_not_trusted_for_clients(locked: Locked) -> None:
    """Only the configured one is: what a browser trusts says nothing about who may call."""
    assert locked.stack.node.access.tls is not None
    context = locked.stack.node.access.tls.context()
    assert len(context.get_ca_certs()) == 1
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
