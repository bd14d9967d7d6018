"""The longest time for which an engine kept all others waiting, as a client beside it sees that.

One request that keeps the event loop busy keeps the calls of all principals waiting. The wait is
measured in processor time of the loop's own thread, which is the same however busy the machine is.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support.http import connect, read_to_end

LONGEST_WAIT_S = 0.5
"""Of processor time, three times what the longest inputs cost on an idle machine. Before it was mended,
one answer of a hostile host cost 7 s."""

LONGEST_PER_CONNECTION_S = 0.005
"""Of processor time, if many connections arrive at once: others wait until all are accepted."""

PAUSE_S = 0.1

IDLE_S = 0.01
"""A daemon whose event loop used less processor time than this since it was last asked is left alone:
it keeps nobody waiting, and some tests have ten of them."""

HEALTH = b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

DAEMONS: list[tuple[subprocess.Popen[bytes], Path]] = []
"""The processes of daemons that were started, and their sockets."""


class Health:
    """The longest time for which an event loop served nobody."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.what = ""
        self.limit_s = LONGEST_WAIT_S

    def expect_connections(self, count: int) -> None:
        """Allow what as many connections at once cost."""
        self.limit_s = max(LONGEST_WAIT_S, count * LONGEST_PER_CONNECTION_S)

    def note(self, took_s: float, what: str) -> None:
        """Take the time if it is the longest."""
        if took_s > self.longest_s:
            self.longest_s, self.what = took_s, what


@contextmanager
def asking_for_health(found: Health) -> Iterator[None]:
    """Ask each running daemon for its health until the block ends, and once after that."""
    over = threading.Event()
    client = threading.Thread(target=_ask_daemons, args=(found, over), daemon=True)
    client.start()
    try:
        yield
    finally:
        over.set()
        client.join()


def _ask_daemons(found: Health, over: threading.Event) -> None:
    is_over = False
    asked_at: dict[int, float] = {}
    """The processor time of each daemon's event loop when it had answered."""
    while not is_over:
        is_over = over.wait(PAUSE_S)  # and once more: what follows an answer counts as well
        for process, socket in list(DAEMONS):
            with suppress(OSError):  # it has ended, or takes no more connections
                if _processor_s(process.pid) - asked_at.get(process.pid, 0.0) >= IDLE_S:
                    ask(process.pid, socket, found)
                    asked_at[process.pid] = _processor_s(process.pid)


def ask(pid: int, socket: Path, found: Health) -> None:
    """Ask a daemon for its health, and note how long that took. Raises OSError."""
    began_s = _processor_s(pid)
    with connect(socket) as connection:
        connection.sendall(HEALTH)
        answer = read_to_end(connection)
    if answer.startswith(b"HTTP/1.1 200 "):
        found.note(_processor_s(pid) - began_s, "GET /v1/health")


def _processor_s(pid: int) -> float:
    """The processor time of a daemon's event loop, which runs in its first thread."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9
