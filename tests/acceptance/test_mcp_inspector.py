"""D3: the MCP inspector's command line, unmodified, over stdio and over HTTP with a token."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from conftest import FUMEHOOD, NPM, Daemon, StartDaemon, make_first_approver
from support.authority import Authority

pytestmark = [pytest.mark.needs("npm"), pytest.mark.row("D3")]

PATIENCE_S = 60


def over_stdio(daemon: Daemon) -> list[str]:
    """The server command for the inspector, which passes on hardly any environment variables."""
    return [str(FUMEHOOD), "mcp", "--socket", str(daemon.socket)]


def inspect(daemon: Daemon, target: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    """Run the inspector once, with its own files in the daemon's directory."""
    return subprocess.run(
        [NPM / "mcp-inspector", "--cli", *target, *options],
        env={**daemon.environment, "HOME": str(daemon.home)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def result_of(run: subprocess.CompletedProcess[str]) -> Any:
    """The server's result as printed by the inspector."""
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout)


def test_inspector_strict_mode_accepts_tools_and_calls_one(shared_daemon: Daemon) -> None:
    listed = inspect(shared_daemon, over_stdio(shared_daemon), "--method", "tools/list", "--strict")
    names = [tool["name"] for tool in result_of(listed)["tools"]]
    assert {"calculator", "run_python", "list_tools", "run_tool"} <= set(names)
    assert "Error: tool" not in listed.stderr
    sums = ("--tool-name", "calculator", "--tool-arg", "expression=5! + 2**10")
    called = result_of(
        inspect(shared_daemon, over_stdio(shared_daemon), "--method", "tools/call", *sums)
    )
    assert (called["isError"], called["structuredContent"]) == (
        False,
        {"value": 1144, "text": "1144"},
    )


def test_inspector_shows_refused_call_as_tool_error_result(shared_daemon: Daemon) -> None:
    wrong = ("--tool-name", "calculator", "--tool-arg", "expression=open('a')")
    ran = inspect(shared_daemon, over_stdio(shared_daemon), "--method", "tools/call", *wrong)
    called = json.loads(ran.stdout)
    assert called["isError"] is True
    assert called["content"][0]["text"].startswith("SANDBOX_VIOLATION: ")


def test_inspector_over_http_calls_with_token_and_is_refused_without(
    start_daemon: StartDaemon, home: Path
) -> None:
    owner = make_first_approver(home)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    daemon = start_daemon(tcp=f"127.0.0.1:{port}")
    token = Authority(home, owner).token("inspector")
    address = [f"http://127.0.0.1:{port}/mcp"]
    call = ("--method", "tools/call", "--tool-name", "calculator", "--tool-arg", "expression=6*7")
    refused = inspect(daemon, address, *call)
    assert refused.returncode != 0
    bearer = ("--header", f"Authorization: Bearer {token}")
    called = result_of(inspect(daemon, address, *call, *bearer))
    assert called["structuredContent"]["value"] == 42
