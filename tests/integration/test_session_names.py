"""A session's name stands for its id at every entrance, for its owner and for nobody else."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from conftest import Daemon
from fumehood import Client
from fumehood.client import ControlClient
from support.container import told
from support.http import Answer, SocketClient
from support.scripted_daemon import running_scripted_daemon

pytestmark = [pytest.mark.row("S6", "D1")]

BODIES: dict[str, Any] = {
    "/v1/sessions/{session_id}/restore": {"snapshot_id": "none"},
    "/v1/sessions/{session_id}/snapshots": {},
    "/v1/sessions/{session_id}/fork": {},
}
LAST = ("DELETE", "/v1/sessions/{session_id}")
"""Ends the session, so it is called after the others."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_scripted_daemon(approver=True) as running:
        yield running


@pytest.fixture
def session(daemon: Daemon) -> Iterator[str]:
    with Client(daemon.socket) as client:
        made = client.create_session(name="build", memory_mb=128).id
        yield made
        client.end_session(made)


@pytest.fixture
def stranger(daemon: Daemon) -> Iterator[SocketClient]:
    with ControlClient(daemon.control, credential=daemon.credential) as control:
        secret = control.tokens.new(f"other-{secrets.token_hex(4)}", scopes=["call"]).secret
    client = SocketClient(daemon.socket, secret)
    yield client
    client.close()


def operations(client: SocketClient) -> list[tuple[str, str]]:
    """Every operation of a socket on one session, by its OpenAPI document."""
    paths = client.get("/v1/openapi.json").body["paths"]
    found = [
        (method.upper(), path)
        for path, methods in paths.items()
        for method in methods
        if "{session_id}" in path and method in ("get", "put", "post", "delete")
    ]
    return [*(one for one in found if one != LAST), LAST]


def ask(client: SocketClient, method: str, path: str, reference: str) -> Answer:
    body = json.dumps(BODIES[path]).encode() if method == "POST" and path in BODIES else None
    headers = {"content-type": "application/json"} if body is not None else {}
    filled = path.replace("{session_id}", reference).replace("{path}", "a.txt")
    filled = filled.replace("{process}", "p").replace("{snapshot_id}", "s").replace("{port}", "80")
    if method == "PUT":
        body = b""
    return client.request(method, filled, body, headers)


def knows(answer: Answer) -> bool:
    """Whether the answer is about the session, and not that there is none."""
    return answer.code is None or "no such session" not in answer.body["error"]["message"].lower()


def test_every_operation_takes_the_name_of_the_callers_own_session(
    daemon: Daemon, session: str, stranger: SocketClient
) -> None:
    client = daemon.client()
    found = operations(client)
    assert len(found) >= 20
    for method, path in found:
        for reference in ("build", session):
            refused = ask(stranger, method, path, reference)
            assert refused.code == "RESOURCE_NOT_FOUND", (method, path)
            assert "You have no such session" in refused.body["error"]["message"]
        assert knows(ask(client, method, path, "build")), (method, path)
        assert not knows(ask(client, method, path, "other")), (method, path)
    assert client.get(f"/v1/sessions/{session}").body["data"]["session"]["state"] == "ended"


def test_every_operation_of_operators_takes_a_name_that_one_principal_uses(
    daemon: Daemon, session: str, stranger: SocketClient
) -> None:
    client = SocketClient(daemon.control, daemon.credential)
    daemon.clients.append(client)
    found = operations(client)
    assert len(found) >= 8
    for method, path in found[:-1]:
        assert knows(ask(client, method, path, "build")), (method, path)
        assert not knows(ask(client, method, path, "other")), (method, path)
    body = json.dumps({"name": "build", "memory_mb": 128}).encode()
    theirs = stranger.post("/v1/sessions", body).body["data"]["session"]["id"]
    for method, path in found:
        refused = ask(client, method, path, "build")
        assert refused.code == "RESOURCE_NOT_FOUND", (method, path)
        assert "Several principals" in refused.body["error"]["message"]
    assert stranger.request("DELETE", "/v1/sessions/build").code is None
    shown = client.get("/v1/sessions/build").body["data"]["session"]
    assert shown["id"] == session != theirs
    assert ask(client, *LAST, "build").body["data"]["session"]["state"] == "ended"


def test_name_in_the_options_of_a_call_becomes_the_id(daemon: Daemon, session: str) -> None:
    """In the log, for budgets and keys, also over MCP and in a batch."""
    client = daemon.client()
    call_ids = []
    answer = client.call("run_python", {"code": told()}, session_id="build")
    assert answer.body["success"], answer.body
    assert answer.body["data"]["session"]["id"] == session
    call_ids.append(answer.body["metadata"]["call_id"])
    batch = {"calls": [
        {"tool": "run_python", "arguments": {"code": told()}, "options": {"session_id": "build"}}
    ]}  # fmt: skip
    several = client.post("/v1/calls", json.dumps(batch).encode()).body
    (one,) = several["data"]["results"]
    call_ids.append(one["metadata"]["call_id"])
    request = {
        "jsonrpc": "2.0", "id": 1, "method": "tools/call",
        "params": {"name": "run_python", "arguments": {"code": told()}},
    }  # fmt: skip
    answered = client.post("/mcp?session_id=build", json.dumps(request).encode())
    assert session in json.dumps(answered.body), answered.body
    for call_id in call_ids:
        record = client.get(f"/v1/calls/{call_id}").body
        assert session in json.dumps(record), record
    keyed = [
        client.call("run_python", {"code": told()}, session_id=reference, idempotency_key="k").body
        for reference in ("build", session)
    ]
    assert ["idempotent_replay" in one["metadata"] for one in keyed] == [False, True]
    usage = client.get("/v1/usage?by=session&session=build").body["data"]
    assert [row["group"]["session"] for row in usage["items"]] == [session]


def test_session_cannot_have_the_name_that_makes_one(daemon: Daemon) -> None:
    client = daemon.client()
    refused = client.post("/v1/sessions", b'{"name": "new", "memory_mb": 128}')
    assert refused.code == "INVALID_PARAMS"
    assert refused.body["error"]["fields"] == ["name"]
    assert "?session_id=new" in refused.body["error"]["message"]
    twin = client.post("/v1/sessions", b'{"name": "new-1", "memory_mb": 128}')
    assert twin.code is None, twin.body
    assert client.request("DELETE", "/v1/sessions/new-1").code is None


def test_call_in_anothers_session_is_refused_by_name_and_id(
    daemon: Daemon, session: str, stranger: SocketClient
) -> None:
    for reference in ("build", session, "other"):
        refused = stranger.call("run_python", {"code": told()}, session_id=reference)
        assert refused.code == "RESOURCE_NOT_FOUND"
        assert "You have no such session" in refused.body["error"]["message"]
