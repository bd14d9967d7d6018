"""REST tools through the sockets: defined, called, approved, without leaking secrets."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest

from conftest import FUMEHOOD, Daemon, StartDaemon, make_first_approver
from support.authority import ask
from support.definition_files import DefinitionDirectory
from support.file_keyring import FileKeyring
from support.wait import wait_until
from upstream import Received, Reply, Upstream

SECRET = "canary-7f3a9c-of-the-weather"
HEADERS = {"authorization": "Bearer ${secret:weather_key}"}


def definition(upstream: Upstream, **fields: Any) -> dict[str, Any]:
    return {
        "name": "get_weather",
        "type": "REST",
        "description": "Read the weather of a city.",
        "method": "GET",
        "endpoint": f"{upstream.url}/cities/{{city}}/now",
        "read_only": True,
        "parameters": {
            "properties": {"city": {"type": "string"}, "unit": {"type": "string"}},
            "required": ["city"],
        },
        **fields,
    }


def start(start_daemon: StartDaemon, upstream: Upstream, **settings: str) -> Daemon:
    """Start a daemon that may reach the service, with one secret for one tool."""
    secret = {"env": "WEATHER_KEY", "tools": ["get_weather"], "hosts": ["127.0.0.1"]}
    return start_daemon(
        variables={"WEATHER_KEY": SECRET},
        rest__allowed_hosts=json.dumps([upstream.authority]),
        secrets=json.dumps({"weather_key": secret}),
        **settings,
    )


def run(daemon: Daemon, *arguments: str, credential: str | None = None) -> str:
    more = () if credential is None else ("--credential-stdin",)
    done = subprocess.run(
        [str(FUMEHOOD), *arguments, *more], env=daemon.environment, capture_output=True,
        timeout=600, input=f"{credential}\n".encode(),
    )  # fmt: skip
    return done.stdout.decode() + done.stderr.decode()


@pytest.mark.row("T5", "R4", "E8")
def test_rest_tool_secret_is_sent_upstream_but_never_shown_or_stored(
    start_daemon: StartDaemon, definitions: DefinitionDirectory, upstream: Upstream
) -> None:
    definitions.put("weather.json", definition(upstream, headers=HEADERS))
    daemon = start(start_daemon, upstream, tools_directory=str(definitions.path), log_level="debug")
    client = daemon.client()
    answer = client.call("get_weather", {"city": "Bad Ems", "unit": "c"})
    assert answer.status == 200, answer.body
    (sent,) = upstream.requests
    assert sent.target == "/cities/Bad%20Ems/now?unit=c"
    assert sent.headers["authorization"] == f"Bearer {SECRET}"
    assert answer.body["data"]["headers"]["authorization"] == "Bearer [redacted]"
    assert answer.body["metadata"]["performance"]["network_ms"] > 0
    upstream.script("/cities/X/now", Reply(500, SECRET.encode(), content_type="text/plain"))
    failed = client.call("get_weather", {"city": "X"})
    assert failed.code == "NETWORK_ERROR"
    assert failed.body["error"]["details"]["body"] == "[redacted]"
    assert client.call("get_weather", {"city": ".."}).code == "INVALID_PARAMS"
    shown = [
        json.dumps([answer.body, failed.body, client.get("/v1/tools/get_weather").body]),
        json.dumps(client.get("/v1/calls?limit=10").body),
        run(daemon, "tools", "show", "get_weather"),
        run(daemon, "config", "show"),
        run(daemon, "call", "get_weather", '{"city": "Bonn"}', "--dry-run"),
        run(daemon, "call", "get_weather", '{"city": "Bonn"}', "--stream"),
    ]
    assert daemon.stop() == 0
    assert "${secret:weather_key}" in shown[2]
    kept = [file for file in Path(daemon.home).rglob("*") if file.is_file()]
    assert kept
    assert not [text for text in (*shown, daemon.log) if SECRET in text]
    assert not [file for file in kept if SECRET.encode() in file.read_bytes()]


@pytest.mark.row("T5", "R1")
def test_registering_tool_with_unbound_secret_is_refused(
    start_daemon: StartDaemon, home: Path, upstream: Upstream
) -> None:
    credential = make_first_approver(home)
    daemon = start(start_daemon, upstream)

    def register(document: dict[str, Any]) -> Any:
        return ask(daemon.home / "control.sock", "POST", "/v1/tools", document, credential)

    client = daemon.client()
    assert register(definition(upstream, headers=HEADERS)).status == 200
    assert client.call("get_weather", {"city": "Oslo"}).status == 200
    refused = register(definition(upstream, name="thief", headers=HEADERS))
    assert refused.code == "INVALID_PARAMS"
    assert refused.body["error"]["details"]["faults"] == [
        "headers: the secret 'weather_key' is not bound to the tool thief"
    ]
    moved = definition(
        upstream, version="2.0.0", headers=HEADERS, endpoint="https://evil.example/{city}"
    )
    assert register(moved).body["error"]["details"]["faults"] == [
        "headers: the secret 'weather_key' is not bound to the endpoint's host evil.example"
    ]
    unknown = register(definition(upstream, name="other", headers={"x-key": "${secret:nothing}"}))
    assert "has no secret 'nothing'" in unknown.body["error"]["message"]
    assert register(definition(upstream, name="other")).status == 200  # twin
    assert client.call("thief", {"city": "Oslo"}).code == "TOOL_NOT_FOUND"
    assert len(upstream.requests) == 1


@pytest.mark.row("T5", "A1", "A5")
def test_dangerous_rest_tool_sends_one_request_after_approval(
    start_daemon: StartDaemon, home: Path, definitions: DefinitionDirectory, upstream: Upstream
) -> None:
    credential = make_first_approver(home)
    order = definition(upstream, method="POST", read_only=False, dangerous=True)
    definitions.put("weather.json", order)
    daemon = start(start_daemon, upstream, tools_directory=str(definitions.path))
    client = daemon.client()
    asked = client.call("get_weather", {"city": "Oslo", "unit": "c"})
    assert asked.code == "REQUIRES_HUMAN_APPROVAL"
    assert upstream.requests == []
    approval_id = asked.body["error"]["approval_id"]
    run(daemon, "approvals", "approve", approval_id, "--yes", credential=credential)
    call_id = asked.body["metadata"]["call_id"]
    wait_until(lambda: client.get(f"/v1/calls/{call_id}").body["data"]["envelope"] is not None)
    answer = client.get(f"/v1/calls/{call_id}").body["data"]["envelope"]
    assert answer["data"]["method"] == "POST"
    (sent,) = upstream.requests
    assert (sent.method, sent.path, sent.json) == ("POST", "/cities/Oslo/now", {"unit": "c"})
    denied = client.call("get_weather", {"city": "Bern"})
    approval_id = denied.body["error"]["approval_id"]
    run(daemon, "approvals", "deny", approval_id, "--reason=No.", credential=credential)
    assert client.call("get_weather", {"city": "Bern"}).code == "APPROVAL_DENIED"
    assert daemon.stop() == 0
    assert len(upstream.requests) == 1


def in_pages(request: Received) -> Reply:
    page = int(dict(parse_qsl(request.query)).get("page", "1"))
    days = [{"day": f"{page}-{number}"} for number in range(2)] if page < 4 else []
    return Reply(body=json.dumps({"days": days}).encode())


@pytest.mark.row("T5", "E5", "R4")
def test_command_line_all_option_fetches_every_upstream_page(
    start_daemon: StartDaemon, definitions: DefinitionDirectory, upstream: Upstream
) -> None:
    upstream.script("/cities/Oslo/now", in_pages)
    fields = {
        "parameters": {
            "properties": {"city": {"type": "string"}, "cursor": {"type": "string"}},
            "required": ["city"],
        },
        "response": {"items": "/days", "cursor_parameter": "page", "counts": "pages"},
    }
    definitions.put("weather.json", definition(upstream, **fields))
    daemon = start(start_daemon, upstream, tools_directory=str(definitions.path))
    said = run(daemon, "call", "get_weather", '{"city": "Oslo"}', "--all")
    lines = [json.loads(line)["day"] for line in said.splitlines()]
    assert lines == [f"{page}-{number}" for page in (1, 2, 3) for number in (0, 1)]
    assert [request.query for request in upstream.requests] == ["", "page=2", "page=3", "page=4"]
    assert daemon.stop() == 0


@pytest.mark.row("T5", "E8")
def test_keyring_secret_is_sent_upstream_but_never_shown(
    start_daemon: StartDaemon, definitions: DefinitionDirectory, upstream: Upstream, tmp_path: Path
) -> None:
    keyring = FileKeyring(tmp_path / "keyring.json")
    keyring.set_password("weather", "fumehood", SECRET)
    entry = {"service": "weather", "username": "fumehood"}
    secret = {"keyring": entry, "tools": ["get_weather"], "hosts": ["127.0.0.1"]}
    definitions.put("weather.json", definition(upstream, headers=HEADERS))
    daemon = start_daemon(
        variables={
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "PYTHON_KEYRING_BACKEND": "support.file_keyring.FileKeyring",
            "FILE_KEYRING": str(tmp_path / "keyring.json"),
        },
        rest__allowed_hosts=json.dumps([upstream.authority]),
        secrets=json.dumps({"weather_key": secret}),
        tools_directory=str(definitions.path),
    )
    client = daemon.client()
    answer = client.call("get_weather", {"city": "Oslo"})
    assert upstream.requests[0].headers["authorization"] == f"Bearer {SECRET}"
    assert answer.body["data"]["headers"]["authorization"] == "Bearer [redacted]"
    keyring.set_password("weather", "fumehood", "")
    empty = client.call("get_weather", {"city": "Oslo"}).body["error"]["message"]
    assert "has no usable value" in empty
    assert "keyring" not in empty  # the remedy is the operator's, in the log
    (tmp_path / "keyring.json").unlink()
    missing = client.call("get_weather", {"city": "Oslo"})
    assert (missing.code, len(upstream.requests)) == ("EXECUTION_ERROR", 1)
    assert "no such entry" in missing.body["error"]["message"]
    assert daemon.stop() == 0
    assert "Set its keyring's entry" in daemon.log
    assert SECRET not in json.dumps(answer.body) + daemon.log + run(daemon, "config", "show")
