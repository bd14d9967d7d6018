"""Logins: a browser's cookie identifies the approver who has logged in. A login link logs a browser
in once.

A login's credential is kept only in this process's memory, within the client that sends it.
Invariants: cookies and links are stored as hashes; a link works once; a login ends after `IDLE_S`
without a request, `LONGEST_S` after its start, or when the engine refuses its credential.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from fumehood.client.async_control import AsyncControlClient
from fumehood.core.identity import Scope

IDLE_S = 8 * 3600.0
"""Seconds without a request after which a login ends."""

LONGEST_S = 24 * 3600.0
"""Seconds after which a login ends, even if it is still in use."""

LINK_S = 300.0
"""Seconds for which a login link is valid."""

MAX_LOGINS = 100
"""Maximum number of logins. A new login beyond this number ends the oldest login."""

TOKEN_BYTES = 32
"""Length of a random cookie, form token or link, in bytes."""

Connect = Callable[[str], AsyncControlClient]
"""Creates a client that sends the given credential. Raises ValueError if the text cannot be a
credential."""


@dataclass(eq=False, slots=True)
class Login:
    """The login of one approver in one browser."""

    key: str
    principal_id: str
    scopes: frozenset[Scope]
    control: AsyncControlClient = field(repr=False)
    csrf: str = field(repr=False)
    started_at: float
    seen_at: float
    ended: anyio.Event = field(default_factory=anyio.Event, repr=False)

    @property
    def name(self) -> str:
        """The approver's name, without `approver:`."""
        return self.principal_id.removeprefix("approver:")

    @property
    def can_approve(self) -> bool:
        """Whether the approver's credential has the scope `approve`."""
        return Scope.APPROVE in self.scopes

    @property
    def can_administer(self) -> bool:
        """Whether the approver's credential has the scope `admin`."""
        return Scope.ADMIN in self.scopes

    def is_csrf(self, given: str) -> bool:
        """Return True if `given`, the CSRF token in a submitted form, belongs to this login."""
        return secrets.compare_digest(self.csrf.encode(), given.encode())


class Logins:
    """All logins of this process."""

    def __init__(self, connect: Connect, clock: Callable[[], float] = time.monotonic) -> None:
        self._connect = connect
        self._clock = clock
        self._logins: dict[str, Login] = {}
        self._links: dict[str, tuple[str, float]] = {}

    async def open(self, credential: str) -> tuple[str, Login]:
        """Log in with a credential. Return the value of the new login's cookie, and the login.

        Raises:
            ValueError: the text cannot be a credential.
            Refused: the engine refuses the credential.
            DaemonUnavailable: the engine does not answer.
        """
        control = self._connect(credential)
        try:
            found = await control.whoami()
        except BaseException:
            await control.close()
            raise
        for one in list(self._logins.values()):
            await self.is_open(one)  # ends expired logins, whose browsers may be closed
        while len(self._logins) >= MAX_LOGINS:
            await self.close(next(iter(self._logins.values())))
        cookie, now = secrets.token_urlsafe(TOKEN_BYTES), self._clock()
        login = Login(
            key=_hash(cookie), principal_id=found.principal_id, scopes=frozenset(found.scopes),
            control=control, csrf=secrets.token_urlsafe(TOKEN_BYTES), started_at=now, seen_at=now,
        )  # fmt: skip
        self._logins[login.key] = login
        return cookie, login

    async def of_cookie(self, cookie: str | None) -> Login | None:
        """Return the login that a cookie identifies, or None if there is no such login.

        This restarts the login's idle time.
        """
        login = self._logins.get(_hash(cookie)) if cookie else None
        if login is None or not await self.is_open(login):
            return None
        login.seen_at = self._clock()
        return login

    async def is_open(self, login: Login) -> bool:
        """Return True if a login is still valid. If the login has expired, end it."""
        now = self._clock()
        if now - login.seen_at > IDLE_S or now - login.started_at > LONGEST_S:
            await self.close(login)
        return login.key in self._logins

    async def close(self, login: Login) -> None:
        """End a login and discard its credential."""
        if self._logins.pop(login.key, None) is not None:
            login.ended.set()
            await login.control.close()

    async def close_all(self) -> None:
        """End every login."""
        self._links.clear()
        for login in list(self._logins.values()):
            await self.close(login)

    def new_link(self, credential: str) -> str:
        """Create a login link, which can be used once, within `LINK_S` seconds. Return the link's
        token.
        """
        now = self._clock()
        self._links = {key: link for key, link in self._links.items() if now <= link[1]}
        token = secrets.token_urlsafe(TOKEN_BYTES)
        self._links[_hash(token)] = (credential, now + LINK_S)
        return token

    def use_link(self, token: str) -> str | None:
        """Return the credential of a login link, which can then no longer be used.

        Return None if the link is unknown, was already used or is too old.
        """
        credential, until = self._links.pop(_hash(token), ("", 0.0))
        return credential if credential and self._clock() <= until else None


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
