"""Approvers: people who have authority through a credential, not through their uid.

Host side. The first approver is created while no engine uses the state directory, and only if no
approver ever existed; an approver with `admin` creates all others. Invariants: no request over a
socket creates the first approver; no request over a caller's socket creates, changes or removes an
approver; there is always an approver with `admin`.
"""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime

import anyio.to_thread
from sqlalchemy import Connection, insert, select, update
from sqlalchemy.engine import RowMapping

from fumehood.core.errors import (
    IdempotencyConflict,
    InvalidParams,
    PermissionDenied,
    RateLimited,
    ResourceNotFound,
    Unauthorized,
)
from fumehood.core.identity import Principal, Scope
from fumehood.core.json_types import JsonObject
from fumehood.identity.credential_hashes import (
    CredentialCache,
    Presented,
    make_credential,
    parse_credential,
    slow_hash,
)
from fumehood.identity.model import ApproverInfo
from fumehood.storage.changes import OneChange, recorded, stamp
from fumehood.storage.database import Database
from fumehood.storage.errors import StoreError, WriteFailed, understood
from fumehood.storage.schema import APPROVERS

KIND = "fha"
SALT_BYTES = 16
GRANTABLE = frozenset({Scope.APPROVE, Scope.ADMIN})
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}", re.ASCII)

CHECKS_AT_ONCE = 2
"""Each check costs a thread 40 ms and 16 MB (`identity/credential_hashes.py`)."""

FIRST_NAME = "owner"
INIT = "`fumehood approvers init`, while no engine runs; then start it again"
ADD = "`fumehood approvers add NAME`, with the credential of an approver who has admin"

MAX_WAITING_CHECKS = 32
"""Number of waiting checks. Further parallel guesses are refused at once."""


@dataclass(frozen=True, slots=True)
class Approver:
    """An approver as stored, without the credential."""

    id: str
    name: str
    scopes: frozenset[Scope]
    created_at: datetime
    created_by: str
    removed_at: datetime | None
    salt: bytes
    secret_hash: bytes

    @property
    def principal(self) -> Principal:
        """The principal of this credential. It can never call tools."""
        return Principal(f"approver:{self.name}", self.scopes)

    @property
    def info(self) -> ApproverInfo:
        """As administrators see it."""
        return ApproverInfo(
            name=self.name,
            scopes=tuple(sorted(self.scopes)),
            created_at=self.created_at,
            created_by=self.created_by,
            removed_at=self.removed_at,
        )


class Approvers:
    """All approvers, in memory and in the database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._changing = OneChange()
        self._checking = anyio.CapacityLimiter(CHECKS_AT_ONCE)
        self._right = CredentialCache()
        self._approvers = database.read_now(all_approvers)

    @property
    def cure(self) -> str:
        """How the operator can add an approver in the current state."""
        return cure_of_none(any_there=bool(self.current()))

    async def principal_of(self, text: str) -> Principal:
        """The approver that presents this credential.

        Raises:
            Unauthorized: unknown; the message does not say what is wrong.
            RateLimited: too many credentials are being checked.
        """
        presented = parse_credential(text)
        approver = self._approvers.get(presented.id) if presented is not None else None
        if approver is None or not self._right.has(text):
            approver = await self._check(text, presented, approver)
        # Look again: it may have been removed while the hash was computed.
        if self._approvers[approver.id].removed_at is not None:
            raise Unauthorized("This credential was revoked. Do not retry.")
        return approver.principal

    async def _check(
        self, text: str, presented: Presented | None, approver: Approver | None
    ) -> Approver:
        """The approver of a credential. Takes equally long for an unknown one."""
        if self._checking.statistics().tasks_waiting >= MAX_WAITING_CHECKS:
            raise RateLimited(
                "Too many credentials are being checked. Try again later.", retry_after_ms=2000
            )
        salt = approver.salt if approver is not None else bytes(SALT_BYTES)
        secret = presented.secret if presented is not None else ""
        given = await anyio.to_thread.run_sync(slow_hash, secret, salt, limiter=self._checking)
        known = approver.secret_hash if approver is not None else bytes(len(given))
        matches = hmac.compare_digest(known, given)
        if presented is None or presented.kind != KIND or approver is None or not matches:
            raise Unauthorized("This credential is not known. Do not retry.")
        self._right.add(text)
        return approver

    def current(self) -> list[Approver]:
        """The approvers who have authority now, oldest first."""
        current = [a for a in self._approvers.values() if a.removed_at is None]
        return sorted(current, key=lambda approver: (approver.created_at, approver.id))

    async def add(
        self, name: str, scopes: Iterable[Scope], *, by: Principal, now: datetime
    ) -> tuple[Approver, str]:
        """Add an approver; the second value is the credential, shown only here.

        Raises:
            InvalidParams: an invalid name, or scopes other than approve and admin.
            IdempotencyConflict: the name was used before.
        """
        granted = frozenset(scopes)
        if not granted or not granted <= GRANTABLE:
            raise InvalidParams("An approver needs approve, admin, or both.", fields=["scopes"])
        _require_name(name)
        async with self._changing():
            if any(approver.name == name for approver in self._approvers.values()):
                raise IdempotencyConflict(f"The name {name!r} was already used by an approver.")
            row, text = await anyio.to_thread.run_sync(_new_row, name, granted, by.id, now)
            await self._database.write(
                recorded(
                    lambda connection: connection.execute(insert(APPROVERS), row),
                    at=now,
                    by=by.id,
                    action="approver.add",
                    subject=name,
                    details={"scopes": sorted(granted)},
                )
            )
            self._approvers = await self._database.read(all_approvers)
        return self._approvers[row["id"]], text

    async def remove(self, name: str, *, by: Principal, now: datetime) -> Approver:
        """Remove an approver.

        Raises:
            ResourceNotFound: there is no approver with this name.
            PermissionDenied: no approver with `admin` would be left.
        """
        async with self._changing():
            found = self._removable(name)
            own = update(APPROVERS).where(APPROVERS.c.id == found.id)
            await self._database.write(
                recorded(
                    lambda connection: connection.execute(own.values(removed_at=stamp(now))),
                    at=now,
                    by=by.id,
                    action="approver.remove",
                    subject=name,
                )
            )
            self._approvers = await self._database.read(all_approvers)
        return self._approvers[found.id]

    def _removable(self, name: str) -> Approver:
        """The approver, unless it is the last one with `admin`."""
        found = next((approver for approver in self.current() if approver.name == name), None)
        if found is None:
            raise ResourceNotFound(f"There is no approver {name[:80]!r}.")
        if not any(a.id != found.id and Scope.ADMIN in a.scopes for a in self.current()):
            raise PermissionDenied(
                "No approver with admin would be left. Add another one first. Do not retry."
            )
        return found


def cure_of_none(*, any_there: bool) -> str:
    """How to add an approver with `approve`. If an approver exists, one has `admin`."""
    return ADD if any_there else INIT


def had_approver(database: Database) -> bool:
    """Whether an approver exists or ever existed; rows of removed ones stay.

    Raises:
        DamagedState: the rows cannot be read.
    """
    with understood("approvers"):
        return bool(database.read_now(all_approvers))


def make_first_approver(
    database: Database, name: str, now: datetime, show: Callable[[str], None] = lambda _: None
) -> str:
    """Add the first approver; returns the credential.

    `show` gets the credential before the approver exists: a crash in between leaves a useless
    credential, never an approver whose credential was not shown. Only for a process that holds the
    lock of the state directory.

    Raises:
        InvalidParams: an invalid name.
        PermissionDenied: an approver exists, or existed.
        DamagedState: the rows cannot be read.
        StoreError: the approver could not be written; the credential is not valid.
    """
    _require_name(name)
    if had_approver(database):
        raise PermissionDenied(
            "This state directory already had its first approver. Others are added with "
            "an administrator's credential: fumehood approvers add NAME"
        )
    row, text = _new_row(name, GRANTABLE, "init", now)
    show(text)
    job = recorded(
        lambda connection: connection.execute(insert(APPROVERS), row),
        at=now,
        by="init",
        action="approver.init",
        subject=name,
    )
    try:
        database.write_now(job)
    except WriteFailed as error:
        raise StoreError(f"The credential shown is not valid. {error}") from None
    return text


def _require_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise InvalidParams(
            "An approver's name has letters, digits and _ . @ - only, and begins with a letter "
            "or digit; at most 64 characters.",
            fields=["name"],
        )


def _new_row(name: str, scopes: frozenset[Scope], by: str, now: datetime) -> tuple[JsonObject, str]:
    identifier, secret, text = make_credential(KIND)
    salt = os.urandom(SALT_BYTES)
    row = {
        "id": identifier,
        "name": name,
        "salt": salt,
        "secret_hash": slow_hash(secret, salt),
        "scopes": sorted(scopes),
        "created_at": stamp(now),
        "created_by": by,
        "removed_at": None,
    }
    return row, text


def all_approvers(connection: Connection) -> dict[str, Approver]:
    """Every approver ever made, by id."""
    rows = connection.execute(select(APPROVERS)).mappings()
    return {row["id"]: _approver(row) for row in rows}


def _approver(row: RowMapping) -> Approver:
    removed = row["removed_at"]
    return Approver(
        id=row["id"],
        name=row["name"],
        scopes=frozenset(Scope(scope) for scope in row["scopes"]),
        created_at=datetime.fromisoformat(row["created_at"]),
        created_by=row["created_by"],
        removed_at=None if removed is None else datetime.fromisoformat(removed),
        salt=row["salt"],
        secret_hash=row["secret_hash"],
    )
