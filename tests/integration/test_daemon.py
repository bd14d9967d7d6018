"""Daemon lifecycle: sockets, signals, drain and cleanup."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from conftest import CLEAN_ENVIRONMENT, Daemon, StartDaemon
from support.held_call import start_held_call
from support.http import Answer
from support.processes import (
    children_of_guest,
    descendants,
    guest_of,
    is_gone,
)
from support.terminal import Person
from support.wait import DEADLINE_S, wait_until


@pytest.mark.row("D6")
def test_graceful_stop_exits_zero_and_leaves_no_socket_or_process(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon(drain_seconds="600")
    client = daemon.client()
    assert client.calculate("1 + 1").body["success"]
    family = descendants(daemon.process.pid)
    assert len(family) >= 3
    assert daemon.stop() == 0
    assert not daemon.socket.exists()
    wait_until(lambda: all(is_gone(process) for process in family))
    client.close()


@pytest.mark.row("D6", "E1")
def test_draining_daemon_refuses_new_calls_with_retry_after_on_all_connections(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon(drain_seconds="60")
    open_before, answers = daemon.client(), list[Answer]()
    assert open_before.calculate("1 + 1").body["success"]
    caller, held = start_held_call(daemon, answers)
    daemon.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "daemon.stopping" in daemon.log)
    for client in (open_before, daemon.client()):
        for _ in range(2):  # and the connection stays open
            refused = client.calculate("1 + 1")
            assert (refused.status, refused.code) == (503, "SHUTTING_DOWN")
            assert refused.body["error"]["retryable"] is True
            assert refused.body["error"]["retry_after_ms"] == 2000
            assert refused.headers["retry-after"] == "2"
        ready = client.get("/v1/ready")
        assert (ready.status, ready.body["status"]) == (503, "not_ready")
        client.close()
    assert answers == []
    held.resume()
    caller.join(timeout=DEADLINE_S)
    assert answers[0].body["success"] is True
    assert daemon.process.wait(timeout=DEADLINE_S) == 0
    assert not daemon.socket.exists()


@pytest.mark.row("D6")
def test_second_sigterm_stops_without_draining(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(drain_seconds="600")
    family = descendants(daemon.process.pid)
    caller, held = start_held_call(daemon, [])
    daemon.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "daemon.stopping" in daemon.log)
    assert daemon.process.poll() is None
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(timeout=DEADLINE_S) == 0
    assert not daemon.socket.exists()
    wait_until(lambda: all(is_gone(process) for process in [*family, held]))
    caller.join(timeout=DEADLINE_S)


@pytest.mark.row("D6")
def test_interrupted_serve_on_a_terminal_reports_the_calls_it_waits_for(home: Path) -> None:
    settings = {"FUMEHOOD_HOME": str(home), "FUMEHOOD_DRAIN_SECONDS": "1"}
    person = Person({**CLEAN_ENVIRONMENT, **settings}, "serve")
    person.reads("fumehood listens on")
    caller, _ = start_held_call(Daemon(person.process, home, {}), [])
    assert person.interrupts() == 0
    told = "Waiting for 1 call to end (at most 1 s); Ctrl-C again stops at once."
    assert person.seen.count(told) == 1
    assert "daemon.requests_ended" in person.seen
    assert "graceful shutdown" not in person.seen
    caller.join(timeout=DEADLINE_S)


@pytest.mark.row("D6")
def test_daemon_with_zero_drain_answers_running_calls_with_shutting_down(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon(drain_seconds="0")
    answers = list[Answer]()
    caller, _ = start_held_call(daemon, answers)
    assert daemon.stop() == 0
    caller.join(timeout=DEADLINE_S)
    assert (answers[0].status, answers[0].code) == (503, "SHUTTING_DOWN")


@pytest.mark.row("D1", "D4")
def test_state_files_are_private_to_the_owner_with_umask_zero(
    start_daemon: StartDaemon, home: Path
) -> None:
    before = os.umask(0)
    try:
        daemon = start_daemon()
        client = daemon.client()
        assert client.calculate("1 + 1").body["success"]
        client.close()
    finally:
        os.umask(before)
    files = [path for path in home.rglob("*") if path.name != "log"]
    assert {"state.db", "state.db-wal", "engine.sock", "control.sock"} <= {f.name for f in files}
    assert {path.name: path.lstat().st_mode & 0o077 for path in files} == {
        path.name: 0 for path in files
    }


@pytest.mark.row("S9", "P8")
def test_killed_daemon_leaves_no_process_behind(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    client = daemon.client()
    assert client.calculate("1 + 1").body["success"]
    family = descendants(daemon.process.pid)
    daemon.process.kill()
    daemon.process.wait(timeout=DEADLINE_S)
    wait_until(lambda: all(is_gone(process) for process in family))
    client.close()


@pytest.mark.row("D5", "D6")
def test_lost_guest_is_logged_as_json_event_without_traceback(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    client = daemon.client()
    assert client.calculate("1 + 1").body["success"]
    zygote, *_ = children_of_guest(guest_of(daemon.process.pid))
    zygote.kill()
    wait_until(lambda: "guest.lost" in daemon.log)
    assert client.calculate("1 + 1").code in (None, "SANDBOX_UNAVAILABLE")
    client.close()
    assert daemon.stop() == 0
    lines = daemon.log.splitlines()
    lines = [line for line in lines if not line.startswith("fumehood listens")]
    assert [line for line in lines if not line.startswith("{")] == []
    events = [json.loads(line) for line in lines]
    lost = [event for event in events if event["event"] == "guest.lost"]
    assert lost[0]["why"] == ["the zygote is gone"]
    assert [event["event"] for event in events].count("guest.ready") >= 2
