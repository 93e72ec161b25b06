"""What the load generator asks of a target; there is one over gRPC and one over HTTP.

A target sends one prompt and notes in a receipt what comes and when. It reads the clock as early
as it can, and knows nothing of plans, sessions or figures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

from kvferry.cluster.loadgen.measures import Receipt
from kvferry.cluster.loadgen.sessions import Prompt
from kvferry.protos import kvferry_pb2 as pb

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Request:
    """One request as targets see it.

    Attributes:
        output_tokens: exactly so many where ``ignore_eos``, else at most.
        cache_salt: of a repeat of texts, so that no repeat finds the KV of another; empty: none.
    """

    prompt: Prompt
    output_tokens: int
    ignore_eos: bool = True
    temperature: float = 0.0
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class About:
    """What is known of a target before the load.

    Attributes:
        kind: ``kvferry`` or ``openai``.
        address: HOST:PORT or URL.
        model: the name by which it is asked for.
        vocab_size, max_model_len: None where the target does not tell.
        status: of a cluster of ours.
    """

    kind: str
    address: str
    model: str
    server_version: str | None = None
    vocab_size: int | None = None
    max_model_len: int | None = None
    status: pb.StatusResponse | None = None


class Target(Protocol):
    """An open connection, for use inside one running loop."""

    async def about(self) -> About:
        """Raises KVFerryError if nothing there can serve."""

    async def send(self, request: Request, receipt: Receipt) -> None:
        """Send, and note everything until the end.

        Raises KVFerryError if the request fails; being cancelled ends the request at the server.
        """

    async def status(self) -> pb.StatusResponse | None:
        """How the cluster is now; None of a target that has no such thing."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...
