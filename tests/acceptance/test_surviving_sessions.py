"""A session continues when its daemon was stopped or killed: files, variables, waiting approvals."""

from __future__ import annotations

import json
import signal
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from conftest import FUMEHOOD, Daemon, StartDaemon, make_first_approver
from fumehood.docker.api import open_docker
from fumehood.storage.directory import owner_id
from support.containers import containers_of
from support.wait import DEADLINE_S, wait_until

pytestmark = [pytest.mark.needs("docker"), pytest.mark.row("B14", "S11")]


def fumehood(daemon: Daemon, *arguments: str, stdin: str | None = None) -> Any:
    done = subprocess.run(
        [str(FUMEHOOD), *arguments],
        env=daemon.environment, input=stdin, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 3), done.stderr
    return json.loads(done.stdout)


def run_code(daemon: Daemon, session: str, code: str) -> Any:
    arguments = json.dumps({"code": code})
    answer = fumehood(daemon, "call", "run_python", arguments, "--session", session)
    assert answer["error"] is None, answer["error"]
    return answer["data"]["value"]


def end(daemon: Daemon, how: signal.Signals) -> None:
    daemon.process.send_signal(how)
    daemon.process.wait(timeout=DEADLINE_S)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_session_continues_with_files_variables_and_calls_waiting_for_approval(
    start_daemon: StartDaemon, home: Path, python_image: object, how: signal.Signals
) -> None:
    credential = make_first_approver(home)
    first = start_daemon(home)
    session = fumehood(first, "sessions", "new", "--json")["id"]
    assert run_code(first, session, "x = [1]\nopen('a.txt', 'w').write('kept')\nx") == [1]
    asked = fumehood(first, "call", "delete_files", '{"paths": ["a.txt"]}', "--session", session)
    approval_id = asked["error"]["approval_id"]
    busy = subprocess.Popen(
        [str(FUMEHOOD), "call", "run_python", '{"code": "x.append(2)\\nwhile True: pass"}',
         "--session", session], env=first.environment, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_until(lambda: fumehood(first, "sessions", "show", session)["is_busy"])
    if how is signal.SIGTERM:  # an orderly stop waits for calls
        busy.kill()
    end(first, how)
    busy.wait(timeout=DEADLINE_S)

    second = start_daemon(home)
    shown = fumehood(second, "sessions", "show", session)
    assert shown["state"] == "active", (shown["why"], second.log)
    assert run_code(second, session, "[x, open('a.txt').read()]") == [[1], "kept"]
    fumehood(
        second, "approvals", "approve", approval_id, "--yes", "--credential-stdin",
        stdin=credential,
    )  # fmt: skip
    wait_until(lambda: run_code(second, session, "import os\nos.path.exists('a.txt')") is False)
    assert run_code(second, session, "x") == [1]
    fumehood(second, "sessions", "end", session)


@pytest.mark.parametrize("left", ["frozen", "running"])
def test_paused_session_continues_after_its_daemon_was_killed(
    start_daemon: StartDaemon, home: Path, python_image: object, left: str
) -> None:
    first = start_daemon(home)
    session = fumehood(first, "sessions", "new", "--name", "build", "--json")["id"]
    run_code(first, "build", "x = 1")
    assert fumehood(first, "sessions", "pause", "build")["state"] == "paused"
    (container,) = containers_of(f"fumehood.owner={owner_id(home)}")
    assert container["State"]["Paused"]
    end(first, signal.SIGKILL)
    if left == "running":  # as if it was killed just after it let the session continue
        with closing(open_docker(timeout_s=30)) as client:
            client.unpause(container["Id"])

    second = start_daemon(home)
    assert run_code(second, "build", "x") == 1
    assert fumehood(second, "sessions", "show", "build")["state"] == "active"
    fumehood(second, "sessions", "pause", session)
    fumehood(second, "sessions", "end", session)
    assert second.stop() == 0
    assert containers_of(f"fumehood.owner={owner_id(home)}") == []


def test_daemon_killed_repeatedly_leaves_one_container_for_each_session(
    start_daemon: StartDaemon, home: Path, python_image: object
) -> None:
    daemon = start_daemon(home)
    sessions = [fumehood(daemon, "sessions", "new", "--json")["id"] for _ in range(3)]
    for number, session in enumerate(sessions):
        run_code(daemon, session, f"x = {number}")
    for _ in range(4):
        end(daemon, signal.SIGKILL)
        daemon = start_daemon(home)
    assert [run_code(daemon, session, "x") for session in sessions] == [0, 1, 2]
    for session in sessions:
        fumehood(daemon, "sessions", "end", session)
    assert daemon.stop() == 0
    assert containers_of(f"fumehood.owner={owner_id(home)}") == []
