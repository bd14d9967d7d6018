"""Approvers: people whose authority comes from a credential, not from their user id on the host.

Host side. The first approver can be created only while no engine uses the state directory, and only
if no approver has ever existed. Every other approver is created by an approver with the scope
`admin`. Invariants: no request over a socket creates the first approver; no request over a caller's
socket creates, changes or removes an approver; once approvers exist, at least one of them always
has `admin`.
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
from fumehood.parts import parts
from fumehood.storage.changes import OneChange, recorded, stamp
from fumehood.storage.database import Database
from fumehood.storage.errors import StoreError, WriteFailed, understood
from fumehood.storage.needed_parts import require_parts
from fumehood.storage.schema import APPROVERS

KIND = "fha"
"""Prefix of approvers' credentials."""

SALT_BYTES = 16
"""Length in bytes of the random salt with which a credential is hashed."""

GRANTABLE = frozenset({Scope.APPROVE, Scope.ADMIN})
"""The scopes that an approver may have."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}", re.ASCII)
"""The form of an approver's name."""

CHECKS_AT_ONCE = 2
"""Maximum number of concurrent credential checks. Each check occupies a thread for 40 ms and needs
16 MB of memory (`identity/credential_hashes.py`)."""

FIRST_NAME = "owner"
"""The default name of the first approver."""

INIT = "`fumehood approvers init`, while no engine runs; then start it again"
ADD = "`fumehood approvers add NAME`, with the credential of an approver who has admin"

MAX_WAITING_CHECKS = 32
"""Maximum number of credential checks that may wait. Further checks are refused immediately, which
also limits how many guesses can be made in parallel."""


@dataclass(frozen=True, slots=True)
class Approver:
    """An approver as stored, with the hash of the credential instead of the credential."""

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
        """The principal that a request with this approver's credential acts as. This principal can
        never call tools.
        """
        return Principal(f"approver:{self.name}", self.scopes)

    @property
    def info(self) -> ApproverInfo:
        """The approver's data that administrators can see."""
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
        self._changing = OneChange(self._reload)
        self._checking = anyio.CapacityLimiter(CHECKS_AT_ONCE)
        self._right = CredentialCache()
        self._approvers = database.read_now(all_approvers)

    @property
    def cure(self) -> str:
        """How the operator can add an approver in the current situation, as a part of a sentence
        for error messages.
        """
        return cure_of_none(any_there=bool(self.current()))

    async def principal_of(self, text: str) -> Principal:
        """Return the principal of the approver to whom the credential `text` belongs.

        Raises:
            Unauthorized: the credential is unknown or revoked. The message does not reveal which
                part of an unknown credential is wrong.
            RateLimited: too many credentials are being checked at the moment.
        """
        presented = parse_credential(text)
        approver = self._approvers.get(presented.id) if presented is not None else None
        if approver is None or not self._right.has(text):
            approver = await self._check(text, presented, approver)
        # Check again: the approver may have been removed while the hash was computed.
        if self._approvers[approver.id].removed_at is not None:
            raise Unauthorized("This credential was revoked. Do not retry.")
        return approver.principal

    async def _check(
        self, text: str, presented: Presented | None, approver: Approver | None
    ) -> Approver:
        """Verify the credential `text` by its slow hash, and return the approver to whom it
        belongs. `presented` is the parsed credential, or None if its format is wrong. `approver` is
        the approver with the credential's id, or None.

        Raises:
            Unauthorized: the credential is unknown.
            RateLimited: too many credentials are being checked at the moment.
        """
        if self._checking.statistics().tasks_waiting >= MAX_WAITING_CHECKS:
            raise RateLimited(
                "Too many credentials are being checked. Try again later.", retry_after_ms=2000
            )
        # The check of an unknown credential takes as long as that of a known one, so that the
        # duration reveals nothing.
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
        """Return the approvers who have not been removed, oldest first."""
        current = [a for a in self._approvers.values() if a.removed_at is None]
        return sorted(current, key=lambda approver: (approver.created_at, approver.id))

    async def add(
        self, name: str, scopes: Iterable[Scope], *, by: Principal, now: datetime
    ) -> tuple[Approver, str]:
        """Add an approver. Return the approver and the new credential, which cannot be shown again
        later.

        `by` is the principal that adds the approver.

        Raises:
            InvalidParams: the name is invalid, there is no scope, or a scope is neither `approve`
                nor `admin`.
            IdempotencyConflict: the name is or was the name of another approver.
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
            await self._reload()
        return self._approvers[row["id"]], text

    async def remove(self, name: str, *, by: Principal, now: datetime) -> Approver:
        """Remove an approver. `by` is the principal that removes the approver.

        Raises:
            ResourceNotFound: there is no approver with this name.
            PermissionDenied: after the removal, no approver with `admin` would be left.
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
            await self._reload()
        return self._approvers[found.id]

    async def _reload(self) -> None:
        self._approvers = await self._database.write(all_approvers)

    def _removable(self, name: str) -> Approver:
        """Return the approver with this name, who may be removed. Raises for the same reasons as
        `remove`.
        """
        found = next((approver for approver in self.current() if approver.name == name), None)
        if found is None:
            raise ResourceNotFound(f"There is no approver {name[:80]!r}.")
        if not any(a.id != found.id and Scope.ADMIN in a.scopes for a in self.current()):
            raise PermissionDenied(
                "No approver with admin would be left. Add another one first. Do not retry."
            )
        return found


def cure_of_none(*, any_there: bool) -> str:
    """Return a part of a sentence for error messages, which says how the operator can add an
    approver with the scope `approve`. `any_there` says whether any approver exists.
    """
    # If any approver exists, at least one of them has `admin` and can add others.
    return ADD if any_there else INIT


def had_approver(database: Database) -> bool:
    """Return whether any approver exists or has ever existed. Removed approvers stay in the
    database.

    Raises:
        DamagedState: the database has invalid rows.
    """
    with understood("approvers"):
        return bool(database.read_now(all_approvers))


def make_first_approver(
    database: Database, name: str, now: datetime, show: Callable[[str], None] = lambda _: None
) -> str:
    """Add the first approver, and return the approver's credential. The caller must hold the lock
    of the state directory. `show` receives the credential before the approver is stored.

    Raises:
        InvalidParams: the name is invalid.
        PermissionDenied: an approver exists or has existed.
        DamagedState: the database has invalid rows.
        StoreError: the approver could not be stored, so the credential is not valid.
        PartError: the state needs a part that is not installed.
    """
    _require_name(name)
    require_parts(database, {part.name for part in parts()})
    if had_approver(database):
        raise PermissionDenied(
            "This state directory already had its first approver. Others are added with "
            "an administrator's credential: fumehood approvers add NAME"
        )
    row, text = _new_row(name, GRANTABLE, "init", now)
    # Before the approver is stored. If the process crashes in between, the shown credential is
    # useless, but there is never an approver whose credential nobody has seen.
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
    """Return all approvers by id, including removed ones."""
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
