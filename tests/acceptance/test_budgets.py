"""Budgets and usage through sockets and the command line, across restarts and kills."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from conftest import Daemon, StartDaemon, make_first_approver
from fumehood import Client, ControlClient
from fumehood.approvals.model import ApprovalState
from fumehood.cli.main import app
from fumehood.core.usage_table import BudgetStanding
from support.clients import LEAVES_SOCKETS
from support.wait import DEADLINE_S, wait_until

pytestmark = [pytest.mark.row("E4"), *LEAVES_SOCKETS]

SUM = {"expression": "1 + 1"}
ME = f"uid:{os.getuid()}"
HOW_TO = Path(__file__).parents[2] / "docs/howto/limit-what-agents-spend.md"
RULE = re.compile(r"^```toml policy\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def budgets(*rules: dict[str, Any]) -> dict[str, str]:
    """The setting as an environment variable."""
    return {"budgets": json.dumps([{"period": "total", **rule} for rule in rules])}


def code(
    client: Client, tool: str = "calculator", expression: str = "1 + 1", **options: Any
) -> str:
    """The code of a call's ending."""
    envelope = client.call(tool, {"expression": expression}, **options)
    return "OK" if envelope.error is None else envelope.error.code


def standing(client: Client | ControlClient, name: str = "b") -> BudgetStanding:
    """The only usage entry of a budget."""
    (found,) = (one for one in client.usage().budgets if one.budget == name)
    return found


def test_call_over_budget_is_refused_with_limit_and_reset_time(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(**budgets({"name": "b", "calls": 2, "period": "day"}))
    http = daemon.client()
    answers = [http.call("calculator", SUM) for _ in range(3)]
    assert [answer.code for answer in answers] == [None, None, "QUOTA_EXCEEDED"]
    refused = answers[2]
    error = refused.body["error"]
    assert refused.status == 429
    assert not error["retryable"]
    assert {name: error["details"][name] for name in ("budget", "unit", "limit", "left")} == {
        "budget": "b", "unit": "calls", "limit": 2, "left": 0,
    }  # fmt: skip
    assert 0 < error["retry_after_ms"] <= 24 * 3600 * 1000
    assert error["details"]["resets_at"] in error["message"]
    assert refused.body["metadata"]["usage"]["cost"] == "0.000000"


def test_token_and_call_budgets_apply_only_to_matching_tools(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(
        **budgets({"name": "b", "tokens": 40, "tools": ["calc*"]}, {"name": "c", "calls": 0,
                                                                   "tools": ["run_*"]})
    )  # fmt: skip
    with Client(daemon.socket) as client:
        first = client.call("calculator", SUM)
        usage = first.metadata.usage
        assert standing(client).spent == usage.input_tokens + usage.output_tokens
        refused = client.call("run_restricted_python", {"code": "1"})
        assert refused.error.code == "QUOTA_EXCEEDED"
        for _ in range(40):
            last = code(client)
            if last != "OK":
                break
        assert last == "QUOTA_EXCEEDED"
        assert code(client, expression=" + ".join("1" * 99)) == "QUOTA_EXCEEDED"


def test_budget_is_exact_after_stop_and_never_overspent_after_kill(
    start_daemon: StartDaemon,
) -> None:
    rules = budgets({"name": "b", "calls": 100})
    first = start_daemon(**rules)
    with Client(first.socket) as client:
        for _ in range(3):
            assert code(client) == "OK"
    assert first.stop() == 0
    second = start_daemon(**rules)
    with Client(second.socket) as client:
        assert standing(client).left == 97
        assert code(client) == "OK"
    second.process.send_signal(signal.SIGKILL)
    second.process.wait(timeout=DEADLINE_S)
    third = start_daemon(**rules)
    with Client(third.socket) as client:
        left = standing(client).left
        assert isinstance(left, int)
        assert 86 <= left <= 96  # two blocks of five at most


def test_only_administrator_sees_usage_of_all_principals(
    start_daemon: StartDaemon, home: Path
) -> None:
    credential = make_first_approver(home)
    daemon = start_daemon(
        **budgets({"name": "b", "calls": 9}, {"name": "each", "per": ["principal"], "calls": 5})
    )
    with ControlClient(daemon.control, credential=credential) as control:
        token = control.tokens.new("robot").secret
        with Client(daemon.socket) as mine, Client(daemon.socket, credential=token) as robots:
            assert [code(mine), code(robots), code(robots)] == ["OK", "OK", "OK"]
            own = robots.usage(["principal", "tool"])
            assert [(row.group, row.calls) for row in own.items] == [
                ({"principal": "token:robot", "tool": "calculator"}, 2)
            ]
            assert {(one.budget, one.left) for one in own.budgets} == {("b", 6), ("each", 3)}
        everybody = control.usage("principal")
        assert [(row.group["principal"], row.calls) for row in everybody.items] == [
            ("token:robot", 2), (ME, 1),
        ]  # fmt: skip
        assert everybody.total.calls == 3
        assert len([one for one in everybody.budgets if one.budget == "each"]) == 2
        assert control.usage(principal=ME).total.calls == 1


@pytest.mark.row("A1", "A3")
def test_over_budget_rule_requests_approval_instead_of_refusing(
    start_daemon: StartDaemon, home: Path
) -> None:
    """Uses the how-to page's rule; an approval lets one call over the limit and is counted."""
    (rule,) = RULE.findall(HOW_TO.read_text(encoding="utf-8"))
    policy = home / "policy.toml"
    policy.write_text(rule, encoding="utf-8")
    policy.chmod(0o600)
    credential = make_first_approver(home)
    daemon = start_daemon(policy_file=str(policy), **budgets({"name": "b", "calls": 1}))
    with (
        Client(daemon.socket) as client,
        ControlClient(daemon.control, credential=credential) as control,
    ):
        assert code(client) == "OK"  # control: while there is enough, nobody is asked
        asked = [client.call("calculator", {"expression": text}).error for text in "12"]
        ids = [error.approval_id for error in asked if error is not None and error.approval_id]
        assert [error.code for error in asked if error] == ["REQUIRES_HUMAN_APPROVAL"] * 2
        control.approvals.deny(ids[0], version=None, reason="no")
        control.approvals.approve(ids[1], version=None)
        wait_until(lambda: control.approvals.show(ids[1]).state is ApprovalState.DONE)
        assert (standing(client).spent, standing(client).left) == (2, 0)


def run(daemon: Daemon, *arguments: str, typed: str = "") -> Result:
    """Run `fumehood usage` against this daemon."""
    environment = {"FUMEHOOD_HOME": str(daemon.home), "XDG_RUNTIME_DIR": None}
    return CliRunner(env=environment).invoke(app, ["usage", *arguments], input=typed)


def test_usage_command_prints_json_csv_and_all_principals(
    start_daemon: StartDaemon, home: Path
) -> None:
    credential = make_first_approver(home)
    daemon = start_daemon(**budgets({"name": "b", "calls": 9}))
    with Client(daemon.socket) as client:
        assert code(client) == "OK"
        assert code(client, "=1+1|x", expression="1") == "TOOL_NOT_FOUND"
    shown = json.loads(run(daemon, "--by", "tool", "--by", "day").stdout)
    assert [row["group"]["tool"] for row in shown["items"]] == ["=1+1|x", "calculator"]
    assert shown["budgets"][0]["left"] == 8
    lines = list(csv.reader(io.StringIO(run(daemon, "--csv").stdout)))
    assert [line[:3] for line in lines] == [
        ["tool", "calls", "errors"], ["'=1+1|x", "1", "1"], ["calculator", "1", "0"],
    ]  # fmt: skip
    assert json.loads(run(daemon, "--until", "1h").stdout)["total"]["calls"] == 0
    everybody = run(daemon, "--all", "--credential-stdin", typed=f"{credential}\n")
    assert json.loads(everybody.stdout)["total"]["calls"] == 2


WRONG = [
    pytest.param(["--by", "colour"], 2, "principal", id="unknown-group"),
    pytest.param(["--since", "yesterday"], 2, "--since", id="invalid-since"),
    pytest.param(["--until", "x"], 2, "--until", id="invalid-until"),
    pytest.param(["--csv", "--json"], 2, "Choose --csv or --json", id="csv-and-json"),
    pytest.param(["--principal", "uid:0"], 2, "--all", id="other-principal-without-all"),
    pytest.param(["--all"], 2, "credential", id="no-credential"),
    pytest.param(["--csv", "--by", "tool,tool"], 2, "twice", id="csv-with-duplicate-group"),
]


@pytest.mark.parametrize(("arguments", "status", "word"), WRONG)
def test_usage_command_with_invalid_options_is_refused_with_message(
    shared_daemon: Daemon, arguments: list[str], status: int, word: str
) -> None:
    done = run(shared_daemon, *arguments)
    assert done.exit_code == status
    assert word in done.stdout + done.stderr
    if "--csv" in arguments:
        assert done.stdout == ""


def test_budget_matching_no_tool_is_logged_at_startup(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(
        **budgets({"name": "typo", "calls": 1, "tools": ["calculater"]},
                  {"name": "good", "calls": 1, "tools": ["calculator"]})
    )  # fmt: skip
    told = [line for line in daemon.log.splitlines() if "budget.covers_no_tool" in line]
    assert len(told) == 1
    assert "typo" in told[0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "b"}, {"name": "b", "calls": -1}, {"name": "b", "calls": 1, "per": ["day"]},
        {"name": "b", "money": "NaN"}, {"name": "b", "calls": 1, "call": 1}, {"name": ";", "calls": 1},
    ],
)  # fmt: skip
def test_invalid_budget_fails_startup(start_daemon: StartDaemon, wrong: dict[str, Any]) -> None:
    daemon = start_daemon(ready=False, budgets=json.dumps([wrong]))
    assert daemon.process.wait(timeout=DEADLINE_S) == 2
    assert "budgets" in daemon.log
