"""Registry and agents of a running engine, used by an administrator and an agent's owner."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from conftest import CLEAN_ENVIRONMENT, FUMEHOOD, Daemon, make_first_approver
from support.authority import Authority
from support.http import Answer, SocketClient

WEATHER = {
    "name": "get_weather",
    "type": "REST",
    "description": "Get the weather of a city.",
    "endpoint": "http://127.0.0.1:9/v1",
    "method": "GET",
    "category": "web",
    "parameters": {"properties": {"city": {"type": "string"}}},
}


@pytest.fixture
def admin(home: Path) -> Authority:
    """An administrator with the owner's credential, on the control socket."""
    return Authority(home, make_first_approver(home))


def run(admin: Authority, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command as the administrator."""
    return subprocess.run(
        [FUMEHOOD, *command, "--credential-stdin"],
        env={**CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(admin.home)},
        input=admin.credential + "\n", capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip


def names(answer: Answer) -> list[str]:
    return [item["name"] for item in answer.body["data"]["items"]]


@pytest.mark.row("R1")
def test_registered_tool_is_listed_at_once_and_after_restart(
    admin: Authority, start_daemon
) -> None:
    daemon: Daemon = start_daemon()
    client = daemon.client()
    assert admin.ask("POST", "/v1/tools", WEATHER).status == 200
    assert "get_weather" in names(client.get("/v1/tools"))
    assert names(client.get("/v1/tools?category=web")) == ["get_weather"]
    answer = client.call("get_weather", {"city": "Bern"})
    assert (answer.code, answer.body["error"]["retryable"]) == ("PERMISSION_DENIED", False)
    daemon.stop()
    client = start_daemon().client()
    assert "get_weather" in names(client.get("/v1/tools"))
    assert admin.ask("DELETE", "/v1/tools/get_weather@1.0.0").status == 200
    assert client.call("get_weather", {"city": "Bern"}).code == "TOOL_NOT_FOUND"


@pytest.mark.row("R1")
def test_disabled_tool_stays_disabled_across_restart_until_enabled(
    admin: Authority, start_daemon
) -> None:
    daemon: Daemon = start_daemon()
    done = run(admin, "tools", "disable", "calculator")
    assert done.returncode == 0, done.stderr
    client = daemon.client()
    assert client.calculate("1 + 1").code == "TOOL_DISABLED"
    daemon.stop()
    client = start_daemon().client()
    assert client.calculate("1 + 1").code == "TOOL_DISABLED"
    assert run(admin, "tools", "enable", "calculator").returncode == 0
    assert client.calculate("1 + 1").body["success"]


@pytest.mark.row("R1", "D4")
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/tools", WEATHER),
        ("PUT", "/v1/tools/calculator@1.0.0", WEATHER),
        ("DELETE", "/v1/tools/calculator@1.0.0", None),
        ("POST", "/v1/tools/calculator/deactivate", None),
    ],
)
def test_caller_without_credential_cannot_change_the_registry(
    method: str, path: str, body: Any, shared_daemon: Daemon
) -> None:
    content = b"" if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    refused = {"engine.sock": {"METHOD_NOT_ALLOWED", "RESOURCE_NOT_FOUND"},
               "control.sock": {"UNAUTHORIZED"}}  # fmt: skip
    for socket, codes in refused.items():
        client = SocketClient(shared_daemon.home / socket)
        assert client.request(method, path, content, headers).code in codes
        client.close()


@pytest.mark.row("R2", "R3")
def test_agent_lists_its_tools_in_order_without_fixed_parameters(
    admin: Authority, start_daemon
) -> None:
    daemon: Daemon = start_daemon()
    me = f"uid:{os.getuid()}"
    admin.ask("POST", "/v1/tools", WEATHER)
    assert admin.ask("POST", "/v1/agents", {"id": "sums", "principals": [me]}).status == 200
    assert admin.ask("PUT", "/v1/agents/sums/tools/get_weather", {"sort_order": 2}).status == 200
    bound = {"sort_order": 1, "fixed": {"precision": 2}}
    assert admin.ask("PUT", "/v1/agents/sums/tools/calculator", bound).status == 200
    client = daemon.client()
    answer = client.get("/v1/tools?agent_id=sums")
    assert names(answer) == ["calculator", "get_weather"]
    assert "precision" not in json.dumps(answer.body["data"])
    assert client.calculate("2/3", agent_id="sums").body["data"]["value"] == 0.67
    filtered = client.get("/v1/tools?agent_id=sums&categories=web&at_most=1")
    assert names(filtered) == ["get_weather"]
    assert [each["name"] for each in filtered.body["data"]["left_out"]] == ["calculator"]
    assert client.get("/v1/tools?agent_id=others").code == "RESOURCE_NOT_FOUND"
    assert client.get("/v1/tools?agent_id=sums&limit=5").code == "INVALID_PARAMS"
    assert admin.ask("DELETE", "/v1/agents/sums/tools/calculator").status == 200
    assert client.calculate("2/3", agent_id="sums").code == "PERMISSION_DENIED"
