"""Credentials and tokens."""

from __future__ import annotations

import hmac
from datetime import timedelta
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.core.errors import InvalidParams, ResourceNotFound, Unauthorized
from fumehood.core.identity import Principal, Scope
from fumehood.identity.credential_hashes import (
    make_credential,
    parse_credential,
    quick_hash,
    slow_hash,
)
from fumehood.identity.tokens import Tokens
from fumehood.storage.changes import list_changes
from fumehood.storage.database import Database
from support.identities import ADMIN, NOW, new_token

pytestmark = pytest.mark.anyio

GOOD = "fht_0123456789abcdef_" + "A" * 43


@pytest.mark.row("D4")
@pytest.mark.parametrize(
    "text",
    [
        "", "fht", GOOD + "A", GOOD[:-1], GOOD + "\n", " " + GOOD, GOOD.replace("fht", "fhx"),
        GOOD.upper(), GOOD.replace("a", "g"), GOOD.replace("A", "é", 1), GOOD.replace("A", "٣", 1),
        GOOD.replace("0", "０", 1), GOOD.replace("_", "-"), GOOD.replace("A", "\x00", 1),
    ],
)  # fmt: skip
def test_malformed_credential_is_not_parsed(text: str) -> None:
    assert parse_credential(text) is None
    assert parse_credential(GOOD) is not None


@given(st.text(max_size=80))
def test_any_text_is_parsed_as_a_credential_or_none(text: str) -> None:
    presented = parse_credential(text)
    assert presented is None or f"{presented.kind}_{presented.id}_{presented.secret}" == text


@pytest.mark.row("D4")
def test_stored_hash_depends_on_the_secret_and_does_not_contain_it() -> None:
    _, secret, _ = make_credential("fha")
    assert quick_hash(secret) == quick_hash(secret) != quick_hash(secret[:-1])
    assert secret.encode() not in quick_hash(secret)
    salted = slow_hash(secret, b"salt" * 4)
    assert salted == slow_hash(secret, b"salt" * 4)
    assert salted != slow_hash(secret, b"tlas" * 4)
    assert salted != slow_hash(secret[:-1], b"salt" * 4)


# -- Tokens --------------------------------------------------------------------------------


@pytest.fixture
def tokens(database: Database) -> Tokens:
    return Tokens(database)


@pytest.mark.row("D4")
async def test_token_yields_its_principal_scopes_and_agents(tokens: Tokens) -> None:
    token, text = await new_token(tokens, Scope.CALL, agents=["b", "a", "a"])
    expected = Principal("token:ci", frozenset({Scope.CALL}), frozenset({"a", "b"}), token.id)
    assert tokens.principal_of(text, NOW) == expected
    assert tokens.principal_of_id(token.id, NOW) == expected
    _, without_agents = await new_token(tokens)
    assert tokens.principal_of(without_agents, NOW).agents == frozenset()


@pytest.mark.row("D4")
async def test_token_expires_exactly_at_its_time_and_no_clock_set_back_revives_it(
    tokens: Tokens, database: Database
) -> None:
    end = NOW + timedelta(hours=1)
    _, text = await new_token(tokens, expires_at=end)
    last = end - timedelta(microseconds=1)
    assert tokens.principal_of(text, last).id == "token:ci"  # twin
    for moment in (end, NOW, NOW - timedelta(days=400)):
        with pytest.raises(Unauthorized, match="expired or was revoked"):
            tokens.principal_of(text, moment)
    # After a start the newest moment that is kept counts: a clock before it is wrong.
    early = Tokens(database)
    early.principal_of(text, NOW - timedelta(days=400))
    with pytest.raises(Unauthorized):
        early.principal_of(text, end)


@pytest.mark.row("D4")
async def test_revoked_token_stays_revoked_after_a_restart(
    tokens: Tokens, database: Database
) -> None:
    token, text = await new_token(tokens)
    other, other_text = await new_token(tokens)
    await tokens.revoke(token.id, by=ADMIN, now=NOW)
    rows = await database.read(lambda c: list_changes(c, 10))
    assert [(row["action"], row["subject"], row["principal_id"]) for row in rows] == [
        ("token.revoke", token.id, "approver:owner"),
        ("token.new", other.id, "approver:owner"),
        ("token.new", token.id, "approver:owner"),
    ]
    for known in (tokens, Tokens(database)):
        with pytest.raises(Unauthorized, match="expired or was revoked"):
            known.principal_of(text, NOW)
        assert known.principal_of(other_text, NOW).id == "token:ci"
    assert [each.id for each in tokens.all() if each.is_valid(NOW)] == [other.id]


async def test_revoking_an_unknown_token_is_refused(tokens: Tokens) -> None:
    with pytest.raises(ResourceNotFound):
        await tokens.revoke("0" * 16, by=ADMIN, now=NOW)


@pytest.mark.row("D4", "A4")
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"scopes": ()}, "scopes"),
        ({"scopes": (Scope.CALL, Scope.ADMIN)}, "scopes"),
        ({"scopes": (Scope.CALL, Scope.APPROVE)}, "scopes"),
        ({"scopes": tuple(Scope)}, "scopes"),
        ({"principal_id": "approver:owner"}, "principal_id"),
        ({"principal_id": "Approver:owner"}, "principal_id"),
        ({"expires_at": NOW}, "expires_at"),
        ({"expires_at": NOW - timedelta(days=1)}, "expires_at"),
    ],
)
async def test_invalid_token_request_is_refused(
    tokens: Tokens, database: Database, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidParams) as caught:
        await new_token(tokens, **fields)
    assert caught.value.fields == (named,)
    assert tokens.all() == []
    assert await database.read(lambda c: list_changes(c, 10)) == []


async def test_cancelled_token_creation_keeps_memory_and_database_consistent(
    tokens: Tokens, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, text = await new_token(tokens)
    with anyio.CancelScope() as scope:
        write = database.write

        async def give_up_meanwhile(job: Any) -> Any:
            scope.cancel()
            return await write(job)

        monkeypatch.setattr(database, "write", give_up_meanwhile)
        await tokens.revoke(token.id, by=ADMIN, now=NOW)
    for known in (tokens, Tokens(database)):
        with pytest.raises(Unauthorized):
            known.principal_of(text, NOW)


@pytest.mark.row("D4")
async def test_secrets_are_always_compared_in_constant_time(
    tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def count(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", count)
    _, text = await new_token(tokens)
    tokens.principal_of(text, NOW)
    for wrong in ("", "x" * 190, text[:-3] + "___", make_credential("fht")[2]):
        with pytest.raises(Unauthorized):
            tokens.principal_of(wrong, NOW)
    assert compared == [(32, 32)] * 5
