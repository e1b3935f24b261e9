"""A hub on loopback: the few answers of Hugging Face's that its libraries need to fetch a small public repository."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "5" * 40


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    repositories: dict[str, Path]
    """By their place in urls: datasets/org/name, or models' org/name."""
    asked: list[str]

    def log_message(self, *told: Any) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:  # which of these paths are there, and what of them
        name, _, _ = self._parts("/api/")
        told = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        paths = told.get("paths", []) if isinstance(told, dict) else []
        self._json([entry for entry in self._entries(name) if entry["path"] in paths])

    def do_GET(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        if self.path.startswith("/api/"):
            name, kind, _ = self._parts("/api/")
            if name not in self.repositories:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif kind == "tree":
                self._json(self._entries(name))
            else:
                files = [{"rfilename": entry["path"]} for entry in self._entries(name)]
                self._json({"id": name.removeprefix("datasets/"), "sha": COMMIT, "private": False, "siblings": files})
            return
        name, kind, path = self._parts("/")
        file = self.repositories.get(name, Path()) / path
        if kind != "resolve" or name not in self.repositories or not file.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        data = file.read_bytes()
        self._send(200, data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT})

    def _parts(self, before: str) -> tuple[str, str, str]:
        """Of a url: the repository, what is asked of it, and the path after its revision."""
        parts = unquote(urlsplit(self.path).path).removeprefix(before).split("/")
        count = 3 if parts[0] == "datasets" else 2
        parts = parts[1:] if parts[0] == "models" else parts
        rest = [*parts[count:], "", ""]
        return "/".join(parts[:count]), rest[0], "/".join(parts[count + 2 :])

    def _entries(self, name: str) -> list[dict[str, Any]]:
        folder = self.repositories[name]
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        return [
            {
                "type": "file",
                "path": file.relative_to(folder).as_posix(),
                "size": file.stat().st_size,
                "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
            }
            for file in files
        ]

    def _json(self, told: Any) -> None:
        self._send(200, json.dumps(told).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def serving(**repositories: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of a hub that has these, by their names with __ for /; and what it was asked."""
    asked: list[str] = []
    own = {"repositories": {name.replace("__", "/"): folder for name, folder in repositories.items()}, "asked": asked}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (HubHandler,), own))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
