"""Systemd socket activation and notification, with a launcher in place of systemd."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import CLEAN_ENVIRONMENT, FUMEHOOD
from fumehood.http import server
from fumehood.storage.directory import StateError
from support.http import SocketClient
from support.processes import descendants
from support.wait import wait_until

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


@dataclass
class Launch:
    """The sockets and variables the launcher passes; valid by default."""

    home: Path
    sockets: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sockets = [str(self.home / f"given-{name}.sock") for name in ("engine", "control")]
        self.variables = {"LISTEN_FDS": "2", "LISTEN_FDNAMES": "engine:control"}

    def start(self) -> subprocess.Popen[bytes]:
        plan = {"sockets": self.sockets, "variables": self.variables}
        with (self.home / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", LAUNCHER, json.dumps(plan), str(FUMEHOOD), "serve"],
                env={**CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(self.home)},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip


FIRST_GIVEN = 700
"""First passed descriptor, above the test's own descriptors."""


@contextlib.contextmanager
def _given(
    home: Path,
    *,
    mode: int = 0o600,
    is_abstract: bool = False,
    kind: int = socket.SOCK_STREAM,
    listens: bool = True,
) -> Iterator[None]:
    """Two sockets at the descriptors this process expects."""
    with ExitStack() as given:
        for number, name in enumerate(("engine", "control")):
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
    with contextlib.suppress(OSError):
        os.close(descriptor)


@pytest.fixture
def launch(home: Path) -> Launch:
    return Launch(home)


@pytest.fixture
def running() -> Iterator[ExitStack]:
    with ExitStack() as processes:
        yield processes


def _started(launch: Launch, running: ExitStack) -> subprocess.Popen[bytes]:
    process = launch.start()
    running.callback(process.wait, timeout=30)
    running.callback(lambda: process.poll() is None and process.kill())
    return process


def _clients(launch: Launch, running: ExitStack) -> tuple[SocketClient, SocketClient]:
    """Clients of both sockets, which accept connections before the engine is ready."""
    paths = [Path(path) for path in launch.sockets]
    wait_until(lambda: all(SocketClient.answers(path) for path in paths))
    clients = SocketClient(paths[0]), SocketClient(paths[1])
    for client in clients:
        running.callback(client.close)
    return clients


def _log(launch: Launch) -> str:
    return (launch.home / "log").read_text(encoding="utf-8")


@pytest.mark.row("D1", "D4", "D6")
def test_activated_sockets_are_served_by_name_and_not_unlinked(
    launch: Launch, running: ExitStack
) -> None:
    launch.variables["LISTEN_FDNAMES"] = "control:engine"
    process = _started(launch, running)
    control, engine = _clients(launch, running)
    assert engine.calculate("1 + 1").body["success"]
    assert control.get("/v1/tokens").code == "UNAUTHORIZED"
    assert control.calculate("1 + 1").code == "RESOURCE_NOT_FOUND"
    assert not (launch.home / "engine.sock").exists()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0, _log(launch)
    assert all(Path(path).exists() for path in launch.sockets)


@pytest.mark.row("D1")
def test_sockets_passed_to_another_pid_are_ignored(launch: Launch, running: ExitStack) -> None:
    launch.variables["LISTEN_PID"] = "1"
    _started(launch, running)
    own = launch.home / "engine.sock"
    wait_until(lambda: SocketClient.answers(own))
    client = SocketClient(own)
    assert client.calculate("1 + 1").body["success"]
    client.close()


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
def test_activation_descriptor_that_is_not_a_socket_exits_4_with_its_reason(
    launch: Launch, running: ExitStack
) -> None:
    launch.sockets = []
    process = _started(launch, running)
    assert process.wait(timeout=30) == 4, _log(launch)
    assert "is not a socket" in _log(launch)
    assert "Traceback" not in _log(launch)


@pytest.mark.row("D6")
@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_service_manager_is_notified_ready_and_stopping(
    launch: Launch, running: ExitStack, kind: str
) -> None:
    address = str(launch.home / "notify")
    if kind == "abstract":
        address = f"@fumehood-notify-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(30)
        manager.bind(address.replace("@", "\0", 1) if kind == "abstract" else address)
        launch.variables["NOTIFY_SOCKET"] = address
        process = _started(launch, running)
        assert manager.recv(100) == b"READY=1"
        client = SocketClient(Path(launch.sockets[0]))
        assert client.calculate("1 + 1").body["success"]
        client.close()
        # Children could not speak for it, nor take its sockets for theirs.
        looked_at = 0
        for child in descendants(process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):  # a spare's middle process ends at once
                assert not {"NOTIFY_SOCKET", "LISTEN_PID", "LISTEN_FDS"} & child.environ().keys()
                looked_at += 1
        assert looked_at >= 2
        process.send_signal(signal.SIGTERM)
        assert manager.recv(100) == b"STOPPING=1"
        assert process.wait(timeout=30) == 0
