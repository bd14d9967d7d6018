"""Ports of sessions that users of the console have made reachable for their browsers.

Each port gets a separate origin (another local port), as with `fumehood sessions port`. Browsers
therefore share no data between the content of a session and the console. Forwarding ends after
`OPEN_S`, or with the login that opened the port. Only sessions of the user who runs the console can
be reached.
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
"""Seconds between two checks whether the user who opened a port is still an administrator."""

MAX_OPEN = 10
"""Maximum number of open ports. With this limit, their connections leave the console's process
enough file descriptors."""


class TooManyPorts(Exception):
    """No further ports can be opened now."""


class Ports:
    """The ports of sessions that users of one console have made reachable for their browsers."""

    def __init__(self, callers: Path) -> None:
        self._callers = callers
        self._open: dict[tuple[str, str, int], str] = {}
        """Maps the key of a login, the id of a session and the session's port to the link under
        which the port is reachable."""
        self._opening = anyio.Lock()
        self.group: anyio.abc.TaskGroup | None = None
        """The task group of the tasks that forward ports. None unless the console is running."""

    def of(self, login: Login, session_id: str) -> dict[int, str]:
        """Return the ports of a session that a login has made reachable. The dictionary maps each
        port number to the link under which browsers reach the port.
        """
        own = login.key, session_id
        return {port: link for (*of, port), link in self._open.items() if tuple(of) == own}

    async def open(self, login: Login, session_id: str, port: int) -> None:
        """Make a port of a session reachable for a login. Do nothing if the login has already
        opened it.

        Raises:
            TooManyPorts: `MAX_OPEN` ports are open.
            OSError: no local port could be opened.
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
        except ExceptionGroup as faults:  # faults of connections end only this port
            if faults.split(OSError)[1] is not None:
                raise
            if key not in self._open:  # the link was never shown
                raise OSError("this machine has no port for it") from None
        finally:
            self._open.pop(key, None)


async def _when_ended(login: Login, scope: anyio.CancelScope) -> None:
    """Cancel a scope as soon as a login has ended, or its user is no longer an administrator."""
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
