"""Live updates: one watcher polls the engine while a page is open, and notifies every browser.

A browser only learns that something has changed, and fetches it with its own login. The events of
`/events` (server-sent events):

| event | data | meaning |
|---|---|---|
| `approvals` | `{"pending": 3}` | approvals have changed; also the first event, and after `away` |
| `tick` | `{}` | every `TICK_S`, for pages whose content has no event |
| `away` | `{}` | the engine does not answer; the watcher keeps trying |
| `paused` | `{}` | a page of this login was opened later, and browsers have few connections |
| `logged-out` | `{}` | the login has ended |

Invariant: one request to the engine serves all browsers; there is none while no page is open.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import anyio

from fumehood.client.api_request import DaemonUnavailable, Refused
from fumehood.core.json_types import JsonObject
from fumehood.protocol import strict_json
from fumehood.web.logins import Login, Logins

TICK_S = 2.0
"""Seconds between two `tick` events."""

POLL_S = 20.0
"""Seconds that one request to the engine waits for a change."""

RETRY_S = 0.5
"""Seconds after a failed request before the next one."""

TOGETHER_S = 0.1
"""Seconds within which changes are combined into one event."""

MAX_STREAMS = 4
"""Maximum number of event streams of one login. Browsers open only six connections to a server, and
pages need the others."""

LOST_AUTHORITY = frozenset({"UNAUTHORIZED", "PERMISSION_DENIED"})
"""Codes of the engine's errors after which a login is ended."""


@dataclass(eq=False, slots=True)
class _Stream:
    login: Login
    woken: anyio.Event = field(default_factory=anyio.Event)
    is_paused: bool = False


class Live:
    """The watcher, and the streams to the browsers."""

    def __init__(self, logins: Logins) -> None:
        self._logins = logins
        self._streams: list[_Stream] = []
        self._watcher: asyncio.Task[None] | None = None
        self._last: bytes | None = None
        """The last event about approvals or the engine, which new streams also receive."""
        self._is_stopping = False

    async def events(self, login: Login | None) -> AsyncIterator[bytes]:
        """Yield the events for one page."""
        yield b"retry: 1000\n\n"
        if login is None:
            yield _event("logged-out")
            return
        stream, told = self._open(login), None
        try:
            while not self._is_stopping:
                if stream.is_paused or not await self._logins.is_open(login):
                    yield _event("paused" if stream.is_paused else "logged-out")
                    return
                if self._last is not told and self._last is not None:
                    told = self._last
                    yield told
                else:
                    yield _event("tick")
                with anyio.move_on_after(TICK_S):
                    await stream.woken.wait()
                stream.woken = anyio.Event()
        finally:
            self._close(stream)

    def wake(self) -> None:
        """Wake every stream, for example after a logout."""
        for stream in self._streams:
            stream.woken.set()

    def stop(self) -> None:
        """End every stream. Browsers reconnect by themselves."""
        self._is_stopping = True
        self.wake()

    def _open(self, login: Login) -> _Stream:
        stream = _Stream(login)
        own = [one for one in self._streams if one.login is login and not one.is_paused]
        if len(own) >= MAX_STREAMS:
            own[0].is_paused = True
            own[0].woken.set()
        self._streams.append(stream)
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())
        return stream

    def _close(self, stream: _Stream) -> None:
        self._streams.remove(stream)
        if not self._streams and self._watcher is not None:
            self._watcher.cancel()
            self._watcher = self._last = None

    async def _watch(self) -> None:
        after, turn = -1, 0
        while True:
            # The logins take turns, so that one whose credential was revoked is noticed.
            turn += 1
            login = self._streams[-turn % len(self._streams)].login
            try:
                found = await login.control.approvals.changes(after, wait_s=POLL_S)
            except (DaemonUnavailable, Refused, RuntimeError) as error:
                # RuntimeError: this login has just ended, and its client is closed.
                after = -1
                if isinstance(error, Refused) and error.code in LOST_AUTHORITY:
                    await self._logins.close(login)
                    self.wake()
                elif not isinstance(error, RuntimeError):
                    self._tell(_event("away"))
                await anyio.sleep(RETRY_S)
                continue
            if found.changes != after:
                after = found.changes
                self._tell(_event("approvals", {"pending": found.pending}))
            await anyio.sleep(TOGETHER_S)

    def _tell(self, event: bytes) -> None:
        self._last = event
        self.wake()


def _event(name: str, data: JsonObject | None = None) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), strict_json.dumps(data or {}))
