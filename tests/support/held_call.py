"""A call that runs until its test lets it."""

from __future__ import annotations

import threading

from psutil import STATUS_STOPPED, Process

from conftest import Daemon
from support.http import Answer
from support.processes import computing_child, guest_of, is_computing
from support.wait import wait_until

SLOW = "pow(7, 10**2500, 10**2500 + 7)"


def start_held_call(daemon: Daemon, answers: list[Answer]) -> tuple[threading.Thread, Process]:
    """Start a call whose guest process is suspended until the test resumes it."""
    client = daemon.client()
    assert client.calculate("1 + 1").body["success"]

    def call() -> None:
        answers.append(client.calculate(SLOW, timeout_seconds=30))
        client.close()

    caller = threading.Thread(target=call)
    caller.start()
    guest = guest_of(daemon.process.pid)
    wait_until(lambda: is_computing(guest))
    held = computing_child(guest)
    held.suspend()
    wait_until(lambda: held.status() == STATUS_STOPPED)
    return caller, held
