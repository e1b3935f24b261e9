"""A small hub on loopback: the few endpoints with which Hugging Face's own client makes a repository and fills it."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlparse

TOKEN = "hf_made_up_for_a_test"


@dataclass
class Hub:
    """Repositories by name, each with its files; large ones go to the store of large files, as on the hub."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    visibility: dict[str, str] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    url: str = ""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any, dict[str, str]]:
        parts = path.strip("/").split("/")
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}, {}
        if parts[0] == "large":
            assert hashlib.sha256(body).hexdigest() == parts[1]
            self.blobs[parts[1]] = body
            return 200, {}, {}
        if path.endswith(".git/info/lfs/objects/batch"):
            return 200, {"transfer": "basic", "objects": [self._place(o) for o in json.loads(body)["objects"]]}, {}
        repo = "/".join(parts[2:4])
        if repo not in self.repos:
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        files = self.repos[repo]
        if len(parts) == 4:
            known = {"id": repo, "private": self.visibility[repo] == "private", "tags": [], "siblings": []}
            return 200, known | {"sha": "0" * 40}, {}
        if parts[4] == "tree":
            rows = [{"type": "file", "path": p, "size": len(b), "oid": "0" * 40} for p, b in files.items()]
            return 200, rows, {}
        if parts[4] == "preupload":
            return 200, {"files": [_mode(file) for file in json.loads(body)["files"]]}, {}
        assert parts[4] == "commit", path
        self._commit(files, [json.loads(line) for line in body.splitlines()])
        return 200, {"commitUrl": f"{self.url}/{repo}/commit/1", "commitOid": "1" * 40}, {}

    def _create(self, told: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        repo = f"{told.get('organization') or 'me'}/{told['name']}"
        if repo.startswith("others/"):
            return 403, {"error": "You don't have the rights"}, {}
        self.repos[repo], self.visibility[repo] = {}, told.get("visibility") or "public"
        return 200, {"url": f"{self.url}/{repo}", "name": repo, "id": repo}, {}

    def _place(self, wanted: dict[str, Any]) -> dict[str, Any]:
        return wanted | {"actions": {"upload": {"href": f"{self.url}/large/{wanted['oid']}", "header": {}}}}

    def _commit(self, files: dict[str, bytes], lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.blobs[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]


def _mode(file: dict[str, Any]) -> dict[str, Any]:
    mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}


@contextmanager
def serve() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def _respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = urlparse(self.path).path
            hub.asked.append(f"{self.command} {path}")
            is_known = path.startswith("/large/") or self.headers.get("Authorization") == f"Bearer {TOKEN}"
            refused: tuple[int, Any, dict[str, str]] = (401, {"error": "Invalid token"}, {})
            status, told, headers = hub.answer(self.command, path, body) if is_known else refused
            data = json.dumps(told).encode()
            self.send_response(status)
            for name, value in (
                headers | {"Content-Type": "application/json", "Content-Length": str(len(data))}
            ).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_HEAD = _respond  # noqa: N815

        def log_message(self, *told: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
