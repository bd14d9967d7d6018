"""A daemon with an approver, and requests to its control socket."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.http import Answer, SocketClient


@dataclass
class Authority:
    """A daemon's two sockets and its owner's credential."""

    home: Path
    credential: str

    @property
    def engine_socket(self) -> Path:
        return self.home / "engine.sock"

    @property
    def control_socket(self) -> Path:
        return self.home / "control.sock"

    def ask(
        self, method: str, path: str, body: Any = None, credential: str | None = None
    ) -> Answer:
        """Send a request to the control socket, by default as the owner."""
        given = self.credential if credential is None else credential
        return ask(self.control_socket, method, path, body, given)

    def do(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Send a request that must succeed and return its data."""
        answer = self.ask(method, path, body)
        assert answer.code is None, answer.body["error"]
        return answer.body["data"]

    def token(self, name: str = "ci", **fields: Any) -> str:
        """Create a token and return its secret."""
        return self.do("POST", "/v1/tokens", {"name": name, **fields})["secret"]

    def agent(
        self, agent_id: str, *principals: str, tools: tuple[str, ...] = (), **fields: Any
    ) -> None:
        """Create an agent with tools."""
        body = {"id": agent_id, "principals": list(principals), **fields}
        self.do("POST", "/v1/agents", body)
        for order, tool in enumerate(tools):
            self.do("PUT", f"/v1/agents/{agent_id}/tools/{tool}", {"sort_order": order})


def ask(
    socket: Path, method: str, path: str, body: Any = None, credential: str | None = None
) -> Answer:
    """Send one request on its own connection."""
    client = SocketClient(socket, credential)
    try:
        if body is None:
            return client.request(method, path)
        kind = {"content-type": "application/json"}
        return client.request(method, path, json.dumps(body).encode(), kind)
    finally:
        client.close()


def calculate(socket: Path, credential: str | None = None, **options: Any) -> Answer:
    """Calculate `1 + 1` with this credential."""
    body = {"arguments": {"expression": "1 + 1"}, "options": options}
    return ask(socket, "POST", "/v1/tools/calculator/call", body, credential)


def make_first_approver(command: list[str], environment: dict[str, str], **more: Any) -> str:
    """Create the first approver and return the credential `approvers init` prints."""
    made = subprocess.run(
        [*command, "approvers", "init", "owner"],
        env=environment, capture_output=True, timeout=600, **more,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return made.stdout.decode().strip()
