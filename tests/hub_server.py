"""A hub on the loopback: repositories as folders, with as much of the API as pushing and fetching a model take."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def hub(root: Path) -> ThreadingHTTPServer:
    """On a free port; repositories lie at root/owner/name. `server.asked` lists the requests."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self._path()
            if path == "/api/repos/create":
                given = json.loads(body)
                repo = f"{given.get('organization') or 'me'}/{given['name']}"
                (root / repo).mkdir(parents=True, exist_ok=True)
                self._json({"url": f"{self._home()}/{repo}", "id": repo})
            elif path == "/api/validate-yaml":
                self._json({"errors": [], "warnings": []})
            elif "/preupload/" in path:
                files = json.loads(body)["files"]
                whole = {"uploadMode": "regular", "shouldIgnore": False}
                self._json({"files": [{"path": file["path"], **whole} for file in files]})
            elif "/commit/" in path:
                repo = path.removeprefix("/api/models/").split("/commit/")[0]
                for line in body.splitlines():
                    entry = json.loads(line)
                    if entry["key"] == "file":
                        file = root / repo / entry["value"]["path"]
                        file.parent.mkdir(parents=True, exist_ok=True)
                        file.write_bytes(base64.b64decode(entry["value"]["content"]))
                self._json({"commitUrl": f"{self._home()}/{repo}/commit/{COMMIT}", "commitOid": COMMIT})
            else:
                self._answer(404, b"{}")

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self._path()
            if path == "/api/whoami-v2":
                self._json({"name": "me", "type": "user", "orgs": []})
            elif path.startswith("/api/models/"):
                repo = "/".join(path.removeprefix("/api/models/").split("/")[:2])
                if not (root / repo).is_dir():
                    self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
                    return
                files = sorted(file for file in (root / repo).rglob("*") if file.is_file())
                names = [file.relative_to(root / repo).as_posix() for file in files]
                if "/tree/" in path:
                    self._json([_entry(root / repo, name) for name in names])
                else:
                    self._json({"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]})
            elif "/resolve/" in path:
                repo, _, rest = path[1:].partition("/resolve/")
                file = root / repo / rest.partition("/")[2]
                if not file.is_file():
                    self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
                    return
                content = file.read_bytes()
                self._answer(200, content, {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT})
            else:
                self._answer(404, b"{}")

        def _path(self) -> str:
            self.server.asked.append((self.command, self.path))  # type: ignore[attr-defined]
            return unquote(self.path.split("?")[0])

        def _home(self) -> str:
            return f"http://127.0.0.1:{self.server.server_address[1]}"

        def _json(self, value: Any) -> None:
            self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked = []  # type: ignore[attr-defined]
    return server


def _entry(repo: Path, name: str) -> dict[str, Any]:
    content = (repo / name).read_bytes()
    return {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def environment_for(server: ThreadingHTTPServer, home: Path) -> dict[str, str]:
    """Of a process that is to take this for the hub: libraries read the address once, when they are imported."""
    online = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    return online | {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}",
        "HF_HOME": str(home),
        "HF_TOKEN": "hf_none",
        "HF_HUB_DISABLE_XET": "1",
        "OMP_NUM_THREADS": "1",  # threads of several tests would wait for each other
    }
