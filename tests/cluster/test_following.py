"""A keeper that is followed: it serves, ends, is another's, dies, or says why it cannot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import ray

from kvferry.cluster import launcher, ours
from kvferry.cluster.errors import Internal, NotReady
from kvferry.cluster.following import SILENT_S, Fate, Following, KeeperNews
from kvferry.cluster.router_actor import RouterEndpoints

DOORS = RouterEndpoints("127.0.0.1:50051")
US, THEM = "command/1", "command/2"


def news(
    *lines: str,
    doors: RouterEndpoints | None = None,
    failure: Exception | None = None,
    maker: str = US,
    stopping_s: float | None = None,
) -> KeeperNews:
    return KeeperNews(lines, doors, failure, maker, stopping_s)


class FakeKeeper:
    """Answers with one of a list at a time, the last one for ever; time passes in pauses only."""

    def __init__(self, *answers: KeeperNews | Exception) -> None:
        self.answers = list(answers)
        self.now = 0.0
        self.known: list[int] = []

    def ask(self, known: int) -> KeeperNews:
        self.known.append(known)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def pause(self, seconds: float) -> None:
        self.now += seconds

    def following(self) -> Following:
        return Following(self.ask, US, self.pause, lambda: self.now)


def unavailable() -> Exception:
    return ray.exceptions.ActorUnavailableError("restarting", None)


def test_its_lines_are_repeated_until_it_serves() -> None:
    said: list[str] = []
    keeper = FakeKeeper(news("a", "b"), news(), news("c", doors=DOORS))
    following = keeper.following()
    assert following.run(said.append) is Fate.SERVING
    assert (said, keeper.known) == (["a", "b", "c"], [0, 2, 2])
    assert following.is_ours and following.news is not None and following.news.doors == DOORS


def test_what_another_began_is_not_ours_to_end_and_its_old_story_is_not_told() -> None:
    said: list[str] = []
    following = FakeKeeper(news("old", doors=DOORS, maker=THEM)).following()
    assert not following.is_ours
    assert following.run(said.append) is Fate.SERVING
    assert (said, following.is_ours) == ([], False)


def test_one_that_is_being_ended_is_not_stayed_with_though_its_doors_are_open() -> None:
    following = FakeKeeper(news(doors=DOORS, maker=THEM, stopping_s=60.0)).following()
    assert following.run(pytest.fail) is Fate.STOPPING
    assert following.news is not None and following.news.stopping_s == 60.0


@pytest.mark.parametrize("doors", [None, DOORS])
def test_who_wants_only_its_own_does_not_wait_for_another_s(doors: RouterEndpoints | None) -> None:
    following = FakeKeeper(news("x", doors=doors, maker=THEM)).following()
    assert following.run(pytest.fail, only_ours=True) is Fate.OTHERS
    assert FakeKeeper(news(doors=DOORS)).following().run(pytest.fail, True) is Fate.SERVING


def test_a_failure_is_raised_after_the_lines_that_led_to_it() -> None:
    said: list[str] = []
    keeper = FakeKeeper(news("trying", maker=THEM), news("again", failure=Internal("port taken")))
    with pytest.raises(Internal, match="port taken"):
        keeper.following().run(said.append)
    assert said == ["trying", "again"]


def test_one_that_is_started_again_tells_from_the_beginning() -> None:
    said: list[str] = []
    keeper = FakeKeeper(news("a"), unavailable(), news("b", doors=DOORS))
    assert keeper.following().run(said.append) is Fate.SERVING
    assert (said, keeper.known) == (["a", "b"], [0, 1, 0])


@pytest.mark.parametrize("error", [unavailable, lambda: ray.exceptions.GetTimeoutError("slow")])
def test_silence_is_borne_for_a_while_only(error: Callable[[], Exception]) -> None:
    keeper = FakeKeeper(error())
    with pytest.raises(NotReady, match="has not answered for 60 s: 'kvferry down'"):
        keeper.following().run(pytest.fail)
    assert SILENT_S <= keeper.now < SILENT_S + 1.0


def test_a_death_is_told_from_a_node_that_is_lost() -> None:
    following = FakeKeeper(ray.exceptions.ActorDiedError()).following()
    assert following.run(pytest.fail) is Fate.DEAD
    assert isinstance(following.cause, ray.exceptions.ActorDiedError)
    lost = FakeKeeper(ray.exceptions.ActorUnschedulableError("the node is dead"))
    with pytest.raises(NotReady, match=r"its node is lost.* 'kvferry down', then serve anew"):
        lost.following().run(pytest.fail)


def test_enders_know_how_long_a_stop_of_the_launcher_may_take() -> None:
    assert ours.LAST_CALL_S == launcher.LAST_CALL_S
