"""A Hugging Face Hub on this machine: serves repositories from memory, counts what is downloaded, and knows gated ones.

    with FakeHub({"owner/model": {"config.json": b"{}"}}, gated={"owner/secret"}) as hub:
        env = {"HF_ENDPOINT": hub.url, ...}
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import unquote, urlsplit

Repo = dict[str, bytes]


def folder_repo(folder: Path) -> Repo:
    """The files of a folder as those of a repository."""
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


class FakeHub:
    """`downloads` counts the files given out (GET of a file), by (repository, file); `asked` every request."""

    def __init__(self, repos: dict[str, Repo], gated: set[str] = frozenset()) -> None:
        self.repos, self.gated = repos, set(gated)
        self.downloads: Counter[tuple[str, str]] = Counter()
        self.asked: list[str] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def commit(self, repo: str) -> str:
        content = b"".join(name.encode() + data for name, data in sorted(self.repos[repo].items()))
        return hashlib.sha1(content).hexdigest()

    def _answer(self, path: str, method: str) -> tuple[int, dict[str, str], bytes]:
        path = unquote(urlsplit(path).path).strip("/")
        with self._lock:
            self.asked.append(f"{method} {path}")
        api = path.startswith("api/models/")
        name, _, rest = path.removeprefix("api/models/").partition("/revision/" if api else "/resolve/")
        name, _, tree = name.partition("/tree/")
        if name not in self.repos:
            return 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "no such repository"}, b""
        if name in self.gated and not api:  # what there is may be listed
            return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"}, b""
        files, commit = self.repos[name], self.commit(name)
        revision, _, file = rest.partition("/")
        if revision not in ("", "main", commit):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if api and tree:
            return 200, {}, json.dumps([{"type": "file", "path": key, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                                        for key, data in files.items()]).encode()
        if api:
            siblings = [{"rfilename": key, "size": len(data)} for key, data in files.items()]
            return 200, {}, json.dumps({"id": name, "modelId": name, "sha": commit, "siblings": siblings}).encode()
        if file not in files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
        if method == "GET":
            with self._lock:
                self.downloads[name, file] += 1
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(files[file]).hexdigest()}"'}, files[file]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _reply(self, method: str) -> None:
                status, headers, body = hub._answer(self.path, method)
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if method != "HEAD":
                    self.wfile.write(body)

            def do_GET(self) -> None:
                self._reply("GET")

            def do_HEAD(self) -> None:
                self._reply("HEAD")

            def log_message(self, *args: object) -> None:
                pass

        return Handler
