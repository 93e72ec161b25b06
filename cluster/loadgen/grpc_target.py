"""The target over ``kvferry.v1``: every token with its id, and the server's own times."""

from __future__ import annotations

import time
from typing import Self

from kvferry.cluster.client import AsyncClient
from kvferry.cluster.client_security import PLAIN, ClientSecurity
from kvferry.cluster.client_stream import GenerateOptions, build_request
from kvferry.cluster.errors import NotReady
from kvferry.cluster.loadgen.measures import BY_IDS, GAP_PARTS, TTFT_PARTS, Receipt, ServerFacts
from kvferry.cluster.loadgen.targets import About, Clock, Request
from kvferry.protos import kvferry_pb2 as pb


class GrpcTarget:
    """One channel to one endpoint."""

    def __init__(
        self,
        endpoint: str,
        model: str = "",
        clock: Clock = time.monotonic,
        security: ClientSecurity = PLAIN,
    ) -> None:
        self._endpoint = endpoint
        self._model = model
        self._clock = clock
        self._client = AsyncClient(endpoint, clock=clock, security=security)

    async def about(self) -> About:
        """From a status. Raises NotReady, naming what the cluster lacks."""
        status = await self._client.status()
        if not status.ready:
            raise NotReady(f"the cluster is not ready: {', '.join(status.not_ready_reasons)}")
        return About(
            kind="kvferry",
            address=self._endpoint,
            model=self._model or status.model.name,
            server_version=status.version or None,
            vocab_size=status.model.vocab_size,
            max_model_len=status.model.max_model_len,
            status=status,
        )

    async def send(self, request: Request, receipt: Receipt) -> None:
        """See ``Target.send``."""
        message = build_request(request.prompt.text, self._options(request))
        clock, times, ids = self._clock, receipt.token_times, receipt.token_ids
        receipt.counted_by = BY_IDS
        receipt.sent_at = clock()
        async with self._client.stream(message) as stream:
            async for event in stream:
                now = clock()
                if isinstance(event, pb.Delta):
                    ids.extend(event.token_ids)
                    times.extend([now] * len(event.token_ids))
                    receipt.text.append(event.text)
                elif isinstance(event, pb.Accepted):
                    receipt.prompt_tokens = event.prompt_tokens
                else:
                    receipt.ended_at = now
                    _note_end(event, receipt)

    def _options(self, request: Request) -> GenerateOptions:
        prompt = request.prompt
        options: GenerateOptions = {
            "max_tokens": request.output_tokens,
            "temperature": request.temperature,
            "ignore_eos": request.ignore_eos,
            "model": self._model,
            "cache_salt": request.cache_salt,
        }
        if prompt.token_ids is not None:
            options["token_ids"] = prompt.token_ids
        if prompt.messages is not None:
            options["chat"] = prompt.messages
            if prompt.tools:
                options["tools"] = prompt.tools
        return options

    async def status(self) -> pb.StatusResponse | None:
        """See ``Target.status``."""
        return await self._client.status()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._client.close()


def _note_end(event: pb.Finished, receipt: Receipt) -> None:
    usage, timing, transfer = event.usage, event.timing, event.transfer
    receipt.prompt_tokens = usage.prompt_tokens
    receipt.cached_tokens = usage.cached_tokens
    receipt.completion_tokens = usage.completion_tokens
    receipt.finish_reason = event.finish_reason or None
    names = [name for name in (*TTFT_PARTS, *GAP_PARTS) if name in timing.DESCRIPTOR.fields_by_name]
    receipt.server = ServerFacts(
        parts={name: getattr(timing, name) for name in names if timing.HasField(name)},
        ttft_s=timing.ttft_s if timing.HasField("ttft_s") else None,
        blocks_moved=transfer.blocks_moved,
        bytes_moved=transfer.bytes_moved,
        blocks_reused=transfer.blocks_reused,
        num_preemptions=event.num_preemptions,
        recomputed_prompt_tokens=event.recomputed_prompt_tokens,
        prefill_worker=event.prefill_worker if event.HasField("prefill_worker") else None,
        decode_worker=event.decode_worker if event.HasField("decode_worker") else None,
    )
