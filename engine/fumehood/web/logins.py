"""Logins: who is behind a browser's cookie, and the links that log in once.

A login keeps its approver's credential, in this process's memory only, within the client that
sends it. Invariants: cookies and links are kept as hashes; a link is gone once it was tried; a
login ends after `IDLE_S` without a request, `LONGEST_S` after its start, and when the engine no
longer takes its credential.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fumehood.client.async_control import AsyncControlClient
from fumehood.core.identity import Scope

IDLE_S = 8 * 3600.0
LONGEST_S = 24 * 3600.0
LINK_S = 300.0
MAX_LOGINS = 100
"""The oldest one ends for a new one."""

TOKEN_BYTES = 32

Connect = Callable[[str], AsyncControlClient]
"""Makes a client with a credential. Raises ValueError where it can be none."""


@dataclass(eq=False, slots=True)
class Login:
    """One approver in one browser."""

    key: str
    principal_id: str
    scopes: frozenset[Scope]
    control: AsyncControlClient = field(repr=False)
    csrf: str = field(repr=False)
    started_at: float
    seen_at: float

    @property
    def name(self) -> str:
        """The approver's name, without `approver:`."""
        return self.principal_id.removeprefix("approver:")

    @property
    def can_approve(self) -> bool:
        """Whether its credential has `approve`."""
        return Scope.APPROVE in self.scopes

    @property
    def can_administer(self) -> bool:
        """Whether its credential has `admin`."""
        return Scope.ADMIN in self.scopes

    def is_csrf(self, given: str) -> bool:
        """Whether a form's token is this login's."""
        return secrets.compare_digest(self.csrf.encode(), given.encode())


class Logins:
    """Every login of this process."""

    def __init__(self, connect: Connect, clock: Callable[[], float] = time.monotonic) -> None:
        self._connect = connect
        self._clock = clock
        self._logins: dict[str, Login] = {}
        self._links: dict[str, tuple[str, float]] = {}

    async def open(self, credential: str) -> tuple[str, Login]:
        """Log in; returns the cookie's value.

        Raises:
            ValueError: this can be no credential.
            Refused, DaemonUnavailable: from the engine, which checks it.
        """
        control = self._connect(credential)
        try:
            found = await control.whoami()
        except BaseException:
            await control.close()
            raise
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
        """The login of a request; its idle time begins anew."""
        login = self._logins.get(_hash(cookie)) if cookie else None
        if login is None or not await self.is_open(login):
            return None
        login.seen_at = self._clock()
        return login

    async def is_open(self, login: Login) -> bool:
        """Whether a login holds. It is ended where its time is over."""
        now = self._clock()
        if now - login.seen_at > IDLE_S or now - login.started_at > LONGEST_S:
            await self.close(login)
        return login.key in self._logins

    async def close(self, login: Login) -> None:
        """End a login, and forget its credential."""
        if self._logins.pop(login.key, None) is not None:
            await login.control.close()

    async def close_all(self) -> None:
        """End every login."""
        self._links.clear()
        for login in list(self._logins.values()):
            await self.close(login)

    def new_link(self, credential: str) -> str:
        """The token of a link that logs in once, within `LINK_S`."""
        token = secrets.token_urlsafe(TOKEN_BYTES)
        self._links[_hash(token)] = (credential, self._clock() + LINK_S)
        return token

    def use_link(self, token: str) -> str | None:
        """The credential of a link; None if it was used, is too old, or never was one."""
        credential, until = self._links.pop(_hash(token), ("", 0.0))
        return credential if credential and self._clock() <= until else None


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
