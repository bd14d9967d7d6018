"""The first approver: created by `serve` on a terminal or by `approvers init`."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from conftest import (
    CLEAN_ENVIRONMENT,
    FUMEHOOD,
    Daemon,
    StartDaemon,
    make_first_approver,
    shell_path,
)
from support.terminal import Person

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


def run(daemon: Daemon, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [FUMEHOOD, *arguments],
        env=daemon.environment, input=stdin.encode(), capture_output=True, timeout=600,
    )  # fmt: skip


def environment_of(home: Path) -> dict[str, str]:
    return {**CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home)}


def warnings_of(daemon: Daemon) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in daemon.log.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == "approvers.none"]


@pytest.mark.row("D4", "A1", "D1")
def test_call_refused_for_lack_of_approvers_names_a_cure_that_works(
    start_daemon: StartDaemon, policy: Path, home: Path
) -> None:
    daemon = start_daemon(policy_file=str(policy))
    refused = run(daemon, "call", "calculator", '{"expression": "1"}')
    error = json.loads(refused.stdout)["error"]
    assert (error["code"], refused.returncode) == ("REQUIRES_HUMAN_APPROVAL", 1)
    assert "approval_id" not in error
    assert "fumehood approvers init" in error["message"]
    beside = run(daemon, "approvers", "init")
    assert (beside.returncode, beside.stdout) == (4, b"")
    assert b"An engine uses this state directory. Stop it, run" in beside.stderr
    assert daemon.stop() == 0

    make_first_approver(home)
    cured = start_daemon(policy_file=str(policy))
    waits = run(cured, "call", "calculator", '{"expression": "1"}')
    assert json.loads(waits.stdout)["error"]["approval_id"].startswith("apr_")
    assert waits.returncode == 3
    assert cured.stop() == 0
    (warning,) = warnings_of(cured)  # the first engine's
    assert warning["level"] == "warning"
    assert "`fumehood approvers init`, while no engine runs" in warning["cure"]
    assert "fha_" not in cured.log


def served_on_a_terminal(environment: dict[str, str]) -> str:
    """The output of `fumehood serve` on a terminal, from start to stop."""
    person = Person(environment, "serve")
    person.reads("fumehood listens on")
    assert person.interrupts() == 0
    return person.seen


@pytest.mark.row("D4")
def test_serve_on_a_terminal_creates_the_first_approver_once(
    start_daemon: StartDaemon, policy: Path, home: Path
) -> None:
    elsewhere = {**environment_of(home), "FUMEHOOD_POLICY_FILE": str(policy)}
    first = served_on_a_terminal(elsewhere)
    assert first.count("fha_") == 1
    assert "approvers.none" not in first
    assert "fha_" not in served_on_a_terminal(elsewhere)
    (credential,) = re.findall(r"fha_\S+", first)

    daemon = start_daemon(policy_file=str(policy))
    assert warnings_of(daemon) == []
    listed = run(daemon, "approvers", "list", "--credential-stdin", stdin=credential)
    assert [(a["name"], a["created_by"]) for a in json.loads(listed.stdout)] == [("owner", "init")]
    assert daemon.stop() == 0
    verified = run(daemon, "audit", "verify")
    assert verified.returncode == 0, verified.stdout
    exported = run(daemon, "audit", "export")
    assert exported.stdout.count(b"change.approver.init") == 1
    refused = run(daemon, "approvers", "init")
    assert (refused.returncode, refused.stdout) == (1, b"")


@pytest.mark.row("D4")
@pytest.mark.parametrize("where", ["> /dev/full", ">&-"])
def test_approvers_init_with_unwritable_output_adds_no_approver(home: Path, where: str) -> None:
    environment = environment_of(home)
    # The quick program needs a standard output.
    fumehood = FUMEHOOD if where == ">&-" else FUMEHOOD.name
    unseen = subprocess.run(
        ["sh", "-c", f"exec {fumehood} approvers init {where}"],
        env={**environment, "PATH": shell_path()}, stderr=subprocess.PIPE, timeout=600,
    )  # fmt: skip
    assert unseen.returncode != 0
    assert b"could not be written" in unseen.stderr
    assert make_first_approver(home).startswith("fha_")
