"""Tokens: credentials of callers who are not identified by their user id on the host.

Host side, used for every request with a token. A token is shown only once, when it is created. Only
a hash of its secret is stored. A token can be revoked. Invariants: a request with a wrong, expired
or revoked token is refused, even if the caller could be identified by its user id; an expired token
stays expired if the clock is set back.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Connection, insert, select, update
from sqlalchemy.engine import RowMapping

from fumehood.core.errors import InvalidParams, ResourceNotFound, Unauthorized
from fumehood.core.identity import Principal, Scope
from fumehood.core.json_types import JsonObject
from fumehood.identity.credential_hashes import make_credential, parse_credential, quick_hash
from fumehood.identity.model import TokenInfo
from fumehood.storage.changes import OneChange, recorded, stamp
from fumehood.storage.database import Database
from fumehood.storage.schema import TOKENS

KIND = "fht"
"""Prefix of tokens."""

AUTHORITY = frozenset({Scope.APPROVE, Scope.ADMIN})
"""Scopes that a token cannot combine with `call`."""

RESERVED_PRINCIPALS = "approver:"
"""Prefix of the principal ids of approvers. A token's principal id must not begin with this prefix,
because otherwise the token's holder could pose as an approver."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token as stored, with the hash of its secret instead of the secret."""

    id: str
    name: str
    principal_id: str
    scopes: frozenset[Scope]
    agents: frozenset[str]
    created_at: datetime
    created_by: str
    expires_at: datetime | None
    revoked_at: datetime | None
    secret_hash: bytes

    def is_valid(self, now: datetime) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)

    def info(self, now: datetime) -> TokenInfo:
        """Return the token's data that administrators can see."""
        return TokenInfo(
            id=self.id,
            name=self.name,
            principal_id=self.principal_id,
            scopes=tuple(sorted(self.scopes)),
            agents=tuple(sorted(self.agents)),
            created_at=self.created_at,
            created_by=self.created_by,
            expires_at=self.expires_at,
            revoked_at=self.revoked_at,
            is_valid=self.is_valid(now),
        )


class Tokens:
    """All tokens, in memory and in the database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._changing = OneChange(self._reload)
        self._tokens = database.read_now(all_tokens)
        made = [token.created_at for token in self._tokens.values()]
        self._latest = max(made, default=datetime.min.replace(tzinfo=UTC))

    def principal_of(self, text: str, now: datetime) -> Principal:
        """Return the principal of the token `text`.

        Raises:
            Unauthorized: the token is unknown, expired or revoked. The message does not reveal
                which tokens exist.
        """
        presented = parse_credential(text)
        token = self._tokens.get(presented.id) if presented is not None else None
        known = token.secret_hash if token is not None else bytes(32)
        given = quick_hash(presented.secret if presented is not None else "")
        matches = hmac.compare_digest(known, given)
        if presented is None or presented.kind != KIND or token is None or not matches:
            raise Unauthorized("This token is not known. Do not retry.")
        principal = self.principal_of_id(token.id, now)
        if principal is None:
            raise Unauthorized("This token has expired or was revoked. Do not retry.")
        return principal

    def principal_of_id(self, token_id: str, now: datetime) -> Principal | None:
        """Return the principal of the token with this id. Return None if the token is unknown,
        revoked or expired. The caller must already have verified the token's secret.
        """
        token = self._tokens.get(token_id)
        # A clock that is set back must not revive an expired token.
        self._latest = max(self._latest, now)
        if token is None or not token.is_valid(self._latest):
            return None
        return Principal(token.principal_id, token.scopes, token.agents, token.id)

    def present_authority(
        self,
        principal_id: str,
        token_id: str | None,
        agents: frozenset[str],
        now: datetime,
        *,
        is_program: bool,
    ) -> Principal | None:
        """Return a principal with the scopes and agents that it has at the time `now`.

        If `token_id` is given, return the principal of this token. The other parameters except
        `now` are then not used. Return None if the token is unknown, revoked or expired.

        If `token_id` is None, return the principal `principal_id`, with the scope `call` and the
        right to act for `agents`. `is_program` says whether it is a program that embeds the engine.
        """
        if token_id is not None:
            return self.principal_of_id(token_id, now)
        return Principal(principal_id, frozenset({Scope.CALL}), agents, is_program=is_program)

    def all(self) -> list[Token]:
        return sorted(self._tokens.values(), key=lambda token: (token.created_at, token.id))

    async def new(
        self,
        name: str,
        *,
        principal_id: str,
        scopes: Iterable[Scope],
        agents: Iterable[str],
        expires_at: datetime | None,
        by: Principal,
        now: datetime,
    ) -> tuple[Token, str]:
        """Create a token. Return the token and its text, which cannot be shown again later.

        `agents` are the ids of the agents for which the token's holder may act. `by` is the
        principal that creates the token.

        Raises:
            InvalidParams: `scopes` is empty or combines `call` with `approve` or `admin`,
                `principal_id` is reserved for approvers, or `expires_at` is not in the future.
        """
        granted = frozenset(scopes)
        _refuse_unsound(granted, principal_id, expires_at, now)
        identifier, secret, text = make_credential(KIND)
        row: JsonObject = {
            "id": identifier,
            "name": name,
            "principal_id": principal_id,
            "secret_hash": quick_hash(secret),
            "scopes": sorted(granted),
            "agents": sorted(set(agents)),
            "created_at": stamp(now),
            "created_by": by.id,
            "expires_at": stamp(expires_at) if expires_at is not None else None,
            "revoked_at": None,
        }
        shown: JsonObject = {
            key: row[key] for key in ("name", "principal_id", "scopes", "agents", "expires_at")
        }
        job = recorded(
            lambda connection: connection.execute(insert(TOKENS), row),
            at=now,
            by=by.id,
            action="token.new",
            subject=identifier,
            details=shown,
        )
        async with self._changing():
            await self._database.write(job)
            token = self._tokens[identifier] = _token(row)
        return token, text

    async def revoke(self, token_id: str, *, by: Principal, now: datetime) -> Token:
        """Revoke a token immediately and permanently. `by` is the principal that revokes it.

        Raises:
            ResourceNotFound: there is no token with this id.
        """
        valid = update(TOKENS).where(TOKENS.c.id == token_id, TOKENS.c.revoked_at.is_(None))
        job = recorded(
            lambda connection: connection.execute(valid.values(revoked_at=stamp(now))),
            at=now,
            by=by.id,
            action="token.revoke",
            subject=token_id,
        )
        async with self._changing():
            if token_id not in self._tokens:
                raise ResourceNotFound(f"There is no token {token_id[:40]!r}.")
            await self._database.write(job)
            await self._reload()
        return self._tokens[token_id]

    async def _reload(self) -> None:
        self._tokens = await self._database.write(all_tokens)


def _refuse_unsound(
    granted: frozenset[Scope], principal_id: str, expires_at: datetime | None, now: datetime
) -> None:
    if not granted:
        raise InvalidParams("A token needs at least one scope.", fields=["scopes"])
    if Scope.CALL in granted and granted & AUTHORITY:
        raise InvalidParams(
            "A token either calls or has authority; with both it could approve its own calls. "
            "Make two tokens.",
            fields=["scopes"],
        )
    if principal_id.casefold().startswith(RESERVED_PRINCIPALS):
        raise InvalidParams(
            f"A token cannot stand for {principal_id[:80]!r}: that is an approver.",
            fields=["principal_id"],
        )
    if expires_at is not None and expires_at <= now:
        raise InvalidParams("expires_at is in the past.", fields=["expires_at"])


def all_tokens(connection: Connection) -> dict[str, Token]:
    """Return all tokens, including revoked ones, as a dict from id to token."""
    rows = connection.execute(select(TOKENS)).mappings()
    return {row["id"]: _token(row) for row in rows}


def _token(row: RowMapping | JsonObject) -> Token:
    return Token(
        id=row["id"],
        name=row["name"],
        principal_id=row["principal_id"],
        scopes=frozenset(Scope(scope) for scope in row["scopes"]),
        agents=frozenset(row["agents"]),
        created_at=datetime.fromisoformat(row["created_at"]),
        created_by=row["created_by"],
        expires_at=_moment(row["expires_at"]),
        revoked_at=_moment(row["revoked_at"]),
        secret_hash=row["secret_hash"],
    )


def _moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
