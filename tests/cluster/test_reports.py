"""Documents carry every field under its published name, and null where nothing is known."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster.cli.command import Result, RunFailed
from kvferry.cluster.cli.document import Document
from kvferry.cluster.client_stream import Transcript
from kvferry.cluster.errors import Cancelled, WorkerLost
from kvferry.cluster.reports import common
from kvferry.cluster.reports.common import common_fields, dist
from kvferry.cluster.reports.documents import (
    Outcome,
    pools_json,
    request_json,
    status_json,
    to_json,
    totals_json,
)
from kvferry.protos import kvferry_pb2 as pb
from tests.cluster import documents
from tests.cluster.fake_server import (
    accepted,
    audit_response,
    delta,
    finished,
    status_response,
)

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def transcript(*, complete: bool = True) -> Transcript:
    seen = Transcript(started=10.0)
    seen.add(accepted(3), 10.1)
    seen.add(delta(0, 7, text="a"), 10.2)
    if complete:
        seen.add(delta(1, 8, text="b"), 10.3)
        seen.add(finished(2), 10.4)
    return seen


def test_unset_optional_fields_are_null_and_set_zeros_are_not() -> None:
    timing = to_json(pb.Timing(queue_s=0.0))
    assert timing["queue_s"] == 0.0
    assert timing["prefill_s"] is None
    assert timing["itl_s"] == []
    assert to_json(pb.Finished())["usage"] is None


def test_large_counts_stay_numbers() -> None:
    assert to_json(pb.Transfer(bytes_moved=2**53 + 1))["bytes_moved"] == 2**53 + 1


def test_blocks_class_has_its_published_name() -> None:
    (pool, _) = pools_json(audit_response(), with_blocks=True)
    assert pool["blocks"][0]["class"] == "cached"
    assert "block_class" not in pool["blocks"][0]
    assert pool["blocks"][0]["owners"][0]["lease_remaining_s"] is None
    assert "blocks" not in pools_json(audit_response(), with_blocks=False)[0]


def test_finished_request_has_every_published_field() -> None:
    request = request_json(Outcome("p", "id", transcript()))
    assert request["output_token_ids"] == [7, 8]
    assert request["text"] == "ab"
    assert request["error"] is None
    assert (request["prefill_worker"], request["decode_worker"]) == ("prefill-0", "decode-0")
    assert request["usage"] == {"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 2}
    assert request["transfer"]["blocks_moved"] == 2
    assert request["branches"][0]["output_token_ids"] == [7, 8]
    assert request["branches"][0]["branch"] == 0


@pytest.mark.parametrize(
    ("error", "reason"), [(WorkerLost("gone"), "error"), (Cancelled("by the user"), "abort")]
)
def test_failed_request_keeps_what_came_and_nulls_the_rest(
    error: WorkerLost | Cancelled, reason: str
) -> None:
    request = request_json(Outcome("p", "id", transcript(complete=False), error))
    assert request["output_token_ids"] == [7]
    assert request["finish_reason"] == reason
    assert request["error"]["type"] == type(error).__name__
    assert request["usage"] is request["timing"] is request["transfer"] is None


def test_totals_add_up_requests_and_skip_what_failed() -> None:
    requests = [
        request_json(Outcome("p", "a", transcript())),
        request_json(Outcome("p", "b", transcript(complete=False), WorkerLost("gone"))),
    ]
    totals = totals_json(requests, duration_s=2.0)
    assert totals["num_requests"] == 2
    assert totals["num_failed"] == 1
    assert totals["completion_tokens"] == 3
    assert totals["bytes_moved"] == 2048
    assert totals["output_tokens_per_s"] == 1.5


@given(st.lists(st.floats(0, 1e9), min_size=1))
def test_distribution_agrees_with_numpy(values: list[float]) -> None:
    summary = dist(values)
    assert summary is not None
    assert summary["n"] == len(values)
    assert summary["max"] == max(values)
    assert summary["mean"] == pytest.approx(np.mean(values))
    for name, share in (("p50", 50), ("p90", 90), ("p99", 99)):
        assert summary[name] == pytest.approx(np.percentile(values, share))


def test_distribution_of_nothing_is_null() -> None:
    assert dist([]) is None


def test_commit_is_that_of_our_checkout_only(tmp_path: Path) -> None:
    assert common.commit(tmp_path) is None
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert common.commit(tmp_path) is None  # a repository, but it does not hold this code


def test_commit_is_null_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert common.commit(Path(common.__file__).parent) is None


def test_versions_come_without_loading_anything() -> None:
    assert common.distribution_version("torch") is not None
    assert common.distribution_version("no-such-distribution") is None


def example_documents() -> Iterator[dict[str, Any]]:
    head = common_fields("status", ["status", "--json"], NOW)
    yield {**head, "ok": True, "error": None, **status_json(status_response())}
    for name, value in (
        ("blocks", {"pools": pools_json(audit_response(), with_blocks=True)}),
        ("generate", {"requests": [request_json(Outcome("p", "id", transcript()))]}),
    ):
        head = common_fields(name, [name, "--json"], NOW)
        yield {**head, "ok": True, "error": None, **value}


@pytest.mark.parametrize("document", list(example_documents()), ids=lambda d: str(d["schema"]))
def test_documents_keep_their_schema(document: dict[str, Any]) -> None:
    documents.check(document)


def objects_below(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        yield path
        for key, below in value.items():
            yield from objects_below(below, (*path, key))
    elif isinstance(value, list) and value:
        yield from objects_below(value[0], (*path, 0))


@pytest.mark.parametrize("document", list(example_documents()), ids=lambda d: str(d["schema"]))
def test_schemas_allow_no_key_that_is_not_published(document: dict[str, Any]) -> None:
    for path in objects_below(document):
        place: Any = document
        for key in path:
            place = place[key]
        place["surprise"] = 1
        with pytest.raises(jsonschema.ValidationError):
            documents.check(document)
        del place["surprise"]
    documents.check(document)


@pytest.mark.parametrize("document", list(example_documents()), ids=lambda d: str(d["schema"]))
def test_schemas_require_every_published_key(document: dict[str, Any]) -> None:
    for path in objects_below(document):
        place: Any = document
        for key in path:
            place = place[key]
        for key in list(place):
            value = place.pop(key)
            with pytest.raises((jsonschema.ValidationError, KeyError)):
                documents.check(document)
            place[key] = value


@pytest.mark.parametrize("name", [name for name in documents.names() if name != "common"])
def test_failed_documents_have_every_field_as_null(name: str) -> None:
    own = [key for key in documents.schema(name)["properties"] if key != "schema"]
    document = Document(name, tuple(own))
    failed = documents.parse(document.render(Result(error=RunFailed("why")), ["x"], NOW))
    assert failed["ok"] is False
    assert failed["error"] == {"code": "INTERNAL", "type": "RunFailed", "message": "why"}
    assert all(failed[key] is None for key in own)
    with pytest.raises(jsonschema.ValidationError):
        documents.parse(document.render(Result(), ["x"], NOW))  # ok, yet nothing in it


@pytest.mark.parametrize("name", documents.names())
def test_schemas_are_valid_and_strict(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(documents.schema(name))
    if name != "common":
        assert documents.schema(name)["unevaluatedProperties"] is False
