"""The prefill worker as an actor: one worker with the prefill role attached."""

from __future__ import annotations

from kvferry.prefill_worker.role import PrefillRole
from kvferry.worker.actor import WorkerActor
from kvferry.worker.build import WorkerSettings
from kvferry.worker.logs import LogSettings


class PrefillWorker(WorkerActor):
    """See ``WorkerActor``."""

    def __init__(self, settings: WorkerSettings, logs: LogSettings) -> None:
        super().__init__(settings, (PrefillRole,), logs)
