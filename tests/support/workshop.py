"""A daemon with real images and one session, for tests of programs in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conftest import Daemon, ready_image, running_daemon
from support.http import Answer
from support.wheels import only_from


def build(names: Iterable[str]) -> None:
    """Build missing images."""
    for name in names:
        ready_image(name)


@contextmanager
def workshop(
    *images: str, approver: bool = False, index: Path | None = None, **settings: str
) -> Iterator[Daemon]:
    """Run a private daemon, which must stop cleanly."""
    build(images)
    variables = {
        "FUMEHOOD_CONTAINER__IMAGES__SHELL": "shell" if "shell" in images else "python",
        "FUMEHOOD_CONTAINER__IMAGES__JAVASCRIPT": "node",
    }
    if index is not None:
        variables |= {**only_from(index), "FUMEHOOD_PACKAGES__ALLOW": '["*"]'}
    with running_daemon(variables, approver=approver, **settings) as running:
        yield running


class Session:
    """One session with its calls and files."""

    def __init__(self, daemon: Daemon, **wishes: Any) -> None:
        self.daemon = daemon
        self.http = daemon.client()
        self.id = self._made(wishes)["id"]

    def _made(self, wishes: dict[str, Any]) -> Any:
        made = self.http.post("/v1/sessions", json.dumps(wishes).encode())
        assert made.status == 200, made.body
        return made.body["data"]["session"]

    def call(self, tool: str, **arguments: Any) -> Answer:
        return self.http.call(tool, arguments, session_id=self.id)

    def shell(self, command: str) -> Any:
        """Run a shell command that must succeed in this session; return its data."""
        answer = self.call("run_shell", command=command)
        assert answer.status == 200, answer.body["error"]
        return answer.body["data"]

    def python(self, code: str) -> Any:
        answer = self.call("run_python", code=code)
        assert answer.status == 200, answer.body["error"]
        return answer.body["data"]

    def files(self, method: str, path: str, body: bytes | None = None) -> Answer:
        """Send a request to the session's files; `path` is used in the URL unescaped."""
        return self.http.request(method, f"/v1/sessions/{self.id}/files{path}", body)

    def end(self) -> None:
        self.http.request("DELETE", f"/v1/sessions/{self.id}")
        self.http.close()
