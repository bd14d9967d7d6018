"""Systemd socket activation and notification, with a launcher in place of systemd."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import CLEAN_ENVIRONMENT, FUMEHOOD
from fumehood.http import server
from fumehood.http.server import READY, tell_manager
from fumehood.storage.directory import StateError
from support.http import SocketClient
from support.processes import descendants
from support.wait import DEADLINE_S

# What systemd does: binds, listens, passes descriptors from 3 on, and names the process
# that they are for. `exec` keeps the process number.
LAUNCHER = """
import json, os, socket, sys
plan, program = json.loads(sys.argv[1]), sys.argv[2:]
os.umask(0)
listeners = []
for path in plan["sockets"]:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen()
    listeners.append(os.dup2(listener.detach(), 100 + len(listeners)))
for number, descriptor in enumerate(listeners):
    os.dup2(descriptor, 3 + number)
    os.close(descriptor)
os.environ.update(plan["variables"])
os.environ.setdefault("LISTEN_PID", str(os.getpid()))
os.execv(program[0], program)
"""


FIRST_GIVEN = 700
"""First passed descriptor, above the test's own descriptors."""


@contextmanager
def _given(
    home: Path,
    *,
    mode: int = 0o600,
    is_abstract: bool = False,
    kind: int = socket.SOCK_STREAM,
    listens: bool = True,
    is_passed: bool = True,
) -> Iterator[None]:
    """Two sockets at the descriptors this process expects."""
    with ExitStack() as given:
        for number, name in enumerate(("engine", "control") if is_passed else ()):
            path = home / f"given-{name}.sock"
            with socket.socket(socket.AF_UNIX, kind) as made:
                made.bind(f"\0{path}" if is_abstract else str(path))
                if not is_abstract:
                    path.chmod(mode)
                if listens and kind == socket.SOCK_STREAM:
                    made.listen()
                os.dup2(made.fileno(), FIRST_GIVEN + number)
            given.callback(_close, FIRST_GIVEN + number)
        yield


def _close(descriptor: int) -> None:
    with suppress(OSError):
        os.close(descriptor)


@pytest.mark.row("D1", "D4", "D6")
def test_activated_sockets_are_served_by_name_and_the_manager_is_notified(home: Path) -> None:
    """Children could not speak for the daemon, nor take its sockets for theirs."""
    paths = [home / "given-control.sock", home / "given-engine.sock"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, ExitStack() as cleanup:
        manager.settimeout(30)
        manager.bind(str(home / "notify"))
        variables = {
            "LISTEN_FDS": "2", "LISTEN_FDNAMES": "control:engine",
            "NOTIFY_SOCKET": str(home / "notify"),
        }  # fmt: skip
        plan = {"sockets": [str(path) for path in paths], "variables": variables}
        with (home / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", LAUNCHER, json.dumps(plan), str(FUMEHOOD), "serve"],
                env={**CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home)},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        cleanup.callback(process.wait, timeout=600)
        cleanup.callback(process.kill)
        assert manager.recv(100) == b"READY=1"
        control, engine = (cleanup.enter_context(closing(SocketClient(path))) for path in paths)
        assert engine.calculate("1 + 1").body["success"]
        assert control.get("/v1/tokens").code == "UNAUTHORIZED"
        assert control.calculate("1 + 1").code == "RESOURCE_NOT_FOUND"
        assert not (home / "engine.sock").exists()
        looked_at = 0
        for child in descendants(process.pid):
            with suppress(psutil.NoSuchProcess):  # a spare's middle process ends at once
                assert not {"NOTIFY_SOCKET", "LISTEN_PID", "LISTEN_FDS"} & child.environ().keys()
                looked_at += 1
        assert looked_at >= 2
        process.send_signal(signal.SIGTERM)
        assert manager.recv(100) == b"STOPPING=1"
        assert process.wait(timeout=DEADLINE_S) == 0, (home / "log").read_text(encoding="utf-8")
        assert all(path.exists() for path in paths)


@pytest.mark.row("D6")
def test_manager_with_an_abstract_address_is_notified() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(30)
        manager.bind(f"\0fumehood-notify-{os.getpid()}")
        tell_manager(f"@fumehood-notify-{os.getpid()}", READY)
        assert manager.recv(100) == b"READY=1"


@pytest.mark.row("D1", "D4")
# A daemon that refuses them ends, and they with it.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.parametrize(
    ("changed", "variables", "words"),
    [
        ({}, {"LISTEN_FDNAMES": "engine:other"}, "FileDescriptorName"),
        ({}, {"LISTEN_FDNAMES": "engine:engine"}, "FileDescriptorName"),
        ({}, {"LISTEN_FDNAMES": "engine"}, "FileDescriptorName"),
        ({}, {"LISTEN_FDNAMES": ""}, "FileDescriptorName"),
        ({}, {"LISTEN_FDS": "1"}, "FileDescriptorName"),
        ({}, {"LISTEN_FDS": "3"}, "FileDescriptorName"),
        ({}, {"LISTEN_FDS": "many"}, "FileDescriptorName"),
        ({"mode": 0o666}, {}, "closed to others"),
        ({"mode": 0o662}, {}, "closed to others"),
        ({"is_abstract": True}, {}, "with a path"),
        ({"kind": socket.SOCK_DGRAM}, {}, "with a path"),
        ({"listens": False}, {}, "does not listen"),
        ({"is_passed": False}, {}, "is not a socket"),
    ],
)
def test_invalid_activation_sockets_are_refused(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    variables: dict[str, str],
    words: str,
) -> None:
    monkeypatch.setattr(server, "FIRST_SYSTEMD_FD", FIRST_GIVEN)
    variables = {"LISTEN_FDS": "2", "LISTEN_FDNAMES": "engine:control"} | variables
    for name, value in {"LISTEN_PID": str(os.getpid()), **variables}.items():
        monkeypatch.setenv(name, value)
    with _given(home, **changed), pytest.raises(StateError, match=words):
        server.sockets_from_systemd()
    gc.collect()
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        assert name not in os.environ


@pytest.mark.row("D1")
def test_sockets_passed_to_another_pid_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "FIRST_SYSTEMD_FD", FIRST_GIVEN)
    monkeypatch.setenv("LISTEN_PID", "1")
    monkeypatch.setenv("LISTEN_FDS", "2")
    monkeypatch.setenv("LISTEN_FDNAMES", "engine:control")
    assert server.sockets_from_systemd() is None
