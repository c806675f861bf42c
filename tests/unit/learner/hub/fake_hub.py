"""A hub in a thread: what `HfApi` asks of the real one to make a repository and to commit files, and nothing else.

Small files come with the commit, `.safetensors` by git-lfs's batch API before it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_fake"
COMMIT = "c" * 40


@dataclass
class Hub:
    """`repos`: name to the answer's fields of how it was made; `files`: path in the last commit to bytes."""

    endpoint: str = ""
    licenses: dict[str, str] = field(default_factory=dict)
    repos: dict[str, dict[str, Any]] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)  # keys are SHA-256
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    state: Hub

    def do_POST(self) -> None:
        body = self._body()
        self.state.asked.append(self.path)
        if self.path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif self.path.startswith("/verify/"):
            self._answer(200 if json.loads(body)["oid"] in self.state.large else 404, {})
        elif self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._answer(403, {"error": "You don't have the rights to write here"})
        elif self.path == "/api/repos/create":
            self._create(json.loads(body))
        elif re.fullmatch(r"/api/models/\w+/\w+/preupload/main", self.path):
            files = [{"path": f["path"], "shouldIgnore": False} for f in json.loads(body)["files"]]
            modes = ["lfs" if f["path"].endswith(".safetensors") else "regular" for f in files]
            self._answer(200, {"files": [f | {"uploadMode": m} for f, m in zip(files, modes, strict=True)]})
        elif self.path.endswith(".git/info/lfs/objects/batch"):
            self._answer(200, {"transfer": "basic", "objects": [self._place(o) for o in json.loads(body)["objects"]]})
        elif found := re.fullmatch(r"/api/models/(\w+/\w+)/commit/main", self.path):
            self._commit(found[1], [json.loads(line) for line in body.splitlines()])
        else:
            self._answer(404, {"error": f"no such path: {self.path}"})

    def do_PUT(self) -> None:
        body, oid = self._body(), self.path.rpartition("/")[2]
        right = hashlib.sha256(body).hexdigest() == oid
        if right:
            self.state.large[oid] = body
        self._answer(200 if right else 400, {})

    def do_GET(self) -> None:
        name = self.path.removeprefix("/api/models/")
        if name in self.state.licenses:
            self._answer(200, {"id": name, "cardData": {"license": self.state.licenses[name]}, "siblings": []})
        else:
            self._answer(404, {"error": "Repository not found"})

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        known = name in self.state.repos
        self.state.repos.setdefault(name, asked)
        self._answer(409 if known else 200, {"url": f"{self.state.endpoint}/{name}"})

    def _place(self, found: dict[str, Any]) -> dict[str, Any]:
        places = {"upload": "lfs", "verify": "verify"}
        actions = {name: {"href": f"{self.state.endpoint}/{at}/{found['oid']}"} for name, at in places.items()}
        return found | {"actions": actions}

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        files = {}
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "lfsFile":
                files[value["path"]] = self.state.large[value["oid"]]
            else:
                files[value["path"]] = base64.b64decode(value["content"])
        self.state.files = files
        self._answer(200, {"commitUrl": f"{self.state.endpoint}/{name}/commit/{COMMIT}", "commitOid": COMMIT})

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"] or 0))

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if "error" in body:
            self.send_header("X-Error-Message", body["error"])
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass
