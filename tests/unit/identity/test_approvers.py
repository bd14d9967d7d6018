"""Approvers: one at first, made before anybody could reach the engine, and always one left."""

from __future__ import annotations

import hmac
import threading

import anyio
import pytest
from sqlalchemy import update

from fumehood.core.errors import (
    IdempotencyConflict,
    InvalidParams,
    PermissionDenied,
    RateLimited,
    Unauthorized,
)
from fumehood.core.identity import Principal, Scope
from fumehood.identity import approvers as module
from fumehood.identity.approvers import Approvers, had_approver, make_first_approver
from fumehood.identity.credential_hashes import make_credential
from fumehood.storage.changes import list_changes, stamp
from fumehood.storage.database import Database
from fumehood.storage.errors import StoreError, WriteFailed
from fumehood.storage.schema import APPROVERS
from support.identities import ADMIN, NOW

pytestmark = pytest.mark.anyio

BOTH = frozenset({Scope.APPROVE, Scope.ADMIN})


@pytest.mark.row("D4")
async def test_removed_first_approver_cannot_be_created_again(database: Database) -> None:
    assert not had_approver(database)
    make_first_approver(database, "owner", NOW)
    # No engine removes the last one; somebody who restores or edits a database may have.
    removed = update(APPROVERS).values(removed_at=stamp(NOW))
    database.write_now(lambda c: c.execute(removed))
    assert Approvers(database).current() == []
    assert had_approver(database)
    with pytest.raises(PermissionDenied):
        make_first_approver(database, "intruder", NOW)


@pytest.mark.row("D4")
async def test_credential_is_shown_before_the_approver_is_stored(database: Database) -> None:
    """So a crash at any point leaves no approver whose credential was not shown."""
    shown: list[str] = []

    def show(credential: str) -> None:
        assert not had_approver(database)
        shown.append(credential)

    text = make_first_approver(database, "owner", NOW, show)
    assert shown == [text]
    assert await Approvers(database).principal_of(text) == Principal("approver:owner", BOTH)


@pytest.mark.row("D4")
def test_approver_is_not_created_if_its_credential_cannot_be_shown(database: Database) -> None:
    def show(_: str) -> None:
        raise OSError("the terminal is gone")

    with pytest.raises(OSError, match="gone"):
        make_first_approver(database, "owner", NOW, show)
    assert not had_approver(database)
    assert database.read_now(lambda c: list_changes(c, 9)) == []
    make_first_approver(database, "owner", NOW)


@pytest.mark.row("D4")
def test_credential_is_declared_invalid_if_the_approver_cannot_be_stored(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise WriteFailed("database or disk is full")

    monkeypatch.setattr(database, "write_now", refuse)
    with pytest.raises(StoreError, match="credential shown is not valid"):
        make_first_approver(database, "owner", NOW)


@pytest.mark.parametrize("name", ["", "-x", "a b", "a\nb", "é", "a" * 65, "../x", "a/b"])
async def test_confusable_approver_name_is_refused(database: Database, name: str) -> None:
    with pytest.raises(InvalidParams):
        make_first_approver(database, name, NOW)
    with pytest.raises(InvalidParams):
        await Approvers(database).add(name, [Scope.ADMIN], by=ADMIN, now=NOW)
    assert Approvers(database).current() == []


@pytest.mark.row("D4")
@pytest.mark.parametrize("scopes", [[], [Scope.CALL], [Scope.CALL, Scope.ADMIN]])
async def test_approver_cannot_get_the_call_scope(database: Database, scopes: list[Scope]) -> None:
    with pytest.raises(InvalidParams):
        await Approvers(database).add("anna", scopes, by=ADMIN, now=NOW)


async def test_removed_approver_stays_removed_after_a_restart_and_its_name_is_never_reused(
    database: Database,
) -> None:
    make_first_approver(database, "owner", NOW)
    approvers = Approvers(database)
    _, text = await approvers.add("anna", BOTH, by=ADMIN, now=NOW)
    assert await approvers.principal_of(text) == Principal("approver:anna", BOTH)
    await approvers.remove("anna", by=ADMIN, now=NOW)
    rows = await database.read(lambda c: list_changes(c, 10))
    assert [(row["action"], row["subject"], row["principal_id"]) for row in rows] == [
        ("approver.remove", "anna", "approver:owner"),
        ("approver.add", "anna", "approver:owner"),
        ("approver.init", "owner", "init"),
    ]
    for known in (approvers, Approvers(database)):
        with pytest.raises(Unauthorized, match="was revoked"):
            await known.principal_of(text)
        with pytest.raises(IdempotencyConflict):
            await known.add("anna", [Scope.APPROVE], by=ADMIN, now=NOW)


@pytest.mark.row("D4")
async def test_credential_revoked_during_its_check_is_refused(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_first_approver(database, "owner", NOW)
    approvers = Approvers(database)
    _, text = await approvers.add("anna", BOTH, by=ADMIN, now=NOW)
    hashing, removed, hash_now = threading.Event(), threading.Event(), module.slow_hash

    def slowly(secret: str, salt: bytes) -> bytes:
        hashing.set()
        assert removed.wait(20)
        return hash_now(secret, salt)

    monkeypatch.setattr(module, "slow_hash", slowly)
    refused: list[str] = []

    async def use() -> None:
        try:
            await approvers.principal_of(text)
        except Unauthorized as error:
            refused.append(error.message)

    async with anyio.create_task_group() as group:
        group.start_soon(use)
        await anyio.to_thread.run_sync(hashing.wait, 20)
        await approvers.remove("anna", by=ADMIN, now=NOW)
        removed.set()
    assert refused == ["This credential was revoked. Do not retry."]


@pytest.mark.row("D4")
async def test_concurrent_mutual_removal_leaves_one_administrator(database: Database) -> None:
    make_first_approver(database, "owner", NOW)
    approvers = Approvers(database)
    await approvers.add("anna", BOTH, by=ADMIN, now=NOW)
    ended: list[str] = []

    async def remove(name: str) -> None:
        try:
            await approvers.remove(name, by=ADMIN, now=NOW)
            ended.append("removed")
        except PermissionDenied:
            ended.append("refused")

    async with anyio.create_task_group() as group:
        group.start_soon(remove, "owner")
        group.start_soon(remove, "anna")
    assert sorted(ended) == ["refused", "removed"]
    assert len(approvers.current()) == len(Approvers(database).current()) == 1


@pytest.mark.row("D4")
async def test_every_wrong_credential_costs_one_hash_and_one_comparison(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = make_first_approver(database, "owner", NOW)
    approvers = Approvers(database)
    hashed: list[bytes] = []
    compared: list[int] = []
    hash_now, compare = module.slow_hash, hmac.compare_digest

    def hashing(secret: str, salt: bytes) -> bytes:
        hashed.append(salt)
        return hash_now(secret, salt)

    def comparing(one: bytes, other: bytes) -> bool:
        compared.append(1)
        return compare(one, other)

    monkeypatch.setattr(module, "slow_hash", hashing)
    monkeypatch.setattr(hmac, "compare_digest", comparing)
    _, _, stranger = make_credential("fha")
    for wrong in ("", stranger, text[:-43] + stranger[-43:], text.replace("fha_", "fht_")):
        with pytest.raises(Unauthorized, match="not known"):
            await approvers.principal_of(wrong)
    assert (len(hashed), len(compared)) == (4, 4)
    assert (await approvers.principal_of(text)).id == "approver:owner"


@pytest.mark.row("D4")
async def test_verified_credential_is_cached_and_a_guess_is_not(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_first_approver(database, "owner", NOW)
    approvers = Approvers(database)
    _, text = await approvers.add("anna", BOTH, by=ADMIN, now=NOW)
    hashed: list[bytes] = []
    hash_now, now = module.slow_hash, [1000.0]

    def hashing(secret: str, salt: bytes) -> bytes:
        hashed.append(salt)
        return hash_now(secret, salt)

    monkeypatch.setattr(module, "slow_hash", hashing)
    monkeypatch.setattr("fumehood.identity.credential_hashes.time.monotonic", lambda: now[0])
    for _ in range(5):
        assert (await approvers.principal_of(text)).id == "approver:anna"
    assert len(hashed) == 1
    near = text[:-1] + ("A" if text[-1] != "A" else "B")
    for _ in range(2):  # the attack: all but one character, and one's id with another's secret
        for wrong in (near, text[:-43] + first[-43:]):
            with pytest.raises(Unauthorized, match="not known"):
                await approvers.principal_of(wrong)
    assert len(hashed) == 5
    now[0] += 61
    assert (await approvers.principal_of(text)).id == "approver:anna"
    assert len(hashed) == 6
    await approvers.remove("anna", by=ADMIN, now=NOW)
    with pytest.raises(Unauthorized, match="was revoked"):
        await approvers.principal_of(text)


@pytest.mark.row("D4")
async def test_excess_credential_guesses_are_refused_without_blocking(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = make_first_approver(database, "owner", NOW)
    approvers = Approvers(database)
    may_end, busy, hash_now = threading.Event(), threading.Semaphore(0), module.slow_hash

    def slowly(secret: str, salt: bytes) -> bytes:
        busy.release()
        assert may_end.wait(20)
        return hash_now(secret, salt)

    monkeypatch.setattr(module, "slow_hash", slowly)
    codes: list[str] = []

    async def guess() -> None:
        try:
            await approvers.principal_of("fha_guess")
        except (Unauthorized, RateLimited) as error:
            codes.append(error.code)

    taken = module.CHECKS_AT_ONCE + module.MAX_WAITING_CHECKS
    async with anyio.create_task_group() as group:
        for _ in range(taken):
            group.start_soon(guess)
        for _ in range(module.CHECKS_AT_ONCE):
            assert await anyio.to_thread.run_sync(lambda: busy.acquire(timeout=600))
        await anyio.wait_all_tasks_blocked()
        for _ in range(5):
            await guess()  # answered while the others are still waiting: the loop goes on
        assert codes == ["RATE_LIMITED"] * 5
        may_end.set()
    assert codes[5:] == ["UNAUTHORIZED"] * taken
    assert (await approvers.principal_of(text)).id == "approver:owner"
