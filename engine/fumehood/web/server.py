"""The process of the web console: listens, serves and stops.

Invariants: the process listens only on a loopback address; other processes of the same user cannot
read its memory, which contains credentials.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from fumehood.client.async_client import AsyncClient
from fumehood.client.async_control import AsyncControlClient
from fumehood.protocol.loopback import listen_on
from fumehood.web.app import Console

HOST = "127.0.0.1"
LAST_ANSWERS_S = 1
"""Seconds for which running requests may continue when the console stops."""

MAX_CONNECTIONS, ACCEPTED_AT_ONCE = 500, 100
"""Maximum number of open connections, and of connections that are accepted at once. Their sum is
below the limit on file descriptors. At that limit, asyncio would log thousands of errors a
second."""


PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
"""Commands of prctl(2). *Source*: linux/prctl.h."""


def listen(port: int) -> socket.socket:
    """Listen on a loopback port, or on any free port if `port` is 0. Raises OSError if that
    fails.
    """
    return listen_on(HOST, port)


def protect(*, ends_with_parent: bool = False) -> None:
    """Prevent debugging and core dumps of this process, whose memory contains credentials.

    With `ends_with_parent`, the process gets SIGTERM when its parent ends.

    Raises:
        OSError: the Linux kernel refused the protection.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the process cannot be protected")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if ends_with_parent:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def run(
    listener: socket.socket,
    control: Path,
    callers: Path,
    *,
    on_ready: Callable[[Console], None] = lambda _: None,
) -> None:
    """Serve the console on `listener` until SIGTERM or Ctrl-C. `control` and `callers` are the
    paths of the engine's sockets.

    `on_ready` is called once browsers can connect. From then on, both signals stop the console
    cleanly.
    """
    console = Console(
        lambda credential: AsyncControlClient(control, credential=credential),
        AsyncClient(callers),
        listener.getsockname()[1],
        callers=callers,
    )
    # Any user of this machine can cause uvicorn's warnings.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    config = uvicorn.Config(
        console.app,
        loop="asyncio",
        http=_Connection,
        backlog=ACCEPTED_AT_ONCE,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=LAST_ANSWERS_S,
    )
    gc.collect()
    gc.freeze()
    _Server(config, console, on_ready).run(sockets=[listener])


class _Connection(H11Protocol):
    """uvicorn's connection, with a limit on the number of connections, because any user of this
    machine can connect.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a new connection.

        If there are too many connections, close an idle connection. If none is idle, close the new
        connection.
        """
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            idle = (one for one in self.connections if one is not self and _is_idle(one))
            next(idle, self).transport.abort()


def _is_idle(one: Any) -> bool:
    is_asked = one.cycle is not None and not one.cycle.response_complete
    return not is_asked and not one.transport.is_closing()


class _Server(uvicorn.Server):
    """uvicorn's server. When it stops, it first ends the event streams of the console."""

    def __init__(
        self, config: uvicorn.Config, console: Console, on_ready: Callable[[Console], None]
    ) -> None:
        super().__init__(config)
        self._console = console
        self._on_ready = on_ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals during the block as uvicorn does, but do not raise them again after it."""
        with super().capture_signals():
            yield
            self._captured_signals.clear()  # so that the process exits with 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and then call `on_ready`."""
        await super().startup(sockets)
        if not self.should_exit:
            self._on_ready(self._console)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the event streams, stop listening, and let running requests end."""
        self._console.live.stop()  # an event stream never ends by itself
        await super().shutdown(sockets)


def main() -> None:
    """Serve the console as a child process of `fumehood serve --web`.

    The command is `python -m fumehood.web.server FD CONTROL CALLERS`. FD is the descriptor of a
    listening socket that this process has inherited. CONTROL and CALLERS are the paths of the
    engine's socket for administration and of its socket for calls.
    """
    descriptor, control, callers = sys.argv[1:]
    protect(ends_with_parent=True)
    with socket.socket(fileno=int(descriptor)) as listener:
        run(listener, Path(control), Path(callers))


if __name__ == "__main__":
    main()
