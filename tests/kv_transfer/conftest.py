from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kv_transfer.helpers import COPIED_IN_POLL, SERVED, Host, Pair, make_pair


@pytest.fixture(params=[*COPIED_IN_POLL, *SERVED])
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    made = Host(request.param)
    yield made
    made.close()


@pytest.fixture(params=COPIED_IN_POLL)
def copying_host(request: pytest.FixtureRequest) -> Iterator[Host]:
    made = Host(request.param)
    yield made
    made.close()


@pytest.fixture
def shm_host() -> Iterator[Host]:
    made = Host("shm")
    yield made
    made.close()


@pytest.fixture
def pair(host: Host) -> Pair:
    return make_pair(host)
