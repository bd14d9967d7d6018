"""The front of an operator's program that has network: it stands between the program and the host.

Guest side, the first process of such a container, which has no supervisor. The program's standard
input and output are the first connection of its relay, so they and the program's connections to the
gateway share the channel. It is of the program's own user and has no right that the program lacks.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from typing import Any, NoReturn

from fumehood.guest.container.host import Host
from fumehood.guest.container.relay import Relay
from fumehood.guest.core import children
from fumehood.guest.core.pipes import CHUNK_BYTES
from fumehood.protocol import framing

LAST_WORDS_S = 1.0
"""Seconds for what the program printed at its end to be passed on."""

NOT_STARTED = 127
"""Exit code if the program cannot be started, as a shell's."""


def front(config: dict[str, Any]) -> NoReturn:
    """Run the program of the configuration, until it ends or the host is gone."""
    trust = _first_frame()["trust"]
    selector = selectors.DefaultSelector()
    host = Host()
    relay = Relay(host, selector)
    relay.begin(framing.FRONT_RUN, trust)
    own, its = socket.socketpair()
    relay.open(own)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # it only wakes the loop
    try:
        program = subprocess.Popen(  # noqa: S603 - the operator's own
            config["command"], stdin=its.fileno(), stdout=its.fileno()
        )
    except OSError as error:
        sys.stderr.write(f"It cannot be started: {error.strerror}\n")
        os._exit(NOT_STARTED)
    its.close()

    def on_host() -> None:
        for request in host.read():
            if isinstance(request, framing.ConnectionFrame):
                relay.on_frame(request)

    selector.register(0, selectors.EVENT_READ, on_host)
    selector.register(woken, selectors.EVENT_READ, lambda: os.read(woken, 1 << 10))
    # It also reaps the program's children, which are the first process's.
    while not any(ended.pid == program.pid for ended in children.reap()):
        _serve(selector, None)
    ends_at = time.monotonic() + LAST_WORDS_S
    while (left_s := ends_at - time.monotonic()) > 0 and _serve(selector, min(left_s, 0.05)):
        pass
    os._exit(0)


def _first_frame() -> dict[str, Any]:
    """The host's first message. It sends no other before it hears of the program's streams."""
    decoder = framing.Decoder(framing.MAX_REQUEST_BYTES)
    while chunk := os.read(0, CHUNK_BYTES):
        for message in decoder.feed(chunk):
            return message
    os._exit(0)  # the host is gone


def _serve(selector: selectors.BaseSelector, timeout_s: float | None) -> bool:
    """Handle what there is, waiting if there is nothing. Return whether there was something."""
    events = selector.select(timeout_s)
    for key, _ in events:
        key.data()
    return bool(events)
