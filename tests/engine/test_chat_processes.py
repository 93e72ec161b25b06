"""Whatever a template does, it ends in time with a typed error, and the next conversation renders.

The processes that templates run in: their limits, their deaths, their parent's, and their threads.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvferry.engine import chat_child
from kvferry.engine.chat import ChatTemplate, ChatTemplateError, HelperUnavailable
from kvferry.engine.chat_helper import HelperSettings
from kvferry.engine.chat_pool import MAX_HELPERS, Helpers

LONG_S = 60.0
ROOT = Path(__file__).resolve().parents[2]
HELLO = [{"role": "user", "content": "hello"}]
ATTACK = [{"role": "user", "content": "attack"}]
SPIN = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def eventually(what: str, probe: Callable[[], bool]) -> None:
    """Return when ``probe`` is true; fails after a while."""
    deadline = time.monotonic() + LONG_S
    while not probe():
        assert time.monotonic() < deadline, f"{what}: not within {LONG_S:g} s"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    """Whether a process has ended, even if nobody has waited for it."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def is_busy(pid: int, before: float = 0.0) -> bool:
    """Whether a process has computed for a while since ``before`` (its processor seconds)."""
    return is_gone(pid) or processor_s(pid) > before + 0.2


def processor_s(pid: int) -> float:
    """Seconds that a process has computed."""
    return float(psutil.Process(pid).cpu_times().user)


def on_attack(source: str) -> str:
    """A template that does something only if the first message is ``attack``."""
    return (
        "{% if messages[0].content == 'attack' %}"
        + source
        + "{% else %}{{ messages[0].content }}{% endif %}"
    )


@pytest.fixture
def make() -> Iterator[Callable[..., ChatTemplate]]:
    made: list[ChatTemplate] = []

    def build(source: str = "{{ messages[0].content }}", **rest: Any) -> ChatTemplate:
        made.append(ChatTemplate({"default": source}, {}, **rest))
        return made[-1]

    yield build
    for chat in made:
        chat.close()


# --- the limits --------------------------------------------------------------------------------

HOSTILE = {
    "loops without output": SPIN,
    "a string doubled": (
        "{% set ns = namespace(s='xx') %}"
        "{% for i in range(999) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
    ),
    "a list doubled": (
        "{% set ns = namespace(s=[1, 2]) %}"
        "{% for i in range(999) %}{% set ns.s = ns.s + ns.s %}{% endfor %}"
    ),
    "a number squared": (
        "{% set ns = namespace(n=9) %}"
        "{% for i in range(999) %}{% set ns.n = ns.n * ns.n %}{% endfor %}"
    ),
    "a wide format": "{{ '%1000000000s' % 'x' }}",
    "a wide format method": "{{ '{:1000000000}'.format('x') }}",
    "a wide centre": "{{ 'x' | center(1000000000) }}",
    "a wide indent": "{{ messages | tojson(indent=1000000000) }}",
    "many words": "{{ lipsum(n=100000) | length }}",
    "a recursive macro": "{% macro f(n) %}{{ f(n + 1) ~ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "a macro without a bottom": (
        "{% macro f(n) %}{% if n < 90 %}{% set _ = f(n + 1) ~ f(n + 1) %}{% endif %}{% endmacro %}"
        "{% set _ = f(0) %}"
    ),
    "deep nesting": (
        "{% set ns = namespace(s=[]) %}"
        "{% for i in range(99999) %}{% set ns.s = [ns.s] %}{% endfor %}{{ ns.s | tojson }}"
    ),
    "deep nesting shown": (
        "{% set ns = namespace(s=[]) %}"
        "{% for i in range(99999) %}{% set ns.s = [ns.s] %}{% endfor %}{{ ns.s }}"
    ),
    "a large refusal": "{{ raise_exception('x' * 1000000) }}",
    "much output": SPIN.replace("{% endfor %}", "x{% endfor %}"),
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_is_stopped_and_the_next_conversation_renders(
    source: str, make: Callable[..., ChatTemplate]
) -> None:
    chat = make(on_attack(source), limit_s=1.0)
    for _ in range(2):
        with pytest.raises(ChatTemplateError) as caught:
            chat.render(ATTACK)
        assert str(caught.value).startswith("chat: the ")
        assert len(str(caught.value)) < 2000
    assert chat.render(HELLO) == "hello"


def test_the_limit_is_named_and_ends_the_process(make: Callable[..., ChatTemplate]) -> None:
    chat = make(on_attack(SPIN), limit_s=1.0)
    assert chat.render(HELLO) == "hello"
    (pid,) = chat.helpers.pids()
    with pytest.raises(ChatTemplateError, match="after 1 s; send a shorter"):
        chat.render(ATTACK)
    assert is_gone(pid)
    assert chat.helpers.pids() == []


def test_memory_is_bounded(make: Callable[..., ChatTemplate]) -> None:
    chat = make(on_attack("{{ 'x' | center(600000000) | length }}"), limit_s=LONG_S)
    with pytest.raises(ChatTemplateError, match="more memory than it may have"):
        chat.render(ATTACK)
    assert make("{{ 'x' | center(100000000) | length }}").render(HELLO) == "100000000"


def test_a_slow_conversation_holds_up_no_other(make: Callable[..., ChatTemplate]) -> None:
    chat = make(on_attack(SPIN), limit_s=LONG_S)
    with ThreadPoolExecutor(1) as threads:
        slow = begin_attack(chat, threads)
        assert [chat.render(HELLO) for _ in range(20)] == ["hello"] * 20
        assert not slow.done()
        chat.close()
        with pytest.raises(ChatTemplateError, match="signal 9"):
            slow.result(LONG_S)


def begin_attack(chat: ChatTemplate, threads: ThreadPoolExecutor) -> Future[str]:
    """Begin a slow rendering; returns while it goes on."""
    chat.render(HELLO)
    (pid,) = chat.helpers.pids()
    before = processor_s(pid)
    slow = threads.submit(chat.render, ATTACK)
    eventually("the template runs", lambda: is_busy(pid, before))
    return slow


# --- deaths ------------------------------------------------------------------------------------


def test_a_process_that_died_while_idle_is_replaced_unnoticed(
    make: Callable[..., ChatTemplate],
) -> None:
    chat = make()
    pids = []
    for _ in range(5):
        assert chat.render(HELLO) == "hello"
        (pid,) = chat.helpers.pids()
        os.kill(pid, signal.SIGKILL)
        pids.append(pid)
    assert len(set(pids)) == 5


def test_a_process_killed_while_it_renders_is_a_typed_error(
    make: Callable[..., ChatTemplate],
) -> None:
    chat = make(on_attack(SPIN), limit_s=LONG_S)
    with ThreadPoolExecutor(1) as threads:
        slow = begin_attack(chat, threads)
        os.kill(chat.helpers.pids()[0], signal.SIGKILL)
        with pytest.raises(ChatTemplateError, match="ended by signal 9"):
            slow.result(LONG_S)
    assert chat.render(HELLO) == "hello"


def test_a_process_that_takes_no_request_is_the_machine_s_fault_and_replaced() -> None:
    helpers = Helpers(HelperSettings({"default": "x"}, {}, 100, start_s=LONG_S))
    request = (
        b'{"template": "default", "messages": [], "tools": null, "template_args": {}, '
        b'"continue_final_message": false, "add_generation_prompt": true, "now": "2024-07-04"}'
    )
    assert helpers.render(request) == "x"
    (pid,) = helpers.pids()
    os.kill(pid, signal.SIGSTOP)
    impatient = HelperSettings({"default": "x"}, {}, 100, start_s=0.25)
    helpers._settings, patient = impatient, helpers._settings
    with pytest.raises(HelperUnavailable, match=r"taken no request for 0\.25 s"):
        helpers.render(request)
    assert is_gone(pid)
    helpers._settings = patient
    assert helpers.render(request) == "x"
    helpers.close()


def test_a_process_that_cannot_start_is_the_machine_s_fault(
    make: Callable[..., ChatTemplate], monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = make()
    with monkeypatch.context() as changed:
        changed.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(HelperUnavailable, match="cannot be started"):
            chat.render(HELLO)
        changed.setattr(sys, "executable", "/bin/false")
        with pytest.raises(HelperUnavailable, match="ended with exit code 1"):
            chat.render(HELLO)
    assert chat.render(HELLO) == "hello"


def test_an_interrupt_does_not_reach_it(make: Callable[..., ChatTemplate]) -> None:
    chat = make()
    chat.render(HELLO)
    (pid,) = chat.helpers.pids()
    assert os.getpgid(pid) != os.getpgid(0), "a terminal's interrupt goes to the group"
    os.kill(pid, signal.SIGINT)
    assert chat.render(HELLO) == "hello"
    assert chat.helpers.pids() == [pid]


# --- its own end -------------------------------------------------------------------------------

PARENT = """
import sys
from kvferry.engine.chat import ChatTemplate
chat = ChatTemplate({"default": sys.argv[1]}, {}, limit_s=5.0)
print(chat.render([{"role": "user", "content": "hello"}]), *chat.helpers.pids(), flush=True)
sys.stdin.readline()
chat.render([{"role": "user", "content": "attack"}])
sys.stdin.readline()
"""


@pytest.mark.parametrize("is_rendering", [False, True])
def test_it_ends_when_its_parent_is_killed(is_rendering: bool) -> None:
    command = [sys.executable, "-c", PARENT, on_attack(SPIN)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        hello, pid = parent.stdout.readline().split()
        assert hello == "hello" and not is_gone(int(pid))
        if is_rendering:
            before = processor_s(int(pid))
            print(file=parent.stdin, flush=True)
            eventually("the template runs", lambda: is_busy(int(pid), before))
        parent.kill()
    eventually("the process has ended", lambda: is_gone(int(pid)))


def test_an_interpreter_that_ends_ends_it(tmp_path: Path) -> None:
    """From another folder, found by a changed path only, and with warnings as errors."""
    code = (
        "import os, sys, warnings; warnings.simplefilter('error')\n"
        f"sys.path.insert(0, os.path.relpath({str(ROOT)!r}))\n"
        + PARENT.replace("sys.stdin.readline()", "")
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "{{ messages[0].content }}"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    hello, pid = done.stdout.split()
    assert (hello, done.stderr) == ("hello", "")
    assert is_gone(int(pid))


def test_a_template_dropped_without_closing_leaves_nothing() -> None:
    chat = ChatTemplate({"default": "x"}, {})
    chat.render(HELLO)
    pids = chat.helpers.pids()
    del chat
    gc.collect()  # a pipe or process left open would warn here, and warnings are errors
    assert len(pids) == 1 and all(is_gone(pid) for pid in pids)


def test_closing_ends_the_processes_for_good(make: Callable[..., ChatTemplate]) -> None:
    never_used = make()
    never_used.close()
    chat = make()
    chat.render(HELLO)
    pids = chat.helpers.pids()
    for _ in range(2):
        chat.close()
        assert all(is_gone(pid) for pid in pids) and chat.helpers.pids() == []
        with pytest.raises(HelperUnavailable, match="shutting down"):
            chat.render(HELLO)


def test_it_holds_nothing_of_its_parent(
    make: Callable[..., ChatTemplate], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_TEST_SECRET", "s3cret")
    inherited, other = os.pipe()
    os.set_inheritable(inherited, True)
    try:
        chat = make()
        chat.render(HELLO)
        (pid,) = chat.helpers.pids()
        process = Path(f"/proc/{pid}")
        assert sorted(int(entry.name) for entry in (process / "fd").iterdir()) == [0, 1, 2]
        assert os.readlink(process / "fd" / "2") == os.devnull
        assert b"s3cret" not in (process / "environ").read_bytes()
        maps = (process / "maps").read_text()
        assert "torch" not in maps and "numpy" not in maps
    finally:
        os.close(inherited)
        os.close(other)


def test_a_fork_takes_a_process_of_its_own(make: Callable[..., ChatTemplate]) -> None:
    chat = make()
    chat.render(HELLO)
    (pid,) = chat.helpers.pids()
    report, write = os.pipe()
    forked = os.fork()
    if forked == 0:
        try:
            text = chat.render([{"role": "user", "content": "from the fork"}])
            os.write(write, text.encode() if pid not in chat.helpers.pids() else b"shared")
            chat.close()
        finally:
            os._exit(0)
    os.close(write)
    assert select.select([report], [], [], LONG_S)[0]
    assert os.read(report, 100) == b"from the fork"
    os.waitpid(forked, 0)
    os.close(report)
    assert chat.render(HELLO) == "hello"
    assert chat.helpers.pids() == [pid]


# --- threads -----------------------------------------------------------------------------------


def test_threads_get_their_own_texts_from_few_processes(make: Callable[..., ChatTemplate]) -> None:
    chat = make(limit_s=LONG_S)
    barrier = threading.Barrier(8)

    def render(thread: int) -> None:
        barrier.wait(LONG_S)
        for turn in range(40):
            content = f"{thread}.{turn} " * (1 + (thread * turn) % 4 * 5000)
            assert chat.render([{"role": "user", "content": content}]) == content

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(render, thread) for thread in range(8)]:
            done.result(LONG_S)
    assert 1 <= len(chat.helpers.pids()) <= MAX_HELPERS


def test_texts_larger_than_a_pipe_come_whole(make: Callable[..., ChatTemplate]) -> None:
    content = "naïve 🎉\x00\r\n\u2028" * 200_000
    assert make(limit_s=LONG_S).render([{"role": "user", "content": content}]) == content


def test_the_module_says_its_frames() -> None:
    assert chat_child.frame(chat_child.TEXT, b"abc") == b"T\0\0\0\3abc"
