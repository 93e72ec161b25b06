"""Where metrics are served and how processes log, from the configuration to each process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster.cli import main, serve
from kvferry.cluster.config import Config, ConfigError, load_config
from kvferry.cluster.errors import PortUnavailable
from kvferry.cluster.router_actor import RouterEndpoints
from kvferry.cluster.settings import log_settings, router_settings
from kvferry.kv_transfer.authentication import NO_KEY
from kvferry.worker.logs import LogSettings
from kvferry.worker.messages import NodeRef


def test_nothing_is_served_and_lines_are_text_unless_asked_for() -> None:
    config = load_config()
    assert config.server.metrics is None
    assert log_settings(config) == LogSettings("WARNING", "text")


@pytest.mark.parametrize(
    ("key", "value"),
    [("server.metrics", "9400"), ("server.metrics", ""), ("logging.format", "xml")],
)
def test_what_makes_no_sense_is_refused_by_name(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=key):
        load_config(None, {key: value})


def test_an_empty_key_is_no_address(tmp_path: Path) -> None:
    file = tmp_path / "kvferry.yaml"
    file.write_text("server: {metrics: }\nlogging: {level: debug, format: json}\n")
    config = load_config(file)
    assert config.server.metrics is None
    assert log_settings(config) == LogSettings("DEBUG", "json")


def test_the_router_is_told_where_to_listen() -> None:
    ref = NodeRef("router-0", 1)
    doors = RouterEndpoints("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")
    assert router_settings(load_config(), Path("m"), ref, doors, NO_KEY).doors == doors


@pytest.mark.parametrize(
    ("address", "warned"), [("127.0.0.1:0", False), ("0.0.0.0:0", True), ("[::1]:0", False)]
)
def test_serve_warns_where_others_can_read_the_metrics(
    address: str,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[Config] = []

    def start(config: Config, progress: Any) -> Any:
        seen.append(config)
        raise PortUnavailable("far enough")

    monkeypatch.setattr(serve, "start", start)
    assert main(["serve", "--metrics", address]) == PortUnavailable.exit_code
    assert seen[0].server.metrics == address
    assert ("may read the metrics" in capsys.readouterr().err) == warned
