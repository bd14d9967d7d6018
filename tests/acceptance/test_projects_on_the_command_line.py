"""`fumehood run --project`: a command in a copy of a project, as a user types it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import FUMEHOOD, Daemon
from fumehood import Client, ControlClient
from fumehood.approvals.model import Approval
from fumehood.cli.approvals import approval_lines
from support.wait import DEADLINE_S
from support.workshop import workshop

pytestmark = [pytest.mark.needs("docker"), pytest.mark.row("S11", "D1")]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with workshop("python", approver=True) as running:
        yield running


@pytest.fixture
def project(tmp_path: Path) -> Path:
    top = tmp_path / "project"
    top.mkdir()
    (top / "a.txt").write_text("old\n")
    return top


def command(daemon: Daemon, *arguments: str | Path) -> dict[str, Any]:
    return {"args": [FUMEHOOD, *map(str, arguments)], "env": daemon.environment, "text": True}


def run(daemon: Daemon, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(**command(daemon, *arguments), capture_output=True, timeout=600)


def session_of(done: subprocess.CompletedProcess[str]) -> str:
    found = re.search(r"^session: (sess_\w+)$", done.stderr, re.MULTILINE)
    assert found is not None, done.stderr
    return found[1]


def test_agent_changes_a_project_and_the_approver_sees_what_can_run(
    daemon: Daemon, project: Path
) -> None:
    with ControlClient(daemon.control, credential=daemon.credential) as control:
        control.agents.create("coder", principals=[f"uid:{os.geteuid()}"])
        for tool in ("run_shell", "apply_workspace"):
            control.agents.bind("coder", tool)
        steps = "echo new > a.txt; printf '#!/bin/sh\\n' > go; chmod +x go"
        asking = subprocess.Popen(
            **command(daemon, "run", "--project", project, "--agent", "coder", "--",
                      "sh", "-c", steps),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        waiting = wait_for_one(control, asking)
        control.approvals.approve(waiting.id, version=waiting.version)
    out, errors = asking.communicate(timeout=DEADLINE_S)
    assert (asking.returncode, (project / "a.txt").read_text()) == (0, "new\n"), (out, errors)
    shown = [line.text.strip() for line in approval_lines(waiting, waiting.created_at, 200)]
    assert f"in {project}" in shown
    assert "+ file, 10 bytes, can be executed: go" in shown
    assert waiting.agent_id == "coder"
    assert "+new\n" in out
    assert "applied: added     go" in errors


def test_failed_command_shows_what_it_changed_and_its_session_stays(
    daemon: Daemon, project: Path
) -> None:
    done = run(daemon, "run", "--project", project, "--", "sh", "-c", "echo new > a.txt; exit 3")
    assert done.returncode == 1
    assert "-old\n+new\n" in done.stdout
    assert (project / "a.txt").read_text() == "old\n"
    session = session_of(done)
    (project / "a.txt").write_text("mine\n")
    listed = run(daemon, "sessions", "diff", session, "--stat")
    assert listed.stdout == "modified  a.txt  CONFLICT: is not as it was copied\n"
    assert listed.stderr == ""
    whole = run(daemon, "sessions", "diff", session)
    assert "mine" not in whole.stdout + whole.stderr  # a session does not read what came later
    told = "a.txt: CONFLICT: the host's file is not as it was copied, so no diff of it is shown"
    assert told in whole.stderr
    assert run(daemon, "sessions", "end", session).returncode == 0


def wait_for_one(control: ControlClient, asking: subprocess.Popen[str]) -> Approval:
    deadline = time.monotonic() + DEADLINE_S
    while not (waiting := control.approvals.list(state="pending").items):
        if asking.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"Nothing was asked: {asking.communicate(timeout=DEADLINE_S)}")
        time.sleep(0.1)
    return waiting[0]


@pytest.mark.parametrize("ending", ["denied", "interrupted"])
def test_session_stays_and_says_so_if_its_changes_are_not_applied(
    daemon: Daemon, project: Path, ending: str
) -> None:
    asking = subprocess.Popen(
        **command(daemon, "run", "--project", project, "--", "sh", "-c", "echo new > a.txt"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with ControlClient(daemon.control, credential=daemon.credential) as control:
        waiting = wait_for_one(control, asking)
        if ending == "denied":
            control.approvals.deny(waiting.id, version=waiting.version)
        else:
            time.sleep(0.5)  # it begins to wait
            asking.send_signal(signal.SIGINT)
        _, errors = asking.communicate(timeout=DEADLINE_S)
        assert asking.returncode == (1 if ending == "denied" else 130), errors
        (session,) = re.findall(r"^session: (sess_\w+)$", errors, re.MULTILINE)
        assert "The session stays. " in errors
        assert f"fumehood sessions end {session}" in errors
        assert ("fumehood sessions apply" in errors) is (ending == "interrupted")
        assert "After Ctrl-C, the request stays" in errors
        if ending == "interrupted":
            control.approvals.deny(waiting.id, version=waiting.version)
    assert (project / "a.txt").read_text() == "old\n"
    assert run(daemon, "sessions", "end", session).returncode == 0


def test_scripts_of_a_project_run_in_a_session_with_a_disk(daemon: Daemon, project: Path) -> None:
    script = project / "check"
    script.write_text("#!/bin/sh\necho checked\n")
    script.chmod(0o755)
    done = run(daemon, "run", "--project", project, "--", "./check")
    assert (done.returncode, "Permission denied" in done.stderr) == (1, True)
    done = run(daemon, "run", "--project", project, "--disk", "64", "--", "./check")
    assert (done.returncode, done.stdout) == (0, "checked\n"), done.stderr


def test_command_that_changes_nothing_leaves_no_session(daemon: Daemon, project: Path) -> None:
    for code in (0, 1):
        done = run(daemon, "run", "--project", project, "--", "sh", "-c", f"exit {code}")
        assert done.returncode == code
        assert "Nothing has changed." in done.stderr
        with Client(daemon.socket) as client:
            assert client.session(session_of(done)).state.is_over


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--project", "", "--", "true"),
        ("sessions", "new", "--from", ""),
        ("mcp", "--project", ""),
        ("mcp", "config", "--client", "cursor", "--project", ""),
    ],
)
def test_empty_name_of_a_project_is_not_the_present_directory(
    daemon: Daemon, arguments: tuple[str, ...]
) -> None:
    done = run(daemon, *arguments)
    assert done.returncode == 2
    assert "Name a directory" in done.stderr
