"""Ports of sessions that a browser of the console has opened.

Each is forwarded to an origin of its own, as by `fumehood sessions port`: what a session serves
shares nothing with the console. It closes after a while, or with the login that opened it. Only
sessions of the console's own user can be reached.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import anyio
import anyio.abc

from fumehood.client.api_request import DaemonUnavailable, Refused
from fumehood.client.forwarding import Forwarding
from fumehood.core.identity import Scope
from fumehood.web.logins import Login

OPEN_S = 3600.0
LOOK_S = 5.0
"""Seconds between two looks whether who opened a port may still do so."""

MAX_OPEN = 10
"""Ports that are open at the same time: with their connections, a console has room for them."""


class TooManyPorts(Exception):
    """No more ports can be opened now."""


class Ports:
    """The open ports of one console."""

    def __init__(self, callers: Path) -> None:
        self._callers = callers
        self._open: dict[tuple[str, str, int], str] = {}
        """The key of a login, its session and a port → the link to it."""
        self._opening = anyio.Lock()
        self.group: anyio.abc.TaskGroup | None = None
        """Set while the console runs."""

    def of(self, login: Login, session_id: str) -> dict[int, str]:
        """Return the ports of a session that a login has open, with their links."""
        own = login.key, session_id
        return {port: link for (*of, port), link in self._open.items() if tuple(of) == own}

    async def open(self, login: Login, session_id: str, port: int) -> None:
        """Open a port of a session, if the login has not opened it yet.

        Raises:
            TooManyPorts: `MAX_OPEN` are open.
            OSError: this machine has no port for it.
        """
        async with self._opening:
            if (login.key, session_id, port) in self._open:
                return
            if len(self._open) >= MAX_OPEN or self.group is None:
                raise TooManyPorts
            await self.group.start(self._serve, login, session_id, port)

    async def _serve(
        self, login: Login, session_id: str, port: int, *, task_status: anyio.abc.TaskStatus[None]
    ) -> None:
        key = login.key, session_id, port
        forwarding = Forwarding(self._callers, None, session_id, port, False, lambda words: None)

        def ready(link: str) -> None:
            self._open[key] = link
            task_status.started()

        try:
            async with anyio.create_task_group() as group:
                group.start_soon(_when_ended, login, group.cancel_scope)
                await forwarding.serve(0, OPEN_S, ready)
                group.cancel_scope.cancel()
        except ExceptionGroup as faults:  # of connections: they end this port, and no other
            if faults.split(OSError)[1] is not None:
                raise
            if key not in self._open:  # nobody has its link yet
                raise OSError("this machine has no port for it") from None
        finally:
            self._open.pop(key, None)


async def _when_ended(login: Login, scope: anyio.CancelScope) -> None:
    """Cancel when a login has ended, or its user may not administer any more."""
    while True:
        with anyio.move_on_after(LOOK_S):
            await login.ended.wait()
            break
        with suppress(DaemonUnavailable):
            try:
                if Scope.ADMIN not in (await login.control.whoami()).scopes:
                    break
            except (Refused, RuntimeError):  # RuntimeError: its client is closed
                break
    scope.cancel()
