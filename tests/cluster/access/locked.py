"""Clients of a locked cluster that do everything right, but for what a test changes."""

from __future__ import annotations

import ssl
from collections import Counter
from dataclasses import dataclass

import httpx2

from kvferry.cluster.client import Client
from kvferry.cluster.client_security import ClientSecurity
from kvferry.cluster.metrics import catalog
from tests.certificates import Authority, Pair
from tests.stack import LONG_S, Stack

OPERATOR, ACME, ZETA, SLOW, QUICK, THRIFTY, BROAD, HASTY = (
    f"{name}-token-0123456789"
    for name in ("op", "acme", "zeta", "slow", "quick", "thrifty", "broad", "hasty")
)


@dataclass
class Locked:
    """See ``conftest``. ``pair`` is a client's good certificate."""

    stack: Stack
    ours: Authority
    theirs: Authority
    pair: Pair

    def client(
        self, token: str | None, *, ca: str | None = None, pair: Pair | None = None
    ) -> Client:
        """Over gRPC."""
        shown = pair or self.pair
        security = ClientSecurity(ca or self.ours.ca, shown.cert, shown.key, token)
        return Client(self.stack.endpoint, timeout_s=LONG_S, security=security)

    def context(self, *, ca: str | None = None, pair: Pair | None = None) -> ssl.SSLContext:
        """TLS as a client speaks it."""
        shown = pair or self.pair
        made = ssl.create_default_context(cafile=ca or self.ours.ca)
        made.load_cert_chain(shown.cert, shown.key)
        return made

    def http(self, token: str | None) -> httpx2.Client:
        """Over HTTPS, to the door."""
        return self._https(self.stack.url.removeprefix("http://"), token)

    def scraper(self, token: str | None) -> httpx2.Client:
        """Over HTTPS, to the metrics port."""
        assert self.stack.metrics_server is not None
        return self._https(self.stack.metrics_server.endpoint, token)

    def _https(self, address: str, token: str | None) -> httpx2.Client:
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        return httpx2.Client(
            base_url=f"https://{address}", verify=self.context(), headers=headers, timeout=LONG_S
        )

    def address(self, port: str) -> tuple[str, int]:
        """Where a port listens."""
        assert self.stack.metrics_server is not None
        at = {
            "grpc": self.stack.endpoint,
            "http": self.stack.url.removeprefix("http://"),
            "metrics": self.stack.metrics_server.endpoint,
        }[port]
        host, _, number = at.rpartition(":")
        return host, int(number)

    def rejected(self) -> Counter[str]:
        """Refused calls so far, by the error's class."""
        counts = self.stack.on_loop(self.stack.router.recorder.counts.copy)
        return Counter(
            {labels[0]: n for (metric, labels), n in counts.items() if metric is catalog.REJECTED}
        )

    def refused(self, port: str) -> Counter[str]:
        """Refused connections so far, by the reason."""
        counts = self.stack.on_loop(self.stack.router.recorder.counts.copy)
        return Counter(
            {
                labels[1]: n
                for (metric, labels), n in counts.items()
                if metric is catalog.CONNECTIONS_REFUSED and labels[0] == port
            }
        )
