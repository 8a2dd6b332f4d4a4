"""A hub on loopback that records what it is sent and answers as the real one does where a Space is made."""

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from app.space import describe

TOKEN = "hf_write"
Refusal = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Call:
    method: str
    path: str
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def lines(self) -> list[Any]:
        """A commit's messages."""
        return [json.loads(line) for line in self.body.splitlines()]

    @property
    def shown(self) -> str:
        """As a dry run prints it."""
        return "\n".join([f"{self.method} {self.path}", *describe(self.body)])


@dataclass(slots=True)
class FakeHub:
    """``flavors``: what is answered to whoever asks for one. ``files``: what lies in every Space."""

    url: str = ""
    calls: list[Call] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    flavors: dict[str, Refusal] = field(default_factory=dict)
    files: list[str] = field(default_factory=lambda: [".gitattributes"])

    def answer(self, call: Call, token: str) -> tuple[int, object]:
        path = call.path.partition("?")[0]
        if token != TOKEN:
            return 401, {"error": "Invalid username or password."}
        if path == "/api/repos/create":
            return self._make(f"{call.json['organization']}/{call.json['name']}", call.json)
        if any(path.startswith(f"/api/spaces/{name}/") for name in self.missing):
            return 404, {"error": "Repository not found"}
        match path.split("/")[5:]:
            case ["duplicate"]:
                return self._make(call.json["repository"], call.json)
            case ["tree", "main"]:
                return 200, [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in self.files]
            case ["preupload", "main"]:
                modes = [
                    {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in call.json["files"]
                ]
                return 200, {"files": modes}
            case ["commit", "main"]:
                return 200, {
                    "success": True,
                    "commitOid": "1" * 40,
                    "commitUrl": f"{self.url}/spaces/me/demo/commit/{'1' * 40}",
                }
        return (200, {"errors": [], "warnings": []}) if path == "/api/validate-yaml" else (404, {})

    def _make(self, name: str, asked: dict[str, Any]) -> tuple[int, object]:
        if name in self.taken:
            return 409, {"error": "You already created this space repo", "url": f"{self.url}/spaces/{name}"}
        if asked["hardware"] in self.flavors:
            status, message = self.flavors[asked["hardware"]]
            return status, {"error": message}
        return 200, {"url": f"{self.url}/spaces/{name}"}


@contextlib.contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            call = Call(self.command, self.path, body)
            if call.path.startswith(
                ("/api/repos", "/api/spaces", "/api/validate")
            ):  # not huggingface_hub's own affairs
                hub.calls.append(call)
            status, answer = hub.answer(call, self.headers.get("Authorization", "").removeprefix("Bearer "))
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            if status == 404 and call.path.startswith("/api/spaces"):
                self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = _serve  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
