"""T2 through the socket: a tool with `requires_auth` accepts only callers with a token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import StartDaemon, make_first_approver
from support.authority import Authority, ask
from support.definition_files import DefinitionDirectory
from support.definitions import rest_document
from upstream import Upstream

pytestmark = pytest.mark.row("T2")


def test_tool_with_requires_auth_refuses_callers_without_valid_token(
    start_daemon: StartDaemon, home: Path, definitions: DefinitionDirectory, upstream: Upstream
) -> None:
    document = rest_document(endpoint=f"{upstream.url}/now", requires_auth=True)
    definitions.put("tools.json", {"tools": [document]})
    authority = Authority(home, make_first_approver(home))
    daemon = start_daemon(
        tools_directory=str(definitions.path), rest__allowed_hosts=json.dumps([upstream.authority])
    )
    token = authority.token("nightly")
    body = {"arguments": {"city": "Oslo"}}
    batch = {"calls": [{"tool": "weather", **body}]}
    for path, sent in (("/v1/tools/weather/call", body), ("/v1/tools/weather/sse", body)):
        refused = ask(daemon.socket, "POST", path, sent)
        assert (refused.status, refused.code) == (401, "UNAUTHORIZED")
        assert "fumehood tokens new" in refused.body["error"]["message"]
    (one,) = ask(daemon.socket, "POST", "/v1/calls", batch).body["data"]["results"]
    assert one["error"]["code"] == "UNAUTHORIZED"
    client = daemon.client()
    assert client.call("weather", body["arguments"], dry_run=True).code == "UNAUTHORIZED"
    assert upstream.requests == []
    assert ask(daemon.socket, "POST", "/v1/tools/weather/call", body, token).status == 200
    (one,) = ask(daemon.socket, "POST", "/v1/calls", batch, token).body["data"]["results"]
    assert one["success"]
    assert upstream.count("/now") == 2
    authority.do("DELETE", f"/v1/tokens/{token.split('_')[1]}")
    revoked = ask(daemon.socket, "POST", "/v1/tools/weather/call", body, token)
    assert (revoked.code, upstream.count("/now")) == ("UNAUTHORIZED", 2)
