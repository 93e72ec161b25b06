"""What the front door allows a client: message size, silence, slowness."""

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
    """

    max_message_bytes: int = 4 << 20
    keepalive_s: float = 30.0
    keepalive_timeout_s: float = 10.0
    slow_client_limit_s: float = 30.0
    min_client_ping_s: float = 5.0

    def channel_options(self) -> list[tuple[str, int]]:
        """The limits as gRPC takes them; two servers never share a port.

        Without the last three gRPC hangs up on a client that pings more than once in five minutes
        while its request waits, and stops to ping itself after two pings without data.
        """
        return [
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.keepalive_time_ms", _milliseconds(self.keepalive_s)),
            ("grpc.keepalive_timeout_ms", _milliseconds(self.keepalive_timeout_s)),
            ("grpc.http2.ping_timeout_ms", _milliseconds(self.keepalive_timeout_s)),
            ("grpc.http2.min_ping_interval_without_data_ms", _milliseconds(self.min_client_ping_s)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
