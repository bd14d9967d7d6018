"""The front of an operator's program with network. The front is the first process of the program's
container.

Guest side. Instead of a supervisor, the front relays data between the program and the host. One
stream carries the program's standard input and output. Another stream on the same channel carries
the program's connections to the gateway. The front runs as the program's user, and has no right
that the program lacks.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from fumehood.guest.container.connections import Connections
from fumehood.guest.container.host import Host
from fumehood.guest.core import children
from fumehood.guest.core.pipes import CHUNK_BYTES
from fumehood.guest.streams.network import Relay
from fumehood.protocol import framing
from fumehood.protocol.streams import FRONT_RUN, StreamFrame

LAST_WORDS_S = 1.0
"""Maximum seconds for which the front relays the program's last output after the program's end."""

STREAMS = 1
"""The number of the only connection in the stream `stdio`, which carries the program's standard
input and output.
"""

NOT_STARTED = 127
"""Exit code if the program cannot be started. Shells use the same code."""


def front(config: dict[str, Any]) -> NoReturn:
    """Run the operator's program that `config` describes, and relay its data to and from the host.
    Exit when the program has ended or the host is gone.
    """
    import subprocess  # not at the top: the supervisor starts faster without it

    trust = _first_frame()["trust"]
    selector = selectors.DefaultSelector()
    host = Host()
    relay, standard = Relay("network", host, selector), Connections("stdio", host, selector)
    relay.begin(FRONT_RUN, trust)
    standard.run_id = FRONT_RUN
    own, its = socket.socketpair()
    standard.add(STREAMS, own)
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
            if isinstance(request, StreamFrame):
                (standard if request.kind == "stdio" else relay).on_frame(request)

    selector.register(0, selectors.EVENT_READ, on_host)
    selector.register(woken, selectors.EVENT_READ, lambda: os.read(woken, 1 << 10))
    # This also reaps orphans of the program, because this is the container's first process.
    while not any(ended.pid == program.pid for ended in children.reap()):
        _serve(selector, None)
    ends_at = time.monotonic() + LAST_WORDS_S
    while (left_s := ends_at - time.monotonic()) > 0 and _serve(selector, min(left_s, 0.05)):
        pass
    os._exit(0)


def _first_frame() -> dict[str, Any]:
    """Read and return the host's first message. The host sends no other message before the
    program's streams are open.
    """
    decoder = framing.Decoder(framing.MAX_REQUEST_BYTES)
    while chunk := os.read(0, CHUNK_BYTES):
        for message in decoder.feed(chunk):
            return message
    os._exit(0)  # the host is gone


def _serve(selector: selectors.BaseSelector, timeout_s: float | None) -> bool:
    """Wait for events and handle them. Return False if no event has occurred within `timeout_s`
    seconds, otherwise True.
    """
    events = selector.select(timeout_s)
    for key, _ in events:
        key.data()
    return bool(events)
