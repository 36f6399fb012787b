"""A small hub on loopback: lists repositories, serves their files with ranges, and fails as asked."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40
_CHUNK = 64 * 1024


@dataclass
class FakeHub:
    """Repositories by name; what goes wrong is set on the fields."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    address: str = ""
    refusal: tuple[int, str] | None = None
    """Status and X-Error-Code of every answer."""
    cut: set[str] = field(default_factory=set)
    """Files whose next answer ends in the middle."""
    short: set[str] = field(default_factory=set)
    """Files that are served shorter than they are listed."""
    gate: threading.Event | None = None
    """If set, half of each large file is sent before the event is awaited."""
    served: list[str] = field(default_factory=list)
    """Files whose bytes were asked for."""
    requests: list[str] = field(default_factory=list)

    def blob(self, content: bytes) -> str:
        """Returns the ETag of a file's content."""
        return hashlib.sha1(content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""

    def _answer(self, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(path)
        if self.hub.refusal is not None:
            self._refuse(*self.hub.refusal)
        elif path.startswith("/api/models/"):
            self._list(*path.removeprefix("/api/models/").split("/", 3))
        elif "/resolve/" in path:
            owner, name, _, _, file = path.removeprefix("/").split("/", 4)
            self._file(f"{owner}/{name}", file, with_body)
        else:  # what the library asks of the hub besides
            self._refuse(404, "")

    def _list(self, owner: str, name: str, kind: str, revision: str) -> None:
        files = self.hub.repositories.get(f"{owner}/{name}")
        if files is None:
            self._refuse(401, "RepoNotFound")
        elif revision not in ("main", "v1", COMMIT):
            self._refuse(404, "RevisionNotFound")
        elif kind == "tree":
            self._json(
                [
                    {"type": "file", "path": path, "size": len(content), "oid": self.hub.blob(content)}
                    for path, content in files.items()
                ]
            )
        else:
            siblings = [
                {"rfilename": path, "size": len(content), "blobId": self.hub.blob(content)}
                for path, content in files.items()
            ]
            self._json({"id": f"{owner}/{name}", "sha": COMMIT, "siblings": siblings})

    def _file(self, repo: str, file: str, with_body: bool) -> None:
        content = self.hub.repositories[repo][file]
        body = content[: len(content) // 3] if file in self.hub.short else content
        start = 0
        if wanted := self.headers.get("Range"):
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{self.hub.blob(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content if not with_body else body) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.end_headers()
        if with_body:
            self.hub.served.append(file)
            self._send(file, body[start:])

    def _send(self, file: str, body: bytes) -> None:
        half = len(body) // 2
        self.wfile.write(body[:half])
        self.wfile.flush()
        if file in self.hub.cut:
            self.hub.cut.discard(file)
            self.close_connection = True
            return
        if self.hub.gate is not None and len(body) > _CHUNK:
            self.hub.gate.wait(30)
        self.wfile.write(body[half:])

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Runs a hub on a free port."""
    hub = FakeHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
