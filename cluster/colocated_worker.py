"""A colocated worker as an actor: one worker with both roles attached."""

from __future__ import annotations

from kvferry.decode_worker.role import DecodeRole
from kvferry.prefill_worker.role import PrefillRole
from kvferry.worker.actor import WorkerActor
from kvferry.worker.build import WorkerSettings
from kvferry.worker.logs import LogSettings


class ColocatedWorker(WorkerActor):
    """See ``WorkerActor``."""

    def __init__(self, settings: WorkerSettings, logs: LogSettings) -> None:
        super().__init__(settings, (PrefillRole, DecodeRole), logs)
