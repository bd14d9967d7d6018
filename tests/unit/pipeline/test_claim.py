"""Calls with idempotency keys: one run per key, and stored answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from sqlalchemy import Connection, select

from fumehood import tool
from fumehood.call_options import OF_PARTS, CallOptions
from fumehood.core.call import DECIDING_OPTIONS
from fumehood.core.envelope import Envelope, ErrorInfo
from fumehood.core.errors import (
    CallInProgress,
    IdempotencyConflict,
    InvalidParams,
    OutcomeUnknown,
)
from fumehood.pipeline import claim as claim_module
from fumehood.pipeline.claim import (
    Claim,
    Keys,
    Replay,
    fingerprint,
    key_made_of,
    key_of,
)
from fumehood.storage import idempotency as rows
from fumehood.storage.database import Database, open_database
from fumehood.storage.errors import WriteFailed
from fumehood.storage.idempotency import KEY_LIFETIME, KeyState
from fumehood.storage.schema import IDEMPOTENCY
from support.answers import failure
from support.definitions import function_definition
from support.keyed import (
    KEYED,
    NOW,
    UNKNOWN_ENDING,
    Driver,
    answer,
    permitted,
    principal,
)
from support.recording import bench
from support.state import put, set_full, set_roomy, writer_held

pytestmark = [pytest.mark.anyio, pytest.mark.row("P3")]

HARMLESS = function_definition(name="look", read_only=True)
IDEMPOTENT = function_definition(name="set", idempotent=True)


@pytest.fixture(params=["file", pytest.param("memory", marks=pytest.mark.sqlite)])
async def database(request: pytest.FixtureRequest, home: Path) -> AsyncIterator[Database]:
    opened = open_database(home / "state.db" if request.param == "file" else None)
    yield opened
    opened.close()


@pytest.fixture
def keys(database: Database) -> Keys:
    return Keys(database)


@pytest.fixture
def driver(keys: Keys) -> Driver:
    return Driver(keys)


async def states(database: Database) -> list[str]:
    def query(connection: Connection) -> list[str]:
        return list(connection.execute(select(IDEMPOTENCY.c.state)).scalars())

    return await database.read(query)


async def claimed(keys: Keys, call: Any = None, call_id: str = "call_1") -> Claim:
    found = await keys.claim(call or permitted(idempotency_key="k"), call_id, NOW)
    assert isinstance(found, Claim)
    return found


# Which key a call has


@pytest.mark.parametrize(
    ("arguments", "option", "expected"),
    [
        ({}, None, None),
        ({}, "k", "k"),
        ({"idempotency_key": "p"}, None, "p"),
        ({"idempotency_key": "p"}, "p", "p"),
        ({"idempotency_key": None}, None, None),
        ({"idempotency_key": ""}, None, None),
        ({"idempotency_key": ""}, "k", "k"),
        ({"idempotency_key": 7}, None, "7"),
        ({"idempotency_key": 7}, "7", "7"),
        ({"idempotency_key": "x" * 255}, None, "x" * 255),
        ({"idempotency_key": "auto"}, None, "auto"),
    ],
)
async def test_idempotency_key_is_the_option_or_the_tools_parameter(
    arguments: dict[str, Any], option: str | None, expected: str | None
) -> None:
    assert key_of(permitted(arguments, tool=KEYED, idempotency_key=option)) == expected


@pytest.mark.parametrize(
    ("arguments", "option", "field"),
    [
        ({"idempotency_key": "p"}, "o", "options.idempotency_key"),
        ({"idempotency_key": "p"}, "P", "options.idempotency_key"),
        ({"idempotency_key": "p"}, "auto", "options.idempotency_key"),
        ({"idempotency_key": "x" * 256}, None, "idempotency_key"),
    ],
)
async def test_conflicting_or_overlong_keys_are_refused(
    keys: Keys, database: Database, arguments: dict[str, Any], option: str | None, field: str
) -> None:
    call = permitted(arguments, tool=KEYED, idempotency_key=option)
    with pytest.raises(InvalidParams) as caught:
        await keys.claim(call, "call_1", NOW)
    assert field in caught.value.fields
    assert await states(database) == []


@pytest.mark.parametrize(
    "call",
    [
        permitted({"idempotency_key": "p"}),  # not a parameter of this tool
        permitted({}, tool=KEYED, effective={"idempotency_key": "the agent's or a default"}),
    ],
)
async def test_idempotency_key_from_an_unknown_parameter_or_default_is_ignored(
    keys: Keys, call: Any
) -> None:
    assert key_of(call) is None
    assert await keys.claim(call, "call_1", NOW) is None


# What a repeat hears


@pytest.mark.parametrize(
    "other",
    [
        permitted({"text": "b"}, idempotency_key="k"),
        permitted({"text": "a"}, idempotency_key="k", agent_id="other"),
        permitted({"text": "a"}, idempotency_key="k", session_id="other"),
        permitted({"text": "a"}, idempotency_key="k", timeout_seconds=5),
        permitted({"text": "a"}, idempotency_key="k", tool=function_definition(name="other")),
        permitted({"text": "a"}, idempotency_key="k", tool=function_definition(version="2.0.0")),
    ],
)
async def test_key_reused_for_different_call_conflicts_in_every_state(
    driver: Driver, keys: Keys, other: Any
) -> None:
    first = permitted({"text": "a"}, idempotency_key="k")
    assert await driver.call(first, "call_1") is not None
    assert await driver.call(other, "call_2") == "IDEMPOTENCY_CONFLICT"
    await keys.prune(NOW + KEY_LIFETIME)
    held = await claimed(keys, first, "call_3")
    with pytest.raises(IdempotencyConflict) as caught:
        await keys.claim(other, "call_4", NOW)
    assert caught.value.details == {"call_id": "call_3"}
    await held.settle(UNKNOWN_ENDING, acted=True)
    assert await driver.call(other, "call_5") == "IDEMPOTENCY_CONFLICT"
    assert driver.acted == ["call_1"]


async def test_unreadable_stored_answer_is_outcome_unknown_and_not_rerun(
    driver: Driver, keys: Keys, database: Database
) -> None:
    call = permitted(idempotency_key="k")
    await driver.call(call, "call_1")
    await database.write(
        lambda c: c.execute(IDEMPOTENCY.update().values(answer='{"of": "version 9"}')).rowcount
    )
    assert await driver.call(call, "call_2") == "OUTCOME_UNKNOWN"
    assert driver.acted == ["call_1"]


# What an ending does to the key

ENDINGS: list[tuple[ErrorInfo | None, bool, bool, str]] = [
    (None, True, False, "keep"),
    (None, True, True, "keep"),
    (None, False, False, "keep"),
    (failure("EXECUTION_ERROR"), True, False, "keep"),
    (failure("EXECUTION_ERROR"), True, True, "keep"),
    (failure("TIMEOUT"), True, False, "keep"),
    (failure("CITY_NOT_FOUND"), True, False, "keep"),
    (failure("APPROVAL_DENIED"), False, False, "keep"),
    (failure("INVALID_PARAMS"), False, False, "keep"),
    (failure("SANDBOX_UNAVAILABLE", retryable=True), False, False, "free"),
    (failure("RATE_LIMITED", retryable=True, retry_after_ms=5), False, False, "free"),
    (failure("QUOTA_EXCEEDED", retry_after_ms=3_600_000), False, False, "free"),
    (failure("QUOTA_EXCEEDED"), False, False, "keep"),
    (failure("REQUIRES_HUMAN_APPROVAL"), False, False, "free"),
    (failure("CANCELLED"), False, False, "free"),
    (failure("INTERNAL_ERROR"), False, False, "free"),
    (failure("CANCELLED"), True, False, "lose"),
    (failure("INTERNAL_ERROR"), True, False, "lose"),
    (failure("CANCELLED"), True, True, "lose"),  # and what may be repeated is freed by that
    (failure("CITY_BUSY", retryable=True), True, False, "keep"),
    (failure("CITY_BUSY", retryable=True, retry_after_ms=5), True, False, "keep"),
    (failure("SANDBOX_UNAVAILABLE", retryable=True), True, True, "free"),
]


@pytest.mark.parametrize(("error", "acted", "may_repeat", "expected"), ENDINGS)
async def test_ending_determines_whether_key_is_kept_freed_or_lost(
    keys: Keys, error: ErrorInfo | None, acted: bool, may_repeat: bool, expected: str
) -> None:
    call = permitted(tool=IDEMPOTENT if may_repeat else None, idempotency_key="k")
    held = await claimed(keys, call)
    assert await held.settle(answer(error=error), acted=acted) == answer(error=error)
    if expected == "lose" and not may_repeat:
        with pytest.raises(OutcomeUnknown, match="Do not retry") as caught:
            await keys.claim(call, "call_2", NOW)
        assert caught.value.details == {"call_id": "call_1"}
        return
    found = await keys.claim(call, "call_2", NOW)
    assert isinstance(found, Replay if expected == "keep" else Claim)


@pytest.mark.parametrize("tool", [HARMLESS, IDEMPOTENT, function_definition()])
@pytest.mark.parametrize("acted", [True, False])
async def test_abandoned_call_may_be_repeated_only_if_harmless(
    driver: Driver, keys: Keys, tool: Any, acted: bool
) -> None:
    call = permitted(tool=tool, idempotency_key="k")
    held = await claimed(keys, call)
    await held.settle(UNKNOWN_ENDING, acted=acted)
    again = await driver.call(call, "call_2")
    if acted and not tool.idempotent:
        assert (again, driver.acted) == ("OUTCOME_UNKNOWN", [])
    else:
        assert driver.acted == ["call_2"]


# Many at once


async def test_exactly_one_of_many_concurrent_equal_keys_runs(driver: Driver) -> None:
    call = permitted({"text": "a"}, idempotency_key="k")
    go = asyncio.Event()
    heard: list[Any] = []

    async def act() -> Envelope:
        await go.wait()
        return answer("the one")

    async def one(number: int) -> None:
        heard.append(await driver.call(call, f"call_{number}", act))
        if len(heard) == 19:  # all but the one that runs
            go.set()

    with anyio.fail_after(120):
        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(one, number)
    assert len(driver.acted) == 1
    assert heard[:19] == ["CALL_IN_PROGRESS"] * 19
    assert heard[19] == answer("the one")


async def test_repeat_queued_around_the_ending_is_never_treated_as_lost(
    keys: Keys, database: Database
) -> None:
    """Between the ending's commit and the wake-up of its caller, the call is not taken for lost."""
    call = permitted(idempotency_key="k")
    held = await claimed(keys, call)
    with anyio.fail_after(120):
        with writer_held(database):
            before = asyncio.create_task(keys.claim(call, "call_2", NOW))
            await anyio.lowlevel.checkpoint()
            ending = asyncio.create_task(held.settle(answer(), acted=True))
            await anyio.lowlevel.checkpoint()
            after = asyncio.create_task(keys.claim(call, "call_3", NOW))
            await anyio.lowlevel.checkpoint()
            ending.cancel()  # its write goes on
        found = await asyncio.gather(before, ending, after, return_exceptions=True)
    assert [type(one) for one in found] == [CallInProgress, asyncio.CancelledError, Replay]


# Cancelled in the middle


async def test_cancelled_claim_frees_the_key(
    driver: Driver, keys: Keys, database: Database
) -> None:
    call = permitted(idempotency_key="k")
    with anyio.fail_after(120):
        with writer_held(database):
            claiming = asyncio.create_task(keys.claim(call, "call_1", NOW))
            await anyio.lowlevel.checkpoint()
            claiming.cancel()
            await anyio.lowlevel.checkpoint()
        with pytest.raises(asyncio.CancelledError):
            await claiming
    assert await states(database) == []
    await driver.call(call, "call_2")
    assert driver.acted == ["call_2"]


async def test_cancelled_claim_does_not_affect_the_keys_holder(
    keys: Keys, database: Database
) -> None:
    call = permitted(idempotency_key="k")
    held = await claimed(keys, call)
    with anyio.fail_after(120):
        async with anyio.create_task_group() as group:
            with writer_held(database):
                group.start_soon(keys.claim, call, "call_2", NOW)
                await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
        with pytest.raises(CallInProgress):
            await keys.claim(call, "call_3", NOW)
    await held.settle(answer(), acted=True)
    assert await states(database) == [KeyState.DONE]


async def test_answer_is_stored_although_its_caller_was_cancelled(
    driver: Driver, keys: Keys, database: Database
) -> None:
    call = permitted(idempotency_key="k")
    held = await claimed(keys, call)
    with anyio.fail_after(120):
        with writer_held(database):
            ending = asyncio.create_task(held.settle(answer(data={"a": 1}), acted=True))
            await anyio.lowlevel.checkpoint()
            ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending
        await held.settle(UNKNOWN_ENDING, acted=True)  # as the spine's net does
    again = await driver.call(call, "call_2")
    assert isinstance(again, Envelope)
    assert again.data == {"a": 1}


# A disk that is full


@pytest.mark.sqlite
async def test_call_does_not_run_if_its_key_cannot_be_stored(home: Path) -> None:
    database = open_database(home / "state.db")
    driver = Driver(Keys(database))
    await database.write(put("so that there is a table"))
    call = permitted({"text": "a"}, idempotency_key="k" * 250)
    set_full(database)
    outcomes = []
    for number in range(200):  # until no page has room for one more
        key = f"{number:04}" + "k" * 200
        found = await driver.call(permitted(idempotency_key=key), f"call_{number}")
        outcomes.append(found)
        if found == WriteFailed.code:
            break
    assert outcomes[-1] == WriteFailed.code
    assert await driver.call(call, "call_full") == WriteFailed.code
    assert "call_full" not in driver.acted
    set_roomy(database)
    await driver.call(call, "call_after")
    assert "call_after" in driver.acted
    database.close()


@pytest.mark.sqlite
@pytest.mark.parametrize("may_repeat", [True, False])
async def test_unstorable_answer_is_returned_with_warning_and_key_is_kept(
    home: Path, may_repeat: bool
) -> None:
    database = open_database(home / "state.db")
    driver = Driver(Keys(database))
    call = permitted(tool=IDEMPOTENT if may_repeat else None, idempotency_key="k")

    async def act() -> Envelope:
        set_full(database)
        return answer("call_1", {"text": "x" * 100_000})

    given = await driver.call(call, "call_1", act)
    assert isinstance(given, Envelope)
    assert given.success
    assert given.metadata.warnings == (claim_module.NOT_KEPT,)
    set_roomy(database)
    again = await driver.call(call, "call_2")
    if may_repeat:
        assert driver.acted == ["call_1", "call_2"]
    else:
        assert (again, driver.acted) == ("OUTCOME_UNKNOWN", ["call_1"])
    database.close()


# Large, and old


async def test_prune_removes_all_expired_keys(
    driver: Driver, keys: Keys, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "DELETED_AT_ONCE", 2)
    for number in range(5):
        await driver.call(permitted(idempotency_key=f"k{number}"), f"call_{number}")
    young = NOW + timedelta(hours=1)
    await driver.call(permitted(idempotency_key="young"), "call_5", now=young)
    assert await keys.prune(NOW) == 0
    assert await keys.prune(NOW + KEY_LIFETIME) == 5
    assert await states(database) == [KeyState.DONE]


# -- fingerprints ----------------------------------------------------------------------------


def test_every_call_option_is_classified_for_the_fingerprint() -> None:
    elsewhere = {"agent_id", "session_id", "idempotency_key", "dry_run"}
    of_parts = {name for name, option in OF_PARTS.items() if option.decides}
    groups = [set(DECIDING_OPTIONS), of_parts, set(SHOWN), elsewhere]
    assert set().union(*groups) == CallOptions.model_fields.keys()
    assert sum(map(len, groups)) == len(CallOptions.model_fields)


CHANGES: dict[str, dict[str, Any]] = {
    "arguments": {"arguments": {"text": "other"}},
    "more arguments": {"arguments": {"text": "a", "more": 1}},
    "effective arguments": {"effective": {"text": "a", "filled in": 1}},
    "tool": {"tool": function_definition(name="other")},
    "version": {"tool": function_definition(version="2.0.0")},
    "principal": {"by": principal("uid:2")},
    "agent": {"agent_id": "a"},
    "session": {"session_id": "s"},
    "timeout": {"timeout_seconds": 3},
    "memory": {"memory_limit_mb": 64},
    "isolation": {"isolation": "container_per_call"},
    "packages": {"packages": ["humanize>=4"]},
    "receipt": {"receipt": True},
    "replay": {"replay": {"exchanges": []}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_fingerprint_changes_with_every_deciding_option(change: str) -> None:
    changed = permitted(**{"arguments": {"text": "a"}, **CHANGES[change]})
    assert fingerprint(changed) != fingerprint(permitted({"text": "a"}))


def test_fingerprint_is_that_of_earlier_versions() -> None:
    known = {
        "plain": {},
        "no packages": {"packages": []},
        "packages": {"packages": ["humanize>=4"]},
        "receipt": {"receipt": True},
        "replay": {"replay": {"exchanges": []}},
    }
    found = {name: fingerprint(permitted({"text": "a"}, **one))[:12] for name, one in known.items()}
    assert found == {
        "plain": "b10f59641f83",
        "no packages": "b10f59641f83",
        "packages": "49cb74f2b61d",
        "receipt": "685fdb9adecd",
        "replay": "c715085142f7",
    }


SHOWN: dict[str, Any] = {
    "enable_cache": False, "enable_streaming": False, "enable_retry": False, "debug": True,
    "max_length": 5, "return_summary": False, "wait_for_approval": True, "trace_id": "t",
    "cancel_on_disconnect": True, "new_call": True,
}  # fmt: skip


@pytest.mark.parametrize("option", sorted(SHOWN))
def test_fingerprint_ignores_display_options(option: str) -> None:
    shown = permitted({"text": "a"}, **{option: SHOWN[option]})
    assert fingerprint(shown) == fingerprint(permitted({"text": "a"}))


@pytest.mark.parametrize("option", [{}, {"idempotency_key": "k"}])
def test_fingerprint_ignores_the_tools_own_key_parameter(option: dict[str, str]) -> None:
    bare = fingerprint(permitted({"text": "a"}, tool=KEYED))
    given_key = permitted({"text": "a", "idempotency_key": "k"}, tool=KEYED, **option)
    assert fingerprint(given_key) == bare
    assert fingerprint(permitted({"text": "b", "idempotency_key": "k"}, tool=KEYED)) != bare


def test_fingerprint_includes_key_argument_not_declared_by_the_tool() -> None:
    free = function_definition({"text": {"type": "string"}})
    one, other = (permitted({"idempotency_key": key}, tool=free) for key in "ab")
    assert fingerprint(one) != fingerprint(other)


@pytest.mark.parametrize("change", CHANGES)
def test_generated_key_depends_on_action_and_caller_but_not_limits(change: str) -> None:
    changed = permitted(**{"arguments": {"text": "a"}, **CHANGES[change]})
    is_same = key_made_of(changed) == key_made_of(permitted({"text": "a"}))
    # Another limit is no other action: the repeat is a conflict, and runs nothing.
    assert is_same is (
        change in ("timeout", "memory", "isolation", "packages", "receipt", "replay")
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800", {"\udfff": 1}, object()])
def test_fingerprint_of_arguments_not_representable_in_json_is_refused(value: Any) -> None:
    with pytest.raises(InvalidParams, match="canonical JSON form") as caught:
        fingerprint(permitted({"text": value}))
    assert caught.value.fields == ("options.idempotency_key",)


# -- Calls with keys through a whole engine ------------------------------------------------


async def test_replay_is_recorded_at_no_cost_and_dry_run_takes_no_key(home: Path) -> None:
    deeds: list[int] = []

    @tool(sandboxed=False, description="Act.", cost_per_use="0.5")
    async def act() -> None:
        deeds.append(1)

    async with bench(home, [act]) as b:
        planned = await b.engine.call("act", idempotency_key="k", dry_run=True)
        for _ in range(3):
            await b.engine.call("act", idempotency_key="k")
        again = await b.engine.call("act", idempotency_key="k", dry_run=True)
        page = await b.engine.calls()
    for rehearsed in (planned, again):
        assert rehearsed.data["dry_run"] is True
        assert rehearsed.metadata.idempotent_replay is False
    assert deeds == [1]
    assert [record.cost for record in page.items] == ["0.000000", "0.000000", "0.500000"]
    assert len({record.call_id for record in page.items}) == 3
    assert {record.code for record in page.items} == {"OK"}
