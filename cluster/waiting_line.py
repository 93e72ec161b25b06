"""The router's waiting line: requests in order of arrival or priority, placed late. Knows no
tokens.

Nobody overtakes: placement stops at the first request that must wait. One that has been placed
but waits for blocks at a full worker goes where there are some before anybody behind it does.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator

from kvferry.cluster.decisions import Decision
from kvferry.cluster.kv_index import KVIndex, chain_for
from kvferry.cluster.legs import Legs
from kvferry.cluster.metrics.recorder import Recorder
from kvferry.cluster.policy import Placement, Policy
from kvferry.cluster.routed_request import RequestState, RoutedRequest
from kvferry.engine.ranking import rank
from kvferry.worker.messages import Role


class WaitingLine:
    """See the module. ``decisions`` are the last placements; ``ageing``: ``engine.ranking``."""

    def __init__(
        self,
        policy: Policy,
        legs: Legs,
        kv_index: KVIndex,
        recorder: Recorder,
        ageing: float | None = None,
    ) -> None:
        self.decisions: deque[Decision] = deque(maxlen=256)
        self._policy = policy
        self._ageing = ageing
        self._legs = legs
        self._kv_index = kv_index
        self._recorder = recorder
        self._line: list[RoutedRequest] = []

    def __iter__(self) -> Iterator[RoutedRequest]:
        return iter(list(self._line))

    def __len__(self) -> int:
        return len(self._line)

    def add(self, request: RoutedRequest, now: float) -> None:
        """Let a request wait, at its place by rank."""
        request.state = RequestState.QUEUED
        request.waiting_since = now
        insort(self._line, request, key=self._rank)

    def _rank(self, request: RoutedRequest) -> tuple[float, int]:
        return rank(request.spec.priority, request.received_at, self._ageing), request.arrival

    def remove(self, request: RoutedRequest) -> None:
        """A request that waits no longer."""
        self._line.remove(request)

    def place(self, now: float) -> None:
        """Place waiting requests in order, until one must wait."""
        while self._line:
            request = self._line[0]
            views = self._legs.workers.views()
            placement = self._policy.place(request.num_kv_prompt, views)
            if placement is None:
                return
            self._line.pop(0)
            request.state = RequestState.RESERVING
            self._legs.reserve(request, placement)
            request.reserved_at = now
            if request.prefill_here:  # the worker itself measures its wait for blocks
                request.dispatched_at = request.dispatched_at or now
            request.decision = Decision(
                request.request_id,
                self._policy.name,
                placement.decode.node_id,
                placement.prefill.node_id if placement.prefill is not None else None,
                placement.reason,
                self._cached_tokens(request, placement),
            )
            self.decisions.append(request.decision)
            self._recorder.placed(self._policy.name, placement.reason)

    def _cached_tokens(self, request: RoutedRequest, placement: Placement) -> int:
        """The prompt's tokens whose KV is where they would be computed or wanted."""
        most = 0
        for ref in {placement.decode, placement.prefill or placement.decode}:
            record = self._legs.workers.get(ref)
            if record is None or record.load is None or not record.load.match_unit:
                continue
            model, salt = record.member.peer_info.model, request.spec.cache_salt
            chain = chain_for(model, salt, record.load.match_unit)
            prompt = request.spec.prompt_token_ids
            most = max(most, self._kv_index.cached_tokens(ref, chain, prompt))
        return most

    def movable(self, requests: Iterable[RoutedRequest], now: float) -> list[RoutedRequest]:
        """Those of ``requests`` that wait for blocks of one worker while another has enough, or
        while that worker is draining.

        What looks like room may be none, and a word of what was granted meanwhile be on its way:
        each move doubles the time until a request may move again.
        """
        found = []
        for request in requests:
            if not request.full or request.decode is None:
                continue
            record = self._legs.workers.get(request.decode.worker)
            if record is not None and record.draining:
                found.append(request)
                continue
            if now < request.may_move_at:
                continue
            needed = request.num_kv_prompt
            views = [v for v in self._legs.workers.views() if v.ref != request.decode.worker]
            fitting = [v for v in views if Role.DECODE not in v.roles or v.free_tokens >= needed]
            if self._policy.place(needed, fitting) is not None:
                request.note_move(now)
                found.append(request)
        return found

    def overdue(self, now: float, worker_wait: float) -> tuple[list[RoutedRequest], list[str]]:
        """Requests that no worker could have taken for ``worker_wait`` seconds, and why."""
        reasons = self._legs.workers.not_ready_reasons()
        if not reasons:
            for request in self._line:
                request.waiting_since = now
        late = [r for r in self._line if now - r.waiting_since > worker_wait]
        return late, reasons
