"""What is found running: the newest life of each, and how its configuration differs from ours."""

from __future__ import annotations

import pytest

from kvferry.cluster.adopting import by_worker
from kvferry.cluster.config import Config, ConfigError, load_config
from kvferry.cluster.kept import check_openness, differences


def test_the_newest_life_of_each_worker_counts_and_older_ones_are_stale() -> None:
    names = ["decode-0/9", "decode-0/10", "keeper", "prefill-0/2", "router-0/1", "decode-0/3"]
    newest, stale = by_worker([f"kvferry/{name}" for name in names])
    assert newest == {
        "decode-0": "kvferry/decode-0/10",
        "prefill-0": "kvferry/prefill-0/2",
        "router-0": "kvferry/router-0/1",
    }
    assert stale == ["kvferry/decode-0/9", "kvferry/decode-0/3"]


def test_a_configuration_survives_the_record_and_equal_ones_do_not_differ() -> None:
    config = load_config(
        None,
        {
            "ray.address": "10.0.0.1:6379",
            "decode.resources": {"GPU": 1, "mine": 0.5},
            "cache.block_size": "auto",
            "router.heartbeat_timeout": "2s",
            "server.tls": {"cert": "server.pem", "key": "server.key"},
            "tenants": {"acme": {"key_file": "acme.key", "tokens_per_s": 5.0}},
        },
    )
    again = Config.model_validate(config.model_dump(mode="json"))
    assert again == config
    assert list(differences(config.model_dump(), again.model_dump())) == []


def test_what_the_running_cluster_has_otherwise_is_named_but_not_how_it_is_reached() -> None:
    ours = load_config(None, {"ray.address": "auto", "decode.replicas": 2, "model.dtype": "int8"})
    theirs = load_config(
        None, {"ray.address": "10.0.0.1:1", "decode.replicas": 3, "decode.resources": {"GPU": 1.0}}
    )
    assert list(differences(ours.model_dump(), theirs.model_dump())) == [
        "model.dtype is 'auto' in the running cluster, not 'int8'",
        "decode.replicas is 3 in the running cluster, not 2",
        "decode.resources is {'GPU': 1.0} in the running cluster, not {}",
    ]


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"server.tls": {"cert": "a.pem", "key": "a.key"}}, "server.tls"),
        ({"server.auth": {"tokens_file": "tokens"}}, "server.auth"),
        ({"tenants": {"acme": {"key_file": "acme.key", "salt": "hidden"}}}, "tenants"),
        ({"transfer.host": "loopback"}, "transfer.host"),
    ],
)
def test_a_running_cluster_that_lets_others_in_is_not_taken_up(
    more: dict[str, object], key: str
) -> None:
    asked, running = load_config(None, more), load_config(None, {})
    for ours, theirs in ((asked, running), (running, asked)):
        with pytest.raises(ConfigError, match=f"otherwise: {key};") as caught:
            check_openness(ours, theirs)
        assert "hidden" not in str(caught.value)
    check_openness(asked, asked)
