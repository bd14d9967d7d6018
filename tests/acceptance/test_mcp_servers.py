"""Tools of upstream MCP servers through the sockets: listed, called, denied and approved."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import FUMEHOOD, NPM, StartDaemon, make_first_approver
from support.authority import ask
from support.wait import wait_until

TESTER = Path(__file__).parents[1] / "support" / "mcp_upstream" / "tester.py"


@pytest.mark.row("D3", "R4", "A1", "S1")
def test_upstream_mcp_tool_is_subject_to_policy_validation_and_approval(
    start_daemon: StartDaemon, home: Path
) -> None:
    credential = make_first_approver(home)
    server = {"command": [sys.executable, str(TESTER)], "place": "host", "harmless": ["add"]}
    rules = home / "rules.toml"
    rules.write_text('[[rules]]\nid = "no-figures"\ntools = ["tester__draw"]\ndecision = "deny"\n')
    rules.chmod(0o600)
    servers = json.dumps({"tester": server})
    daemon = start_daemon(mcp_servers=servers, policy_file=str(rules))
    client = daemon.client()
    listed = "/v1/tools?type=MCP&limit=100"
    wait_until(lambda: client.get(listed).body["data"]["items"])
    page = client.get(listed).body["data"]
    tools = {tool["name"]: tool for tool in page["items"]}
    assert page["sources"]["tester__add"] == "mcp"
    assert not tools["tester__add"]["dangerous"]
    assert tools["tester__say"]["dangerous"]
    added = client.call("tester__add", {"a": 1, "b": 2}).body
    assert added["data"] == {"result": 3}
    assert added["metadata"]["sandbox"]["placement"] == "host"
    assert client.call("tester__draw").code == "PERMISSION_DENIED"
    lint = [str(FUMEHOOD), "tools", "lint", "tester__add", "--json"]
    reviewed = subprocess.run(lint, env=daemon.environment, capture_output=True, timeout=600)
    assert b'"tester__add"' in reviewed.stdout
    assert b"invalid-definition" not in reviewed.stdout  # although it says `sandboxed: false`
    wrong = client.call("tester__add", {"a": "much", "b": 2})
    assert wrong.code == "INVALID_PARAMS"
    asked = client.call("tester__say", {"text": "hi"})
    assert asked.code == "REQUIRES_HUMAN_APPROVAL"
    approval = asked.body["error"]["approval_id"]
    decision = {"approval_id": approval, "decision": {"decision": "approve"}}
    path, body = "/v1/approvals/decisions", {"items": [decision]}
    decided = ask(daemon.control, "POST", path, body, credential)
    assert decided.code is None, decided.body
    call = asked.body["metadata"]["call_id"]
    wait_until(lambda: client.get(f"/v1/calls/{call}").body["data"].get("envelope"))
    answer = client.get(f"/v1/calls/{call}").body["data"]["envelope"]
    assert answer["data"] == {"result": "hi"}
    # Whom the engine trusts is decided by the configuration, not by who registers a definition.
    false = {"name": "tester__wipe", "type": "MCP", "description": "Wipe.", "dangerous": False}
    assert ask(daemon.control, "POST", "/v1/tools", false, credential).code is None
    assert client.call("tester__wipe").code == "SANDBOX_UNAVAILABLE"


@pytest.mark.needs("npm")
@pytest.mark.row("D3")
def test_reference_mcp_servers_tools_are_called_and_gated(
    start_daemon: StartDaemon, home: Path
) -> None:
    shared = home / "shared"
    shared.mkdir()
    (shared / "a.txt").write_text("whole\n")
    (home / "secret.txt").write_text("not shared")
    harmless = ["read_text_file", "list_directory", "echo", "get-sum", "get-tiny-image"]
    servers = {
        name: {"command": [str(NPM / program), *words], "place": "host", "harmless": harmless}
        for name, program, words in (
            ("files", "mcp-server-filesystem", [str(shared)]),
            ("every", "mcp-server-everything", []),
        )
    }
    client = start_daemon(mcp_servers=json.dumps(servers)).client()
    listed = "/v1/tools?type=MCP&limit=100"

    def names() -> set[str]:
        return {tool["name"] for tool in client.get(listed).body["data"]["items"]}

    wait_until(lambda: {"files__write_file", "every__echo"} <= names())
    read = client.call("files__read_text_file", {"path": str(shared / "a.txt")})
    assert read.body["data"]["content"] == "whole\n", read.body
    outside = client.call("files__read_text_file", {"path": str(home / "secret.txt")})
    assert outside.code == "EXECUTION_ERROR"
    assert "not shared" not in json.dumps(outside.body)
    written = {"path": str(shared / "b.txt"), "content": "b"}
    assert client.call("files__write_file", written).code == "REQUIRES_HUMAN_APPROVAL"
    assert not (shared / "b.txt").exists()
    said = client.call("every__echo", {"message": "hi"}).body
    assert said["data"] == {"text": "Echo: hi"}
    drawn = client.call("every__get-tiny-image").body
    (image,) = drawn["data"]["files"]
    assert image["content_type"] == "image/png"
