"""The console process: started from a terminal or by a daemon, closed to other processes."""

from __future__ import annotations

import inspect
import os
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import CLEAN_ENVIRONMENT, FUMEHOOD, Daemon, make_first_approver
from fumehood.web.server import MAX_CONNECTIONS, protect
from support.browser import running_console
from support.held_call import start_held_call
from support.preloaded import PYTHON
from support.wait import DEADLINE_S, wait_until

pytestmark = pytest.mark.row("A6")


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def status_of(address: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(address, headers=headers), timeout=600
        ) as found:
            return found.status
    except urllib.error.HTTPError as refused:
        return refused.code


def is_gone(address: str) -> bool:
    host, port = address.removeprefix("http://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0


def test_console_prints_a_login_link_and_never_exposes_the_credential(
    administered_daemon: Daemon,
) -> None:
    with running_console(administered_daemon) as console:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/login\?token=[\w-]{43}", console.link)
        assert status_of(f"{console.address}/login") == 200
        assert status_of(f"{console.address}/login", Host="evil.example") == 403
        for name in ("cmdline", "environ"):
            place = Path(f"/proc/{console.process.pid}/{name}")
            assert administered_daemon.credential.encode() not in place.read_bytes()
        # Of a process that may not be dumped root owns /proc/PID, and others of its user read nothing.
        held = Path(f"/proc/{console.process.pid}/status").read_text()
        assert "CoreDumping:\t0" in held
        limits = Path(f"/proc/{console.process.pid}/limits").read_text()
        assert re.search(r"Max core file size +0 +0 ", limits)
    assert is_gone(console.address)


@pytest.mark.needs("root")
@pytest.mark.parametrize("is_protected", [True, False], ids=["protected", "control"])
def test_console_environment_is_unreadable_for_other_processes_of_its_user(
    is_protected: bool, tmp_path: Path
) -> None:
    """Runs as the user nobody; /proc/PID/environ requires the same permission as the memory."""
    program = (
        "import ctypes, sys\n"
        f"{inspect.getsource(protect)}\n"
        f"PR_SET_DUMPABLE = 4; import resource\nif {is_protected}: protect()\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    nobody = ["setpriv", "--reuid=65534", "--clear-groups", "/usr/bin/python3", "-I", "-c"]
    process = subprocess.Popen([*nobody, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    look = f"open('/proc/{process.pid}/environ').read()"
    other = subprocess.run([*nobody, look], capture_output=True, check=False)
    process.communicate(timeout=DEADLINE_S)
    assert (other.returncode == 0) is not is_protected


def test_sigterm_at_console_start_exits_0(tmp_path: Path) -> None:
    program = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from fumehood.web.server import listen, run\n"
        "nowhere = Path('none.sock')\n"
        "run(listen(0), nowhere, nowhere, on_ready=lambda _: os.kill(os.getpid(), signal.SIGTERM))\n"
    )
    done = subprocess.run([PYTHON, "-c", program], cwd=tmp_path, timeout=600, check=False)
    assert done.returncode == 0


def test_login_link_reaches_the_browser_in_a_private_file_not_an_argument(
    administered_daemon: Daemon, tmp_path: Path
) -> None:
    browser = tmp_path / "browser"
    browser.write_text(
        f'#!/bin/sh\necho "$1" >{tmp_path}/seen\ncat "${{1#file://}}" >>{tmp_path}/seen\n'
        "exec sleep 5\n"  # as a browser that stays until somebody closes it
    )
    browser.chmod(0o700)
    environment = {**administered_daemon.environment, "BROWSER": str(browser)}
    daemon = replace(administered_daemon, environment=environment)
    with running_console(daemon, options=["--open"]) as console:
        seen = tmp_path / "seen"
        wait_until(lambda: seen.exists() and "url=" in seen.read_text())
        address, page = seen.read_text().splitlines()
        assert address.startswith("file:///")
        assert "token" not in address
        assert console.link in page
        assert status_of(f"{console.address}/login") == 200
        place = Path(address.removeprefix("file://"))
        assert place.parent.stat().st_mode & 0o077 == 0
    assert not place.parent.exists()


def test_occupied_port_is_reported_before_the_credential_prompt(
    administered_daemon: Daemon, taken_port: int
) -> None:
    for command in (
        ["web", "--port", str(taken_port)],
        ["serve", "--web", "--web-port", str(taken_port)],
    ):
        done = subprocess.run(
            [str(FUMEHOOD), *command], env=administered_daemon.environment, input="",
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode != 0
        assert f"The port {taken_port} of this machine cannot be used" in done.stderr
        assert "Credential" not in done.stderr


def console_of(daemon: Daemon) -> tuple[str, int]:
    """The address and the pid of a daemon's console."""
    found = re.compile(r"The console listens on (http://127\.0\.0\.1:\d+)")
    wait_until(lambda: found.search(daemon.log) is not None)
    address = found.search(daemon.log)
    wait_until(lambda: status_of(f"{address[1]}/login") == 200)
    (child,) = [
        int(pid) for pid in children_of(daemon)
        if b"fumehood.web" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]  # fmt: skip
    return address[1], child


def children_of(daemon: Daemon) -> list[str]:
    threads = Path(f"/proc/{daemon.process.pid}/task").glob("*/children")
    return [pid for thread in threads for pid in thread.read_text().split()]


@pytest.fixture
def web_daemon(home: Path) -> Iterator[Daemon]:
    make_first_approver(home)
    environment = {**CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home), "SECRET_OF_A_TOOL": "canary"}
    with (home / "log").open("ab") as log:
        process = subprocess.Popen(
            [str(FUMEHOOD), "serve", "--web", "--web-port", "0"], env=environment,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    yield Daemon(process, home, environment)
    process.kill()
    process.wait(timeout=DEADLINE_S)


def test_daemon_restarts_its_killed_console_which_ends_with_the_daemon(web_daemon: Daemon) -> None:
    address, child = console_of(web_daemon)
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: "The console ended (-9); it is started again" in web_daemon.log)
    again, other = console_of(web_daemon)
    assert (again, other == child) == (address, False)
    assert b"canary" not in Path(f"/proc/{other}/environ").read_bytes()
    web_daemon.process.kill()
    web_daemon.process.wait(timeout=DEADLINE_S)
    wait_until(lambda: is_gone(address))


def test_stopping_daemon_does_not_start_its_console_again(web_daemon: Daemon) -> None:
    """Ctrl-C and service managers end both, and the daemon still waits for a call."""
    _, child = console_of(web_daemon)
    caller, held = start_held_call(web_daemon, [])
    (keeper,) = [
        thread for thread in Path(f"/proc/{web_daemon.process.pid}/task").iterdir()
        if str(child) in (thread / "children").read_text().split()
    ]  # fmt: skip
    web_daemon.process.send_signal(signal.SIGTERM)
    os.kill(child, signal.SIGTERM)
    wait_until(lambda: not keeper.exists())
    assert web_daemon.process.poll() is None
    held.resume()
    caller.join(timeout=DEADLINE_S)
    assert web_daemon.process.wait(timeout=DEADLINE_S) == 0
    assert "started again" not in web_daemon.log


def test_idle_connections_do_not_exhaust_the_console(administered_daemon: Daemon) -> None:
    """An unauthenticated client opens more connections than the console has descriptors."""
    with running_console(administered_daemon) as console, ExitStack() as stack:
        place = ("127.0.0.1", int(console.address.rpartition(":")[2]))
        for _ in range(MAX_CONNECTIONS + 100):
            idle = stack.enter_context(socket.create_connection(place, timeout=600))
            with suppress(ConnectionError):
                idle.sendall(b"GET /")
        assert status_of(f"{console.address}/login") == 200
        held = os.listdir(f"/proc/{console.process.pid}/fd")
        assert MAX_CONNECTIONS < len(held) < MAX_CONNECTIONS + 50
