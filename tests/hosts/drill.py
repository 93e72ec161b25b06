"""What is tried on a site, step by step: each step returns its figures, and raises if it fails."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tests.hosts.site import CONFIG, NAMES, Site
from tests.system.listening import listed_ports

UNDER_WAY = 3  # tokens that every stream has when something is broken
DETECTED_WITHIN_S = 2.0
START_S = 240.0
SOON_S = 60.0
POLL_S = 0.05

T = TypeVar("T")


def eventually(what: str, probe: Callable[[], T], within_s: float = SOON_S) -> T:
    """The first true value of ``probe``; fails after a while."""
    deadline = time.monotonic() + within_s
    while not (value := probe()):
        assert time.monotonic() < deadline, f"{what}: not within {within_s:g} s"
        time.sleep(POLL_S)
    return value


@dataclass(frozen=True, slots=True)
class Load:
    """Streams at a time, and tokens of each."""

    streams: int = 8
    tokens: int = 160


@dataclass(frozen=True, slots=True)
class Run:
    """What ``tests.hosts.streams`` noted."""

    events: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Run:
        """All whole lines so far."""
        if not path.exists():
            return cls([])
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        return cls([json.loads(line) for line in whole.splitlines()])

    def deltas(self, stream: int) -> list[dict[str, Any]]:
        return [e for e in self.events if e.get("stream") == stream and "ids" in e]

    def tokens(self, stream: int) -> list[int]:
        return [token for delta in self.deltas(stream) for token in delta["ids"]]

    def ends(self) -> dict[int, dict[str, Any]]:
        return {e["stream"]: e for e in self.events if "end" in e}

    def statuses(self) -> list[dict[str, Any]]:
        return [e for e in self.events if "workers" in e]


def check_whole(run: Run, load: Load, reference: Run | None) -> dict[str, int]:
    """Every stream has each of its tokens once, in order, and those that it has undisturbed."""
    found = {"tokens_repeated": 0, "tokens_lost": 0, "tokens_wrong": 0}
    for stream in range(load.streams):
        expected = 0
        for delta in run.deltas(stream):
            found["tokens_repeated"] += max(0, expected - delta["index"])
            found["tokens_lost"] += max(0, delta["index"] - expected)
            expected = delta["index"] + len(delta["ids"])
        found["tokens_lost"] += max(0, load.tokens - expected)
        end = run.ends().get(stream)
        assert end is not None and end["end"] == "length", (stream, end)
        if reference is not None:
            pairs = zip(run.tokens(stream), reference.tokens(stream), strict=True)
            found["tokens_wrong"] += sum(a != b for a, b in pairs)
    assert not any(found.values()), found
    return found


def up_to_first_token(site: Site, bring_up: Callable[[], None]) -> dict[str, Any]:
    """Ray, ``kvferry serve``, and the first token of a client on the head."""
    began = time.monotonic()
    bring_up()
    ray_s = time.monotonic() - began
    config, ready = str(site.config_file), site.lan.folder / "ready"
    flags = ("--prefill", "1", "--decode", "2", "--ready-file", str(ready), "--detach")
    site.kvferry("serve", "--config", config, *flags, within_s=START_S)
    ready_s = time.monotonic() - began
    out = site.lan.folder / "first.jsonl"
    client = site.streams(out, 1, 4)
    eventually("the first token", lambda: Run.read(out).deltas(0))
    first = Run.read(out).deltas(0)[0]["at"] - began
    assert client.wait(SOON_S) == 0
    return {"ray_s": ray_s, "ready_s": ready_s, "first_token_s": first}


def where_everything_is(site: Site) -> dict[str, Any]:
    """Workers on the machines that offer them, a connector for each pair, each with a reason."""
    workers = eventually("both decode workers have connected", lambda: _connected(site))
    assert {worker["worker_id"] for worker in workers} == {"prefill-0", "decode-0", "decode-1"}
    hosts = {worker["worker_id"]: worker["host"] for worker in workers}
    ports = listed_ports()
    assert ports["control"].may_be_node and ports["kv"].may_be_node, "SECURITY.md says where"
    for worker in workers:
        address = site.lan.machines[worker["host"]].address
        assert worker["address"].startswith(f"tcp://{address}:"), worker
    assert {hosts["decode-0"], hosts["decode-1"]} == {"one", "two"}, hosts
    pairs = {}
    for worker in workers:
        assert worker["placement"], worker
        for peer in worker["peers"]:
            same = hosts[peer["worker_id"]] == worker["host"]
            pair = f"{worker['worker_id']} ({worker['host']}) reads {peer['worker_id']}"
            assert peer["connector"] == ("shm" if same else "tcp"), (pair, peer)
            pairs[pair] = f"{peer['connector']}: {peer['reason']}"
    placements = {worker["worker_id"]: worker["placement"] for worker in workers}
    return {"placements": placements, "pairs": pairs}


def _connected(site: Site) -> list[dict[str, Any]]:
    workers: list[dict[str, Any]] = site.kvferry_json("status")["workers"]
    decode = [worker for worker in workers if worker["role"] == "decode"]
    sources = [[p for p in w["peers"] if p["worker_id"] == "prefill-0"] for w in decode]
    return workers if len(decode) == 2 and all(sources) else []


def undisturbed(site: Site, load: Load) -> Run:
    """The streams as they are when nothing is broken."""
    out = site.lan.folder / "reference.jsonl"
    assert site.streams(out, load.streams, load.tokens).wait(START_S) == 0, out.with_suffix(
        ".log"
    ).read_text()
    run = Run.read(out)
    check_whole(run, load, None)
    return run


def broken(
    site: Site,
    name: str,
    load: Load,
    reference: Run,
    do: Callable[[], None],
    within_s: float = DETECTED_WITHIN_S,
) -> dict[str, Any]:
    """Streams run on two decode workers; the machine ``two`` is lost, which is noticed in time; all
    go on without it.
    """
    (victim,) = [
        worker["worker_id"]
        for worker in site.kvferry_json("status")["workers"]
        if worker["host"] == "two" and worker["state"] == "ready"
    ]
    out = site.lan.folder / f"{name}.jsonl"
    client = site.streams(out, load.streams, load.tokens)
    eventually(
        "every stream is under way",
        lambda: all(len(Run.read(out).tokens(at)) >= UNDER_WAY for at in range(load.streams)),
    )
    before = Run.read(out).statuses()[-1]
    began = time.monotonic()
    do()
    assert client.wait(START_S) == 0, out.with_suffix(".log").read_text()
    run = Run.read(out)
    found = check_whole(run, load, reference)
    seen = [
        status["at"] - began
        for status in run.statuses()
        if status["at"] > began and status["workers"].get(victim) != before["workers"][victim]
    ]
    assert seen, "nobody noticed"
    assert seen[0] <= within_s, f"noticed after {seen[0]:.2f} s"
    retried = [end for end in run.ends().values() if end["attempt"] > 1]
    assert retried, "no stream was on the lost machine"
    assert all(end["worker"] != victim for end in run.ends().values() if end["attempt"] > 1)
    gaps = [
        later["at"] - earlier["at"]
        for at in range(load.streams)
        for earlier, later in zip(run.deltas(at), run.deltas(at)[1:], strict=False)
        if later["at"] > began
    ]
    return {
        "detected_s": seen[0],
        "streams": load.streams,
        "streams_retried": len(retried),
        "longest_gap_s": max(gaps),
        **found,
    }


def mended(site: Site) -> dict[str, Any]:
    """The plug is back: a decode worker is there again, whether or not Ray gave the machine up."""
    began = time.monotonic()
    site.lan.machines["two"].mend()
    eventually("two decode workers again", lambda: _connected(site), START_S)
    return {"decode_again_s": time.monotonic() - began}


def scaled(site: Site) -> dict[str, Any]:
    """A second prefill worker comes, and one goes again with its reservation."""
    began = time.monotonic()
    grown = site.kvferry_json("scale", "--prefill", "2")
    grown_s = time.monotonic() - began
    assert (grown["prefill"], grown["decode"]) == (2, 2), grown
    began = time.monotonic()
    shrunk = site.kvferry_json("scale", "--prefill", "1")
    assert shrunk["prefill"] == 1
    return {"grown_s": grown_s, "shrunk_s": time.monotonic() - began}


def loaded(site: Site) -> dict[str, Any]:
    """A small load, from the head."""
    document = site.kvferry_json(
        *("loadgen", "run", "--num-requests", "16", "--concurrency", "4"),
        *("--input-tokens", "64", "--output-tokens", "32"),
    )
    results = document["results"]
    assert results["failed"] == 0 and results["completed"] == 16, results
    return {"output_tokens_per_s": results["output_tokens_per_s"]}


def taken_down(site: Site) -> None:
    """``kvferry down`` leaves Ray and nothing of ours; again is harmless."""
    address = CONFIG["ray"]["address"]
    first = site.kvferry_json("down", "--address", address)["clusters"]
    assert len(first) == 1 and first[0]["num_actors"] > 0, first
    # On a machine that was cut off Ray ends them when it finds its head gone, or is reached again.
    eventually("no actor of ours is left", lambda: not _ours(site), START_S)
    assert site.kvferry_json("down", "--address", address)["clusters"] == []


def ray_down(site: Site) -> dict[str, Any]:
    """``ray down``, and what it leaves."""
    site.down()
    left = {name: _names(site, name) for name in NAMES if name in site.lan.machines}
    for name, names in left.items():
        if names:  # ``ray down`` leaves machines of one's own running
            site.lan.machines[name].run("ray", "stop", "--force")
            eventually(f"nothing is left on {name}", partial(_is_empty, site, name))
    return {"left_by_ray_down": left}


def _ours(site: Site) -> list[str]:
    pattern = re.compile(r"ray::(Keeper|RouterActor|PrefillWorker|DecodeWorker)")
    return [
        name for each in site.lan.machines for name in _names(site, each) if pattern.match(name)
    ]


def _is_empty(site: Site, machine: str) -> bool:
    return not _names(site, machine)


def _names(site: Site, machine: str) -> list[str]:
    return sorted(process.info["name"] for process in site.lan.machines[machine].processes())
