"""The process that a chat template runs in: frames on standard input, frames on standard output.

Nothing that a template does can hold up or exhaust anybody but this process. It bounds its own
memory, ends when standard input does, and, should the parent die while a template runs, by an
alarm that Python code cannot delay. ``engine.chat_helper`` starts it and holds it to its time.

A frame is a kind of one byte and a length, then so many bytes:

    to the child      SETUP once (JSON: sources, special_tokens, max_chars, memory, limit_s),
                      then any number of RENDER (JSON, see ``Renderer.render``, and ``template``)
    from the child    READY or REFUSED to SETUP; BEGUN, then TEXT or REFUSED, to each RENDER
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from kvferry.engine.chat_template import Refused, Renderer

HEADER = struct.Struct(">cI")
SETUP, RENDER = b"s", b"r"
READY, BEGUN, TEXT, REFUSED = b"R", b"B", b"T", b"X"
ERROR_CHARS = 1000  # of what a template says when it refuses

_ALARM_GRACE_S = 1.0  # the parent, if it lives, is first


def frame(kind: bytes, body: bytes = b"") -> bytes:
    """A frame's bytes."""
    return HEADER.pack(kind, len(body)) + body


def main() -> None:
    """Serve standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    body = _receive(requests)
    if body is None:
        return
    setup = json.loads(body)
    _limit_memory(setup["memory"])
    signal.setitimer(signal.ITIMER_REAL, setup["start_s"] + _ALARM_GRACE_S)
    try:
        renderers = {
            name: Renderer(source, setup["special_tokens"], setup["max_chars"])
            for name, source in setup["sources"].items()
        }
    except Exception as error:  # the boundary: whatever compiling raises is the template's
        _send(answers, REFUSED, f"does not compile: {_words(error)}".encode())
        return
    signal.setitimer(signal.ITIMER_REAL, 0)
    _send(answers, READY)
    while (body := _receive(requests)) is not None:
        _send(answers, BEGUN)
        signal.setitimer(signal.ITIMER_REAL, setup["limit_s"] + _ALARM_GRACE_S)
        kind, text = _answer(renderers, body)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(answers, kind, text)


def _answer(renderers: Mapping[str, Renderer], body: bytes) -> tuple[bytes, bytes]:
    try:
        request: dict[str, Any] = json.loads(body.decode("utf-8", "surrogatepass"))
        return TEXT, renderers[request["template"]].render(request).encode()
    except Refused as error:
        return REFUSED, str(error).encode("utf-8", "replace")
    except UnicodeEncodeError:
        return REFUSED, b"the rendered text has half of a surrogate pair, wanted valid Unicode"
    except MemoryError:
        return REFUSED, b"the model's template needs more memory than it may have; send less"
    except Exception as error:  # the boundary: whatever rendering raises is the template's
        return REFUSED, f"the model's template refused: {_words(error)}".encode("utf-8", "replace")


def _words(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:ERROR_CHARS]


def _limit_memory(allowance: int) -> None:
    """Let this process grow by ``allowance`` bytes and no more; no files, no core dumps."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    wanted = pages * resource.getpagesize() + allowance
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _receive(stream: BinaryIO) -> bytes | None:
    """The next frame's body; None at the end."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    _, length = HEADER.unpack(header)
    body = stream.read(length)
    return body if len(body) == length else None


def _send(stream: BinaryIO, kind: bytes, body: bytes = b"") -> None:
    stream.write(frame(kind, body))
    stream.flush()


if __name__ == "__main__":
    main()
