"""Rate limits through sockets and the command line, across restarts and kills."""

from __future__ import annotations

import json
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from conftest import Daemon, StartDaemon, make_first_approver
from fumehood import AsyncClient, Client, ControlClient
from fumehood.cli.main import app
from support.clients import LEAVES_SOCKETS
from support.definition_files import DefinitionDirectory
from support.definitions import rest_document
from support.packages import install
from support.wait import DEADLINE_S, wait_until

pytestmark = [pytest.mark.row("P5"), *LEAVES_SOCKETS]

SUM = {"expression": "1 + 1"}
LONG = 86_400
"""A period in seconds, too long for any test to regain a call."""

PACES = """
from fumehood import tool

@tool(sandboxed=False, rate_limit=3, description="Act.")
async def act() -> int:
    return 1

tools = [act]
"""


def rates(*rules: dict[str, Any]) -> dict[str, str]:
    """The setting as an environment variable."""
    return {
        "rate_limits": json.dumps(
            [{"tool": "calculator", "period_seconds": LONG, **rule} for rule in rules]
        )
    }


def code(client: Client, **options: Any) -> str:
    """The code of a call's ending."""
    envelope = client.call("calculator", SUM, **options)
    return "OK" if envelope.error is None else envelope.error.code


def stored(daemon: Daemon) -> int:
    """The stored time at which the only counter is free again."""
    with closing(sqlite3.connect(f"file:{daemon.home}/state.db?mode=ro", uri=True)) as database:
        ((free_at,),) = database.execute("SELECT free_at FROM rate_limits")
    return int(free_at)


def test_call_over_rate_limit_is_refused_with_retry_after(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(**rates({"limit": 2}))
    http = daemon.client()
    answers = [http.call("calculator", SUM) for _ in range(3)]
    assert [answer.code for answer in answers] == [None, None, "RATE_LIMITED"]
    refused = answers[2]
    error = refused.body["error"]
    assert refused.status == 429
    assert error["retryable"] is True
    assert LONG / 4 * 1000 < error["retry_after_ms"] <= LONG / 2 * 1000
    assert int(refused.headers["retry-after"]) == -(-error["retry_after_ms"] // 1000)
    assert error["details"] == {
        "limit": "configuration", "tool": "calculator", "per": "all", "calls": 2,
        "period_seconds": LONG, "burst": 2,
    }  # fmt: skip
    assert http.call("run_restricted_python", {"code": "1"}).code is None  # the twin


def test_rate_limit_in_tool_definition_is_enforced(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    daemon = start_daemon(variables=install(tmp_path, "paces", PACES), host_tools="act")
    http = daemon.client()
    answers = [http.call("act") for _ in range(4)]
    assert [answer.code for answer in answers] == [None, None, None, "RATE_LIMITED"]
    error = answers[3].body["error"]
    assert error["details"]["limit"] == "definition"
    assert 0 < error["retry_after_ms"] <= 20_000


def test_per_principal_limits_are_separate_and_do_not_leak_other_names(
    start_daemon: StartDaemon, home: Path
) -> None:
    credential = make_first_approver(home)
    daemon = start_daemon(**rates({"limit": 1, "per": "principal"}, {"limit": 3, "per": "all"}))
    with ControlClient(daemon.control, credential=credential) as control:
        first, second = (control.tokens.new(name).secret for name in ("robot", "other"))
    with (
        Client(daemon.socket) as mine,
        Client(daemon.socket, credential=first) as robots,
        Client(daemon.socket, credential=second) as others,
    ):
        assert [code(mine), code(mine), code(robots)] == ["OK", "RATE_LIMITED", "OK"]
        assert code(others) == "OK"
        refused = mine.call("calculator", SUM)
        assert "robot" not in refused.model_dump_json()
        assert "other" not in json.dumps(refused.error.details)


def test_rate_limit_count_survives_stop_and_kill(start_daemon: StartDaemon) -> None:
    rules = rates({"limit": 3})
    first = start_daemon(**rules)
    with Client(first.socket) as client:
        assert [code(client), code(client)] == ["OK", "OK"]
    assert first.stop() == 0
    second = start_daemon(**rules)
    before = stored(second)
    with Client(second.socket) as client:
        assert [code(client), code(client)] == ["OK", "RATE_LIMITED"]
    wait_until(lambda: stored(second) > before)  # it is written behind the answer
    second.process.send_signal(signal.SIGKILL)
    second.process.wait(timeout=DEADLINE_S)
    with Client(start_daemon(**rules).socket) as client:
        assert code(client) == "RATE_LIMITED"


@pytest.mark.anyio
async def test_call_over_burst_waits_if_max_wait_is_configured(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(
        **rates({"limit": 50, "burst": 1, "period_seconds": 1, "max_wait_seconds": 60})
    )
    async with AsyncClient(daemon.socket) as client:
        for _ in range(5):
            assert (await client.call("calculator", SUM)).success


def test_rate_limit_is_shown_by_dry_run_command_line_and_configuration(
    start_daemon: StartDaemon, definitions: DefinitionDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    definitions.put("weather.json", {"tools": [rest_document(name="weather", rate_limit=7)]})
    settings = rates({"limit": 1})
    daemon = start_daemon(tools_directory=str(definitions.path), **settings)
    for name, value in daemon.environment.items():
        monkeypatch.setenv(name, value)
    run = CliRunner().invoke
    assert json.loads(run(app, ["tools", "show", "weather"]).stdout)["rate_limit"] == 7
    call = ["call", "calculator", json.dumps(SUM)]
    for _ in range(2):
        planned = json.loads(run(app, [*call, "--dry-run", "--json"]).stdout)
        assert planned["data"]["would_run"] is True
    assert run(app, call).exit_code == 0
    refused = run(app, [*call, "--json"])
    assert refused.exit_code == 1
    assert json.loads(refused.stdout)["error"]["code"] == "RATE_LIMITED"
    planned = json.loads(run(app, [*call, "--dry-run", "--json"]).stdout)
    assert planned["data"]["refused_with"] == "RATE_LIMITED"
    assert planned["data"]["rate_limit"]["retry_after_ms"] > 0
    shown = run(app, ["config", "show", "--json"])
    assert shown.exit_code == 0
    assert "calculator" in shown.stdout
