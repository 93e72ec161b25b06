"""A cluster on three machines of namespaces: served over TCP, a link cut, taken down.

The small part of ``make hosts``: Ray is started on each machine without ``ray up``.
"""

from __future__ import annotations

import pytest

from kvferry.engine.weights.store import ModelFolder
from tests.hosts import drill
from tests.hosts.machines import why_not
from tests.hosts.site import Site

WHY_NOT = why_not()

pytestmark = [
    pytest.mark.model,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]


def test_streams_go_on_when_a_decode_machine_s_link_is_cut(default_model: ModelFolder) -> None:
    with Site() as site:
        drill.up_to_first_token(site, site.start_ray)
        drill.where_everything_is(site)
        load = drill.Load(streams=4, tokens=96)
        reference = drill.undisturbed(site, load)
        two = site.lan.machines["two"]
        # How soon it is noticed `make hosts` measures: here other tests want the processors, too.
        drill.broken(site, "cut", load, reference, two.cut, within_s=drill.SOON_S)
        two.mend()
        drill.taken_down(site)
