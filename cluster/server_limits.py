"""What the doors allow a client, and strangers: message size, silence, slowness, how many."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits; times in seconds.

    Attributes:
        max_message_bytes: the largest message that is received.
        keepalive_s: a connection idle for so long is pinged.
        keepalive_timeout_s: one that does not answer the ping for so long is dropped, and with it
            the requests of its client.
        slow_client_limit_s: how long a client may take nothing of a stream before it is cancelled.
        min_client_ping_s: clients may ping as often as this, with or without a running call.
        max_connections: of each of the gRPC and the HTTP door at a time; see ``connections_for``.
        max_streams: calls at a time over one gRPC connection, which may be everybody's.
        max_open_streams: calls at a time that need no token and may last: health's, reflection's.
        handshake_limit_s: for the handshake of a new connection, TLS or HTTP/2.
        header_limit_s: for the whole header of an HTTP request, from the connection or, after
            another request, from the first byte.
        idle_limit_s: a gRPC connection without a call for so long is ended.
        max_scrapes: connections to the metrics port at a time.
        scrape_limit_s: for a scrape, from the connection to the end of the answer.
    """

    max_message_bytes: int = 4 << 20
    keepalive_s: float = 30.0
    keepalive_timeout_s: float = 10.0
    slow_client_limit_s: float = 30.0
    min_client_ping_s: float = 5.0
    max_connections: int = 4096
    max_streams: int = 4096
    max_open_streams: int = 256
    handshake_limit_s: float = 10.0
    header_limit_s: float = 10.0
    idle_limit_s: float = 600.0
    max_scrapes: int = 32
    scrape_limit_s: float = 30.0

    def channel_options(self) -> list[tuple[str, int]]:
        """The limits as gRPC takes them; two servers never share a port.

        Without the last three gRPC hangs up on a client that pings more than once in five minutes
        while its request waits, and stops to ping itself after two pings without data.
        """
        return [
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.max_concurrent_streams", self.max_streams),
            ("grpc.server_handshake_timeout_ms", _milliseconds(self.handshake_limit_s)),
            ("grpc.max_connection_idle_ms", _milliseconds(self.idle_limit_s)),
            ("grpc.keepalive_time_ms", _milliseconds(self.keepalive_s)),
            ("grpc.keepalive_timeout_ms", _milliseconds(self.keepalive_timeout_s)),
            ("grpc.http2.ping_timeout_ms", _milliseconds(self.keepalive_timeout_s)),
            ("grpc.http2.min_ping_interval_without_data_ms", _milliseconds(self.min_client_ping_s)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]


def connections_for(queue_limit: int) -> int:
    """More than the requests that a router lets wait, and run, so that they are what is refused."""
    return 2 * queue_limit + 2048


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
