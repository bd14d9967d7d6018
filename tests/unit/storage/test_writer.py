"""The database writer: durability, isolation of failures, and survival of its thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, text

from fumehood.core.errors import EngineError
from fumehood.storage import writer as writer_module
from fumehood.storage.database import Database, open_database
from fumehood.storage.errors import ReadFailed, WriteFailed
from support.state import Events, keys, post, put, set_full, set_roomy, writer_held
from support.wait import wait_until

BIG = "x" * 200_000


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture(params=["file", pytest.param("memory", marks=pytest.mark.sqlite)])
def database(request: pytest.FixtureRequest, home: Path, events: Events) -> Iterator[Database]:
    path = home / "state.db" if request.param == "file" else None
    opened = open_database(path, events)
    yield opened
    opened.close()


def submit(database: Database, job: Any) -> Future[Any]:
    return database._writer.submit(job, durable=True)


def half(connection: Connection) -> None:
    put("half")(connection)
    raise LookupError("changed its mind")


def outcomes(futures: list[Future[Any]]) -> list[Any]:
    """The result or error type of each future."""
    return [type(error) if (error := f.exception(20)) else f.result() for f in futures]


def call_ids(database: Database) -> set[str]:
    return set(
        database.write_now(lambda c: c.execute(text("SELECT id FROM calls")).scalars().all())
    )


def test_state_whose_disk_hangs_is_failing_until_it_goes_on(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writer_held(database):  # twin: a write that only takes long
        assert not database.is_failing
    monkeypatch.setattr(writer_module, "HANGS_S", 0.0)
    with writer_held(database):
        assert database.is_failing
    assert not database.is_failing


@pytest.mark.anyio
@pytest.mark.row("D6")
async def test_read_sees_every_completed_write(database: Database) -> None:
    for number in range(10):
        assert await database.write(put(f"k{number}")) == f"k{number}"
        assert f"k{number}" in await database.read(keys)


@pytest.mark.row("D6")
def test_queued_jobs_are_written_in_groups_in_order(database: Database) -> None:
    order: list[int] = []
    with writer_held(database):
        futures = [
            submit(database, lambda c, n=number: order.append(n) or put(f"k{n}")(c))
            for number in range(writer_module.MAX_GROUP + 50)
        ]
    assert outcomes(futures) == [f"k{n}" for n in range(writer_module.MAX_GROUP + 50)]
    assert order == sorted(order)


@pytest.mark.row("D6")
@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        (half, LookupError),
        (lambda c: put("k0")(c), WriteFailed),
        (lambda c: c.execute(text("SELECT nothing FROM nowhere")), WriteFailed),
        (lambda c: (_ for _ in ()).throw(SystemExit(3)), SystemExit),
        pytest.param(lambda c: c.commit(), Exception, marks=pytest.mark.sqlite),
        (lambda c: c.close(), Exception),
    ],
    ids=["raises", "constraint", "wrong-sql", "system-exit", "commits", "closes"],
)
def test_failing_job_fails_alone_or_fails_its_whole_group(
    database: Database, events: Events, failing: Any, expected: type[BaseException]
) -> None:
    """In both cases no lost row is reported as written, and the writer continues."""
    with writer_held(database):
        futures = [submit(database, job) for job in (put("k0"), failing, put("k2"))]
    before, failed, after = outcomes(futures)
    assert issubclass(failed, expected)
    kept = database.read_now(keys)
    if expected is Exception:  # a job that ends the transaction breaks its whole group
        assert (before, after) == (WriteFailed, WriteFailed)
    else:
        assert (before, after) == ("k0", "k2")
        assert kept == {"k0", "k2"}
        assert (database.is_failing, events.seen) == (False, [])
    assert database.write_now(put("later")) == "later"


@pytest.mark.sqlite
@pytest.mark.row("D6")
def test_full_disk_fails_writes_and_writer_recovers(database: Database, events: Events) -> None:
    set_full(database)
    with writer_held(database):
        futures = [submit(database, job) for job in (put("k0"), put("k1", BIG), put("k2"))]
    results = outcomes(futures)
    assert results[1] is WriteFailed
    assert database.read_now(keys) == {key for key in results if isinstance(key, str)}
    assert database.is_failing
    set_roomy(database)
    assert database.write_now(put("k3", BIG)) == "k3"
    assert not database.is_failing
    assert events.named("state.write_failed") == [{"reason": "database or disk is full"}]
    assert len(events.named("state.write_works_again")) == 1


@pytest.mark.sqlite
@pytest.mark.row("D6")
def test_job_swallowing_full_disk_error_does_not_lose_reported_writes(database: Database) -> None:
    """SQLite has already rolled back the other jobs' rows, although a commit would succeed."""

    def swallow(connection: Connection) -> str:
        try:
            put("big", BIG)(connection)
        except Exception:
            return "fine"
        return "it fitted"

    set_full(database)
    with writer_held(database):
        futures = [submit(database, job) for job in (put("k0"), swallow, put("k2"))]
    results = outcomes(futures)
    assert results[1] in (WriteFailed, "fine")
    assert database.read_now(keys) == {key for key in results if key in ("k0", "k2")}


@pytest.mark.sqlite
@pytest.mark.row("D6", "E1")
def test_failed_write_error_contains_no_values(database: Database) -> None:
    database.write_now(put("secret-key"))
    with pytest.raises(WriteFailed) as caught:
        database.write_now(put("secret-key", "secret-value"))
    assert isinstance(caught.value, EngineError)
    assert (caught.value.code, caught.value.may_retry) == ("INTERNAL_ERROR", False)
    assert "could not be written" in caught.value.message
    assert "UNIQUE constraint failed: meta.key" in caught.value.message
    assert "secret" not in caught.value.message


@pytest.mark.anyio
@pytest.mark.row("D6", "P8")
async def test_cancelled_wait_does_not_stop_the_write_or_the_writer(database: Database) -> None:
    with writer_held(database):
        waiting = asyncio.create_task(database.write(put("k0")))
        while not database._writer._waiting:
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert await database.write(put("k1")) == "k1"
    assert await database.read(keys) == {"k0", "k1"}


@pytest.mark.row("D6")
def test_close_writes_queued_jobs_and_refuses_later_ones(home: Path) -> None:
    database = open_database(home / "state.db")
    closer = threading.Thread(target=database.close)
    with writer_held(database):
        futures = [submit(database, put(f"k{number}")) for number in range(20)]
        for number in range(20):
            post(database, number)
        closer.start()
        wait_until(lambda: database._writer._closing)
        late = submit(database, put("late"))
        post(database, 99)
    closer.join(20)
    assert outcomes(futures) == [f"k{number}" for number in range(20)]
    assert outcomes([late]) == [WriteFailed]
    assert database.lost_posts == 1
    with pytest.raises(ReadFailed, match="closed"):
        database.read_now(keys)
    again = open_database(home / "state.db")
    assert again.read_now(keys) == {f"k{number}" for number in range(20)}
    assert len(call_ids(again)) == 20
    again.close()


@pytest.mark.anyio
async def test_rows_nobody_waits_for_are_written_while_other_jobs_never_pause(
    database: Database,
) -> None:
    """Each result triggers the next job, so that a job is always queued."""
    post(database, 1)
    stop = threading.Event()
    rounds = 0

    async def keep_writing() -> None:
        nonlocal rounds
        while not stop.is_set():
            rounds += 1
            await database.write(put(f"{threading.get_ident()}-{rounds}"))

    writers = [asyncio.create_task(keep_writing()) for _ in range(3)]
    await asyncio.wait_for(database.flush(), 20)
    stop.set()
    await asyncio.gather(*writers)
    assert len(call_ids(database)) == 1


@pytest.mark.sqlite
@pytest.mark.anyio
@pytest.mark.row("D6")
async def test_rows_lost_on_full_disk_are_counted_and_logged_once(
    database: Database, events: Events
) -> None:
    set_full(database)
    for turn in range(5):
        for number in range(10):
            post(database, turn * 10 + number, tool="x" * 9000)
        await database.flush()
    assert database.lost_posts == 50
    assert database.is_failing
    set_roomy(database)
    post(database, 1000)
    await database.flush()
    assert [name for name, _ in events.seen] == ["state.write_failed", "state.write_works_again"]
    assert events.named("state.write_works_again") == [{"lost_rows": 50}]
    assert len(call_ids(database)) == 1


@pytest.mark.anyio
async def test_posted_rows_over_the_bound_are_dropped_counted_and_logged(
    database: Database, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "MAX_POSTS", 10)
    with writer_held(database):
        for number in range(25):
            post(database, number)
    await database.flush()
    assert len(call_ids(database)) == 10
    assert database.lost_posts == 15
    assert events.named("state.rows_dropped") == [{"dropped_rows": 15}]


def test_writer_survives_a_failed_connection(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = open_database(home / "state.db")
    connect = database._backend.writing.connect

    def fail() -> Any:
        raise OSError("no more descriptors")

    monkeypatch.setattr(database._backend.writing, "connect", fail)
    with pytest.raises(WriteFailed, match="OSError"):
        database.write_now(put("k0"))
    monkeypatch.setattr(database._backend.writing, "connect", connect)
    assert database.write_now(put("k1")) == "k1"
    database.close()


@pytest.mark.sqlite
@pytest.mark.row("D6")
def test_durable_writes_use_full_sync_and_posted_rows_do_not(home: Path) -> None:
    """Checked through SQLite's own synchronous setting of each transaction."""
    database = open_database(home / "state.db")

    def level(connection: Connection) -> int:
        return connection.exec_driver_sql("PRAGMA synchronous").scalar_one()

    assert submit(database, level).result(20) == 2  # FULL
    assert database._writer.submit(level, durable=False).result(20) == 1  # NORMAL
    with writer_held(database):
        mixed = [database._writer.submit(level, durable=durable) for durable in (False, True)]
    assert outcomes(mixed) == [2, 2]
    database.close()


@pytest.mark.row("D6")
def test_refused_posted_row_does_not_affect_its_group(database: Database, events: Events) -> None:
    """Everything else that its function wrote for it is also rolled back."""

    def keep(connection: Connection, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            put(f"beside-{row['key']}")(connection)
            put(row["key"])(connection)

    database.write_now(put("b"))
    with writer_held(database):
        for key in ("a", "b", "c"):
            database.post(keep, {"key": key, "value": ""})
    database._writer.flush().result(20)
    assert database.read_now(keys) == {"a", "b", "c", "beside-a", "beside-c"}
    assert database.lost_posts == 1
    assert not database.is_failing
    assert [told["refused_rows"] for told in events.named("state.rows_refused")] == [1]
