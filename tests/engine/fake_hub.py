"""A small Hugging Face Hub on 127.0.0.1: information, files, tokens, and broken transfers."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from tests.engine.hub_folders import COMMIT, REPOSITORY


@dataclass
class FakeHub:
    """Serves ``files`` as one repository at ``commit``.

    ``token`` is wanted of every request if it is set; ``gated`` refuses with a gate; the first
    transfer of each file in ``break_once`` ends after so many bytes.
    """

    files: dict[str, bytes]
    repository: str = REPOSITORY
    commit: str = COMMIT
    branches: tuple[str, ...] = ("main",)
    token: str | None = None
    gated: bool = False
    failing: int | None = None
    break_once: dict[str, int] = field(default_factory=dict)
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)

    @classmethod
    def of(cls, folder: Path) -> Self:
        """A Hub that has the files of a folder."""
        return cls({file.name: file.read_bytes() for file in folder.iterdir()})

    @property
    def fetched(self) -> list[str]:
        """Names of the files whose content was asked for, in order."""
        resolved = (re.search("/resolve/[^/]+/(.+)", path) for verb, path, _ in self.asked)
        verbs = [verb for verb, _, _ in self.asked]
        return [m[1] for m, verb in zip(resolved, verbs, strict=True) if m and verb == "GET"]

    def __enter__(self) -> Self:
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.asked.append((self.command, path, self.headers.get("Range")))
        if hub.failing is not None:
            return self._refuse(hub.failing, None)
        if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._refuse(401, "RepoNotFound")
        if hub.gated:
            return self._refuse(403, "GatedRepo")
        repository = re.escape(hub.repository)
        if match := re.fullmatch(f"/api/models/{repository}(?:/revision/(.+))?", path):
            return self._revision(match[1] or "main", self._info)
        if match := re.fullmatch(f"/api/models/{repository}/tree/([^/]+)", path):
            return self._revision(match[1], self._tree)
        if match := re.fullmatch(f"/{repository}/resolve/([^/]+)/(.+)", path):
            return self._revision(match[1], lambda: self._file(match[2]))
        self._refuse(404, "RepoNotFound")

    def _revision(self, revision: str, answer: Callable[[], None]) -> None:
        if revision in (*self.hub.branches, self.hub.commit):
            answer()
        else:
            self._refuse(404, "RevisionNotFound")

    def _info(self) -> None:
        siblings = [{"rfilename": n, "size": len(c)} for n, c in self.hub.files.items()]
        self._json({"id": self.hub.repository, "sha": self.hub.commit, "siblings": siblings})

    def _tree(self) -> None:
        self._json(
            [
                {"type": "file", "path": name, "size": len(content), "oid": _etag(content)}
                for name, content in self.hub.files.items()
            ]
        )

    def _file(self, name: str) -> None:
        if name not in self.hub.files:
            return self._refuse(404, "EntryNotFound")
        content = self.hub.files[name]
        headers = {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": self.hub.commit}
        begin = 0
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            begin = int(match[1])
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        self._head(206 if begin else 200, len(content) - begin, headers)
        if self.command == "GET":
            limit = self.hub.break_once.pop(name, None)
            self.wfile.write(content[begin:][:limit])
            self.close_connection = self.close_connection or limit is not None

    def _json(self, value: object) -> None:
        content = json.dumps(value).encode()
        self._head(200, len(content), {"Content-Type": "application/json"})
        if self.command == "GET":
            self.wfile.write(content)

    def _refuse(self, status: int, code: str | None) -> None:
        self._head(status, 0, {"X-Error-Code": code} if code else {})

    def _head(self, status: int, length: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
