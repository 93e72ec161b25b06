"""Following a keeper until its cluster serves, or until it is known why it will not.

Asks by a function and waits by a function, so that it can be tried without Ray. Decides only what
has become of the keeper; what is to be done about it is ``cluster.kept``'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import ray

from kvferry.cluster.errors import NotReady
from kvferry.cluster.ground import Say
from kvferry.cluster.router_actor import RouterEndpoints

POLL_S = 0.1
SILENT_S = 60.0  # that Ray may take to start a keeper again
LOST = "its node is lost, or it cannot be started there: 'kvferry down', then serve anew"


@dataclass(frozen=True, slots=True)
class KeeperNews:
    """How far a keeper is.

    Attributes:
        lines: what there is to tell since the lines that are known.
        doors: where the cluster listens, once it serves.
        failure: why it does not serve and will not by itself.
        maker: who began the cluster: what ``cluster.kept`` calls itself. Empty: not known.
        stopping_s: it is being ended, and its streams have so many seconds; None: it is not.
    """

    lines: tuple[str, ...]
    doors: RouterEndpoints | None
    failure: Exception | None
    maker: str = ""
    stopping_s: float | None = None


class Fate(Enum):
    """What has become of a keeper that was followed."""

    SERVING = "serving"
    STOPPING = "stopping"  # somebody ends it
    OTHERS = "others"  # somebody else began the cluster, and that is not wanted
    DEAD = "dead"  # for good


class Following:
    """See the module.

    Attributes:
        is_ours: the keeper has said that ``maker``, which is us, began the cluster.
        news: the last that it said.
    """

    def __init__(
        self,
        ask: Callable[[int], KeeperNews],
        maker: str,
        pause: Callable[[float], object],
        clock: Callable[[], float],
    ) -> None:
        """``ask``: the keeper's ``news``, as Ray gives it; ``clock``: seconds."""
        self._ask, self._maker = ask, maker
        self._pause, self._clock = pause, clock
        self.news: KeeperNews | None = None
        self.cause: Exception | None = None  # of a death

    @property
    def is_ours(self) -> bool:
        """See the class."""
        return self.news is not None and self.news.maker == self._maker

    def look(self, known: int = 0) -> KeeperNews:
        """Ask once. Raises what Ray does."""
        self.news = self._ask(known)
        return self.news

    def run(self, say: Say, only_ours: bool = False) -> Fate:
        """Repeat what the keeper says until its fate is known. Raises what it failed with.

        ``only_ours``: do not wait for a cluster that others began.
        """
        known, silent_since = 0, None
        while True:
            try:
                news = self.look(known)
            except ray.exceptions.ActorDiedError as error:
                self.cause = error
                return Fate.DEAD
            except ray.exceptions.ActorUnschedulableError as error:
                raise NotReady(f"the keeper does not run: {LOST} ({error})") from error
            except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError) as error:
                now = self._clock()
                silent_since = now if silent_since is None else silent_since
                if now - silent_since >= SILENT_S:
                    raise NotReady(
                        f"the keeper has not answered for {SILENT_S:g} s: 'kvferry down' ends it "
                        f"({type(error).__name__})"
                    ) from error
                self._pause(POLL_S)
                known = 0  # Ray starts it again
                continue
            silent_since = None
            if news.stopping_s is not None:
                return Fate.STOPPING
            if only_ours and news.maker and not self.is_ours:
                return Fate.OTHERS
            for line in news.lines:
                if self.is_ours or news.doors is None:  # else the story of an earlier start
                    say(line)
            known += len(news.lines)
            if news.failure is not None:
                raise news.failure
            if news.doors is not None:
                return Fate.SERVING
            self._pause(POLL_S)  # a keeper tells when it is asked only
