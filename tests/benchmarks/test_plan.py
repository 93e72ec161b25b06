"""The plan: who is measured when, with which prompts, and what becomes of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.peers import arguments
from benchmarks.peers.comparison import Run
from benchmarks.peers.completions_api import PeerAnswer, PeerFailed
from benchmarks.peers.launches import KVFERRY, VLLM, Case
from benchmarks.peers.load import Load, put_under_load
from benchmarks.peers.machine import MachineSpeed
from benchmarks.peers.model import Model
from benchmarks.peers.systems import Running, Setup
from kvferry.cluster.cli.command import UsageError
from kvferry.cluster.closed_loop import Send

LOAD = Load(4, 3, [1, 2], 5, num_repeats=2, seed=7, vocab_size=1000)
SPEED = MachineSpeed(1e11, 1e10)


class FakeSystem:
    """Answers everything with as many tokens as asked for; ``prompts`` are those it was sent."""

    def __init__(self, missing: int = 0) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self.in_flight = self.most_in_flight = 0
        self._missing = missing

    def running(self) -> Running:
        @asynccontextmanager
        async def client() -> AsyncIterator[Send]:
            yield self._send

        return Running(client, [])

    async def _send(self, prompt: list[int], output_tokens: int) -> PeerAnswer:
        self.prompts.append(tuple(prompt))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        count = output_tokens - self._missing
        return PeerAnswer(tuple(prompt[:count]), 0.5, (0.25,) * (count - 1), 1.0)


def put(system: FakeSystem, load: Load = LOAD, round_number: int = 0) -> dict[int, int]:
    measured = asyncio.run(put_under_load(system.running(), load, round_number, lambda _: None))
    return {each: len(repeats) for each, repeats in measured.repeats.items()}


def test_every_repeat_of_every_concurrency_is_measured() -> None:
    system = FakeSystem()
    assert put(system) == {1: 2, 2: 2}
    assert system.most_in_flight == 2
    assert len(system.prompts) == 1 + (1 + 2 * 5) + (2 + 2 * 5)


def test_no_prompt_is_sent_twice_but_the_first_of_each_start() -> None:
    system = FakeSystem()
    put(system, round_number=0)
    put(system, round_number=1)
    assert len(system.prompts) - len(set(system.prompts)) == 1


def test_both_systems_get_the_same_prompts() -> None:
    one, other = FakeSystem(), FakeSystem()
    put(one, round_number=1)
    put(other, round_number=1)
    assert sorted(one.prompts) == sorted(other.prompts)


def test_an_answer_of_another_length_ends_the_run() -> None:
    with pytest.raises(Exception, match="got 2 tokens, wanted 3"):
        put(FakeSystem(missing=1))


def test_requests_are_four_per_client_and_eight_at_least() -> None:
    load = Load(4, 3, [1, 8], None, num_repeats=1, seed=0, vocab_size=10)
    assert [load.workload(each).num_requests for each in (1, 2, 8)] == [8, 8, 32]


def test_the_systems_take_turns() -> None:
    cases = [Case("colocated", "float32"), Case("colocated", "bfloat16")]
    plan = [(case.dtype, number, system) for case, number, system in peers.steps(cases, 2, "ab")]
    assert plan == [
        (dtype, number, system)
        for dtype in ("float32", "bfloat16")
        for number in (0, 1)
        for system in ("a", "b")
    ]


def starting(
    systems: dict[str, FakeSystem],
) -> Callable[[str, Case, Setup], AbstractContextManager[Running]]:
    @contextmanager
    def start(system: str, case: Case, setup: Setup) -> Iterator[Running]:
        if system not in systems:
            raise PeerFailed(f"{system} ended with 1")
        yield systems[system].running()

    return start


def run(folder: Path, systems: dict[str, FakeSystem], speeds: Sequence[MachineSpeed]) -> list[Run]:
    """A plan of two runs over fake systems; the document goes to ``folder/out/peers.json``."""
    given = ["--arrangements=colocated", "--dtypes=float32", "--rounds=1", "--num-requests=2"]
    args = arguments.parse([*given, f"--output={folder / 'out' / 'peers.json'}"], cores=[0, 1])
    args.given = given
    runs: list[Run] = []
    speed = iter(speeds)
    model = Model(folder, 1000)
    peers.run_all(args, model, runs, start=starting(systems), speed=lambda _: next(speed))
    return runs


def test_every_run_is_written_down(tmp_path: Path) -> None:
    run(tmp_path, {KVFERRY: FakeSystem(), VLLM: FakeSystem()}, [SPEED] * 3)
    document = json.loads((tmp_path / "out" / "peers.json").read_text())
    assert [each["system"] for each in document["runs"]] == [VLLM, KVFERRY]
    assert [each["error"] for each in document["runs"]] == [None, None]
    assert [row["concurrency"] for row in document["comparison"]] == [1, 8]
    assert document["comparison"][0]["equal_first_tokens"] == 64
    assert "--rounds=1" in document["command"]


def test_a_system_that_fails_does_not_stop_the_plan(tmp_path: Path) -> None:
    runs = run(tmp_path, {KVFERRY: FakeSystem()}, [SPEED] * 3)
    assert [(each.system, str(each.failure)) for each in runs] == [
        (VLLM, "vllm ended with 1"),
        (KVFERRY, "None"),
    ]
    document = json.loads((tmp_path / "out" / "peers.json").read_text())
    assert document["runs"][0]["error"]["message"] == "vllm ended with 1"
    assert document["comparison"] == []


def test_the_machine_is_measured_between_all_runs(tmp_path: Path) -> None:
    slower = MachineSpeed(1e11, 0.8e10)
    runs = run(tmp_path, {KVFERRY: FakeSystem(), VLLM: FakeSystem()}, [SPEED, slower, slower])
    assert [each.machine_changed for each in runs] == [True, False]


def test_arguments_have_defaults_for_all() -> None:
    args = arguments.parse([], cores=[0, 1, 2])
    assert args.cores == [0, 1]
    assert len(args.cases) == 4
    assert args.concurrency == [1, 8]
    assert args.systems == [VLLM, KVFERRY]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--threads=4"], "there are 2 cores"),
        (["--threads=1"], "wanted 2 or more"),
        (["--arrangements=spread"], "wanted colocated, disaggregated"),
        (["--dtypes=float32,float32"], "names one twice"),
        (["--concurrency=0"], "at least 1"),
        (["--peer-env=X"], "wanted NAME=VALUE"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(given: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        arguments.parse(given, cores=[0, 1])


def test_arguments_of_the_peer_reach_its_settings() -> None:
    given = ["--peer-env=A=b=c", "--peer-arg=--block-size=32", "--nixl-poll-us=0", "--no-tcmalloc"]
    peer = arguments.parse(given, cores=[0, 1]).peer
    assert peer.more_environment == {"A": "b=c"}
    assert peer.more_arguments == ["--block-size=32"]
    assert (peer.nixl_poll_us, peer.tcmalloc) == (0, None)
    assert peer.environment_folder.is_absolute()


def test_without_the_peers_environment_the_command_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert peers.main([f"--peer-venv={tmp_path}", "--threads=1", "--arrangements=colocated"]) == 2
    assert "run 'make peers'" in capsys.readouterr().err
