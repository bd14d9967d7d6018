"""The record of calls: what is kept, found by text, and deleted again."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import ValidationError
from sqlalchemy import Connection, func, select, text

from fumehood.core.call_log import CallQuery
from fumehood.core.errors import InvalidParams
from fumehood.storage import calls as calls_module
from fumehood.storage.calls import CallLog, Record, texts_in
from fumehood.storage.database import Database, open_database
from fumehood.storage.idempotency import MAX_ANSWER_BYTES
from fumehood.storage.schema import RECORDS
from fumehood.storage.settings import RecordSettings
from support.state import Events, call_row, writer_held

pytestmark = pytest.mark.anyio

NOON = datetime(2026, 1, 8, 12, tzinfo=UTC)


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture(params=["file", pytest.param("memory", marks=pytest.mark.sqlite)])
def database(request: pytest.FixtureRequest, home: Path, events: Events) -> Iterator[Database]:
    opened = open_database(home / "state.db" if request.param == "file" else None, events)
    yield opened
    opened.close()


def log_of(
    database: Database, recorded: Literal["all", "failed", "none"] = "all", **settings: Any
) -> CallLog:
    return CallLog(
        database, kept_days=30, kept=1000, recorded=recorded, record=RecordSettings(**settings)
    )


@pytest.fixture
def log(database: Database) -> CallLog:
    return log_of(database)


def add(log: CallLog, number: int, arguments: dict[str, Any], data: Any = None, **row: Any) -> None:
    texts = texts_in((arguments, data))
    record = Record.of(arguments, b'{"envelope":%d}' % number, texts)
    log.record(call_row(number, record=record, **row))


async def found(log: CallLog, words: str, principal: str = "uid:1") -> list[int]:
    page = await log.page(principal, CallQuery(text=words, limit=100))
    return [int(one.call_id.removeprefix("call_"), 16) for one in page.items]


async def kept(database: Database) -> list[int]:
    await database.flush()
    return await database.read(
        lambda connection: list(connection.execute(select(RECORDS.c.seq)).scalars())
    )


async def test_record_is_read_by_its_owner_only(log: CallLog) -> None:
    add(log, 1, {"expression": "6*7"})
    read = await log.find("uid:1", f"call_{1:024x}")
    assert read is not None
    assert read[1] == ({"expression": "6*7"}, b'{"envelope":1}')
    assert await log.find("uid:2", f"call_{1:024x}") is None


@pytest.mark.parametrize(
    ("words", "hits"),
    [
        ("zerodivisionerror", [3]),
        ("ZeroDivisionError: division", [3]),
        ("prices.csv", [2, 1]),
        ('"read prices"', [1]),
        ('"prices read"', []),
        ("read division", []),
        ("1024", [2]),
        ("Grüße", [2]),
        ("grusse", []),
        ('" OR 1', [2]),
        ("NEAR(read prices)", []),
        ("words:read", []),
        ("read*", [1]),
        ("-> read", [1]),
        ("workspace/prices", [1]),
        ("a\0read", []),
        ("read '); DROP TABLE calls; --", []),
    ],
)
async def test_calls_are_found_by_all_words_and_phrases(
    log: CallLog, words: str, hits: list[int]
) -> None:
    add(log, 1, {"code": "read prices from /workspace/prices.csv"})
    add(log, 2, {"path": "prices.csv", "bytes": 1024}, {"text": "Grüße or 1"})
    add(log, 3, {"nested": [{"deep": ["x"]}]}, {"message": "ZeroDivisionError: division by zero"})
    assert await found(log, words) == hits


async def test_search_finds_no_calls_of_others(log: CallLog) -> None:
    add(log, 1, {"code": "needle"})
    add(log, 2, {"code": "needle"}, principal_id="uid:2")
    assert await found(log, "needle") == [1]
    assert await found(log, "needle", "uid:2") == [2]


@pytest.mark.parametrize("words", ["", " ", '"', "-> ;", "\0", "_"])
def test_search_without_a_word_is_refused(words: str) -> None:
    with pytest.raises(ValidationError, match="word to search for"):
        CallQuery(text=words)


async def test_search_that_takes_long_is_given_up(
    log: CallLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 101):
        add(log, number, {"x": ["a " * 2047 + "a"] * 4})
    monkeypatch.setattr(calls_module, "SEARCH_S", 0.002)
    with pytest.raises(InvalidParams, match="Use rarer words"):
        await found(log, f'"{"a " * 16}"')
    monkeypatch.setattr(calls_module, "SEARCH_S", 60)
    assert await found(log, "nothing") == []


async def test_ends_of_long_texts_are_found_and_contents_of_files_are_not(log: CallLog) -> None:
    long = "first " + "x" * 100_000 + " middle " + "y" * 100_000 + " last"
    encoded = base64.b64encode(b"hidden" * 100).decode()
    add(log, 1, {"code": long}, {"files": [{"content_base64": encoded}], "name": "shown"})
    assert [await found(log, word) for word in ("first", "last", "shown")] == [[1]] * 3
    assert [await found(log, word) for word in ("middle", encoded[:190])] == [[]] * 2
    read = await log.find("uid:1", f"call_{1:024x}")
    assert read is not None
    assert read[1] is not None
    assert read[1].arguments == {"code": long}


async def test_text_that_is_no_utf8_is_kept(log: CallLog) -> None:
    add(log, 1, {"path": "a\0b"}, {"name": "file\udcff named"})
    assert await found(log, "named") == [1]


async def test_too_large_call_has_a_row_without_a_record(log: CallLog) -> None:
    assert Record.of({"code": "x" * MAX_ANSWER_BYTES}, b"{}", []) is None
    add(log, 1, {"code": "x" * MAX_ANSWER_BYTES})
    read = await log.find("uid:1", f"call_{1:024x}")
    assert read is not None
    assert read[1] is None


@pytest.mark.parametrize(
    ("recorded", "kept_codes"), [("all", ["OK", "TIMEOUT"]), ("failed", ["TIMEOUT"]), ("none", [])]
)
def test_setting_says_which_calls_are_recorded(
    database: Database, recorded: Literal["all", "failed", "none"], kept_codes: list[str]
) -> None:
    log = log_of(database, recorded)
    assert [code for code in ("OK", "TIMEOUT") if log.keeps_record_of(code)] == kept_codes


async def test_old_records_are_deleted_and_their_calls_stay(
    database: Database, log: CallLog
) -> None:
    add(log, 1, {"code": "needle"}, at="2026-01-01T11:59:59.000Z")
    add(log, 2, {"code": "needle"}, at="2026-01-01T12:00:01.000Z")
    await log.prune(NOON)
    assert await kept(database) == [2]
    assert await found(log, "needle") == [2]
    page = await log.page("uid:1", CallQuery())
    assert len(page.items) == 2


async def test_deleted_call_takes_its_record_along(database: Database, log: CallLog) -> None:
    add(log, 1, {"code": "needle"}, at="2025-11-01T00:00:00.000Z")
    add(log, 2, {"code": "other"}, at="2026-01-08T00:00:00.000Z")
    log._record_days = 365
    await log.prune(NOON)
    assert await kept(database) == [2]
    assert await found(log, "needle") == []


async def test_size_is_shared_fairly_and_the_oldest_go_first(database: Database) -> None:
    log = log_of(database, kept_mb=1)
    noise = "".join(chr(0x4E00 + number) for number in range(20_000))  # hardly compressible
    for number in range(40):
        add(log, number, {"code": noise[number * 3 :]}, at="2026-01-08T00:00:00.000Z")
    add(log, 100, {"code": "quiet"}, principal_id="uid:2", at="2026-01-08T00:00:00.000Z")
    await log.prune(NOON)

    def size(connection: Connection) -> int:
        return int(connection.execute(select(func.sum(RECORDS.c.size))).scalar() or 0)

    assert (1 << 20) * 0.8 < await database.read(size) <= 1 << 20
    assert await found(log, "quiet", "uid:2") == [100]
    left = await kept(database)
    assert left == list(range(left[0], 42))
    assert left[0] > 1


async def test_records_that_fill_much_are_deleted_soon(database: Database) -> None:
    log = log_of(database, kept_mb=1)
    noise = "".join(chr(0x4E00 + number) for number in range(20_000))
    for number in range(10):
        assert not log.overdue.is_set()
        add(log, number, {"code": noise[number:]})
        if log.overdue.is_set():
            break
    assert log.overdue.is_set()


async def test_large_records_do_not_fill_the_memory_while_the_disk_is_slow(
    database: Database, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are left out are counted and logged, as calls without a row are."""
    monkeypatch.setattr(calls_module, "MAX_WAITING_BYTES", 100_000)
    log = log_of(database)
    with writer_held(database):
        for number in range(30):
            add(log, number, {"code": "".join(chr(0x4E00 + n * 7 % 9973) for n in range(5000))})
    await database.flush()
    lost = 30 - len(await kept(database))
    assert 0 < lost < 30
    assert database.lost_posts == lost
    assert events.named("state.rows_dropped") == [{"dropped_rows": lost}]
    assert len((await log.page("uid:1", CallQuery(limit=50))).items) == 30


@pytest.mark.sqlite
@pytest.mark.parametrize("busy_rows", [1, 50])
async def test_index_of_words_agrees_with_the_records(
    database: Database, log: CallLog, monkeypatch: pytest.MonkeyPatch, busy_rows: int
) -> None:
    monkeypatch.setattr(calls_module, "BUSY_ROWS", busy_rows)
    for number in range(50):
        day = 1 + number % 8
        add(log, number, {"code": f"word{number} common"}, at=f"2026-01-{day:02}T00:00:00.000Z")
    await log.prune(NOON)
    left = await found(log, "common")
    assert len(left) == len(await kept(database)) > 0
    await database.write(
        lambda connection: connection.execute(
            text("INSERT INTO record_words(record_words, rank) VALUES ('integrity-check', 1)")
        )
    )
    add(log, 60, {"code": "common"}, at="2026-01-08T00:00:00.000Z")
    assert await found(log, "common") == [60, *left]
    await log.prune(NOON + timedelta(days=365))
    assert await found(log, "common") == []
