"""The decode worker as an actor: one worker with the decode role attached."""

from __future__ import annotations

from kvferry.decode_worker.role import DecodeRole
from kvferry.worker.actor import WorkerActor
from kvferry.worker.build import WorkerSettings


class DecodeWorker(WorkerActor):
    """See ``WorkerActor``."""

    def __init__(self, settings: WorkerSettings, log_level: str) -> None:
        super().__init__(settings, (DecodeRole,), log_level)
