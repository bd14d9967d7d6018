"""Idempotency keys survive their engine: two engines on one database, the first one killed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from conftest import CLEAN_ENVIRONMENT
from fumehood.core.envelope import Envelope
from fumehood.pipeline.claim import Keys
from fumehood.storage.database import Database, open_database
from support.keyed import NOW, Driver, permitted
from support.keyed_crash import ACTING, POINTS, REPEATABLE, lines, result, run_to
from support.keyed_crash import write as act

pytestmark = [pytest.mark.anyio, pytest.mark.row("P3", "D6")]

Opened = AbstractAsyncContextManager[tuple[Driver, Database]]


@pytest.fixture
def engine(home: Path) -> Callable[[], Opened]:
    """The idempotency keys of one engine, on a persistent database."""

    @asynccontextmanager
    async def life() -> AsyncIterator[tuple[Driver, Database]]:
        database = open_database(home / "state.db")
        try:
            keys = Keys(database)
            await keys.recover(NOW)
            yield Driver(keys), database
        finally:
            database.close()

    return life


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("repeatable", [True, False])
async def test_call_killed_at_any_point_is_not_run_twice(
    engine: Callable[[], Opened], home: Path, point: str, repeatable: bool
) -> None:
    run_to(point, home, CLEAN_ENVIRONMENT, repeatable=repeatable)
    assert lines(home / "ledger") == ([] if point == "claimed" else ["k"])
    call = permitted(tool=REPEATABLE if repeatable else ACTING, idempotency_key="k")

    async def again() -> Envelope:
        act(home / "ledger", "k")
        return result("k")

    async with engine() as (driver, _):
        heard = await driver.call(call, "call_2", again)
    if point == "settled":
        assert isinstance(heard, Envelope)
        assert heard.metadata.idempotent_replay is True
        assert heard.data == {"did": "k"}
    elif repeatable:  # the twin: what does no harm is simply carried out
        assert heard == result("k")
    else:
        assert heard == "OUTCOME_UNKNOWN"
        assert driver.acted == []


async def test_control_call_without_key_runs_twice_in_the_same_harness(
    home: Path,
) -> None:
    """Checks the harness: a call without a key runs again, and the ledger shows it."""
    run_to("acted", home, CLEAN_ENVIRONMENT, repeatable=False)

    async def again() -> Envelope:
        act(home / "ledger", "k")
        return result("k")

    database = open_database(home / "state.db")
    try:
        await Driver(Keys(database)).call(permitted(tool=ACTING), "call_2", again)
    finally:
        database.close()
    assert lines(home / "ledger") == ["k", "k"]
