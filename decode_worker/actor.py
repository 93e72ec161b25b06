"""The decode worker as an actor: one worker with the decode role attached."""

from __future__ import annotations

from kvferry.decode_worker.role import DecodeRole
from kvferry.worker.actor import WorkerActor
from kvferry.worker.build import WorkerSettings
from kvferry.worker.logs import LogSettings


class DecodeWorker(WorkerActor):
    """See ``WorkerActor``."""

    def __init__(self, settings: WorkerSettings, logs: LogSettings) -> None:
        super().__init__(settings, (DecodeRole,), logs)
