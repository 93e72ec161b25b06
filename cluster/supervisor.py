"""Which workers should be alive, and what to do when one is not. Pure.

A slot is a place for a worker, by name. When its worker is lost the slot is due again after a
pause, which doubles with every loss in a row, so that a worker that dies at each start does not
keep the host busy; one that has lived for ``settled_s`` starts afresh. Knows no Ray: a shell asks
what is due, starts it and reports.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.worker.messages import NodeRef


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Pauses in seconds: the first, the longest, and how long a life counts as a success."""

    first_pause_s: float = 0.2
    longest_pause_s: float = 30.0
    settled_s: float = 60.0


@dataclass(slots=True)
class _Slot:
    alive: NodeRef | None = None
    alive_since: float = 0.0
    due_at: float | None = None
    losses_in_a_row: int = 0
    num_starts: int = 0


class Supervisor:
    """See the module. A slot is alive, or being started, or due at some time."""

    def __init__(self, policy: RestartPolicy | None = None) -> None:
        self._policy = policy or RestartPolicy()
        self._slots: dict[str, _Slot] = {}

    def started(self, name: str, ref: NodeRef, now: float) -> None:
        """The slot's worker lives."""
        slot = self._slots.setdefault(name, _Slot(num_starts=1))
        slot.alive, slot.alive_since, slot.due_at = ref, now, None

    def lost(self, ref: NodeRef, now: float) -> bool:
        """A worker is dead or taken for it; False if that life is not the slot's present one."""
        slot = self._slots.get(ref.node_id)
        if slot is None or slot.alive != ref:
            return False
        if now - slot.alive_since >= self._policy.settled_s:
            slot.losses_in_a_row = 0
        self._schedule(slot, now)
        return True

    def expect(self, name: str, now: float) -> None:
        """There is to be a worker of this name: it is due at once. One that is known stays."""
        self._slots.setdefault(name, _Slot(due_at=now))

    def forget(self, name: str) -> bool:
        """There is to be none, and none lives: False if one does."""
        slot = self._slots.get(name)
        if slot is not None and slot.alive is not None:
            return False
        self._slots.pop(name, None)
        return True

    def retired(self, ref: NodeRef) -> bool:
        """The slot's worker is to have no successor; False if that life is not its present one."""
        slot = self._slots.get(ref.node_id)
        if slot is None or slot.alive != ref:
            return False
        del self._slots[ref.node_id]
        return True

    def failed_to_start(self, name: str, now: float) -> None:
        """A start that was due has failed: try again later, if it is still to be."""
        if name in self._slots:
            self._schedule(self._slots[name], now)

    def due(self, now: float) -> list[str]:
        """Names of the slots to start now; they are not due again until something is reported."""
        names = [
            name
            for name, slot in self._slots.items()
            if slot.due_at is not None and slot.due_at <= now
        ]
        for name in names:
            slot = self._slots[name]
            slot.due_at = None
            slot.num_starts += 1
        return names

    def alive(self) -> list[NodeRef]:
        """The present lives."""
        return [slot.alive for slot in self._slots.values() if slot.alive is not None]

    def num_restarts(self, name: str) -> int:
        """How often the slot has been started again."""
        return self._slots[name].num_starts - 1

    def _schedule(self, slot: _Slot, now: float) -> None:
        pause = self._policy.first_pause_s * 2.0**slot.losses_in_a_row
        slot.alive = None
        slot.due_at = now + min(pause, self._policy.longest_pause_s)
        slot.losses_in_a_row += 1
