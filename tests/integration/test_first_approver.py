"""A home without an approver: the daemon says so at its start, and a refusal names a way out."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from conftest import FUMEHOOD, Daemon, StartDaemon, make_first_approver

ASKS = """\
[[rules]]
id = "asks"
decision = "ask"
tools = ["calculator"]
"""


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    path = tmp_path / "policy.toml"
    path.write_text(ASKS, encoding="utf-8")
    path.chmod(0o600)
    return path


def run(daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [FUMEHOOD, *arguments], env=daemon.environment, capture_output=True, timeout=60
    )


def warnings_of(daemon: Daemon) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in daemon.log.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == "approvers.none"]


@pytest.mark.row("D4", "A1")
def test_daemon_that_has_nobody_to_ask_starts_and_says_so_once_with_the_cure(
    start_daemon: StartDaemon, policy: Path
) -> None:
    daemon = start_daemon(policy_file=str(policy))
    assert run(daemon, "tools", "list").returncode == 0
    assert daemon.stop() == 0
    (warning,) = warnings_of(daemon)
    assert warning["level"] == "warning"
    assert "Dangerous calls will be refused" in warning["message"]
    assert "new FUMEHOOD_HOME" in warning["cure"]


@pytest.mark.row("D4", "A1", "D1")
def test_refused_call_names_a_cure_that_leads_out(
    start_daemon: StartDaemon, policy: Path, home: Path
) -> None:
    daemon = start_daemon(policy_file=str(policy))
    refused = run(daemon, "call", "calculator", '{"expression": "1"}')
    error = json.loads(refused.stdout)["error"]
    assert (error["code"], refused.returncode) == ("REQUIRES_HUMAN_APPROVAL", 1)
    assert "approval_id" not in error
    assert "new FUMEHOOD_HOME" in error["message"]
    assert daemon.stop() == 0
    assert run(daemon, "approvers", "init").returncode == 1  # it has served: the invariant stays

    new = home / "new"
    new.mkdir(mode=0o700)
    make_first_approver(new)
    cured = start_daemon(new, policy_file=str(policy))
    waits = run(cured, "call", "calculator", '{"expression": "1"}')
    assert json.loads(waits.stdout)["error"]["approval_id"].startswith("apr_")
    assert waits.returncode == 3
    assert cured.stop() == 0
    assert warnings_of(cured) == []
