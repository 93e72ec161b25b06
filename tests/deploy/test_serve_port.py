"""The port of Ray Serve's proxy is where SECURITY.md says: what our files set, else its default."""

from __future__ import annotations

from typing import Any

import yaml
from ray.serve.schema import HTTPOptionsSchema

from tests.house.source import ROOT
from tests.system.listening import PAGE


def address_in(serve_config: dict[str, Any]) -> str:
    options = HTTPOptionsSchema(**serve_config.get("http_options", {}))
    if options.host == "0.0.0.0":
        return f"every address, {options.port}"
    return f"{options.host}:{options.port}"


def test_the_proxy_listens_where_the_page_says() -> None:
    (row,) = (line for line in PAGE.read_text("utf-8").splitlines() if "| `ray-serve` |" in line)
    ours = yaml.safe_load((ROOT / "deploy" / "serve" / "kvferry.yaml").read_text("utf-8"))
    documents = yaml.safe_load_all(
        (ROOT / "deploy" / "kubernetes" / "rayservice.yaml").read_text("utf-8")
    )
    (service,) = (each for each in documents if each["kind"] == "RayService")
    theirs = yaml.safe_load(service["spec"]["serveConfigV2"])
    addresses = f"{address_in(theirs)}, in the RayService; {address_in(ours)} in `deploy/serve`"
    assert f"| {addresses} |" in row
