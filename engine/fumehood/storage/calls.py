"""The call log: who called which tool, when, and how the call ended, and the records of the calls.

Host side. `pipeline/record` writes without waiting. `CallLog` reads a principal's own calls; the
part `overview` reads the calls of all principals. Each call has a row. Its values are also added to
the audit chain, in the same transaction. A call can also have a record, which is written together
with the row and is not in the audit chain. The record contains the call's arguments and envelope as
two lines of JSON, redacted as for the caller, and the words of both for full-text search.
Invariants: a record has at most `MAX_ANSWER_BYTES` of JSON and `MAX_WORDS` characters of words;
`CallLog` returns only a principal's own rows; one principal's calls never displace another's rows;
rows are ordered by `seq`, the order of writing, because clocks may be set back.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel
from sqlalchemy import (
    ColumnElement,
    Connection,
    case,
    column,
    func,
    insert,
    literal_column,
    select,
    text,
)
from sqlalchemy.engine import RowMapping
from sqlalchemy.exc import DatabaseError

from fumehood.core.call_log import (
    CallPage,
    CallQuery,
    CallRecord,
    only_words,
    words_in,
)
from fumehood.core.errors import NO_FAULT, InvalidParams, ResourceNotFound
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB
from fumehood.protocol import strict_json
from fumehood.storage.audit_chain import AuditEntry, chain_of
from fumehood.storage.database import Database
from fumehood.storage.idempotency import MAX_ANSWER_BYTES
from fumehood.storage.schema import CALLS, MAX_INTEGER, RECORDS
from fumehood.storage.settings import RecordSettings
from fumehood.storage.writer import Row

IN_MEMORY_KEPT = 10_000
"""Maximum number of calls kept for each principal if the log is only in memory. They need about 5
MB."""

IN_MEMORY_MB = 8
"""Maximum size of all records in MB if the log is only in memory."""

MAX_WAITING_BYTES = 64 * MB
"""Limit for the size of a record in bytes, multiplied by the number of jobs and rows that wait to
be written. A record above this limit is dropped, so that memory does not fill up."""

BUSY_ROWS = 50
"""Number of rows in one write from which the engine counts as busy. The words of these rows are
then indexed later."""

MAX_WORDS = 16 * 1024
"""Maximum number of characters of one record that full-text search covers."""

MAX_TEXT_WORDS = MAX_WORDS // 4
"""Maximum number of characters of one text in a record that full-text search covers. In a longer
text, search covers the beginning and the end, each with half of this number."""

COMPRESSED_FROM = 2048
"""Size in bytes from which a record's document is compressed. For smaller documents, compression
would take too much time for the space that it saves."""

_ENCODED = re.compile(r"[A-Za-z0-9+/=_-]{200,}")
"""Matches encoded data that contains no words, such as the Base64 content of a file."""

INDEXED_AT_ONCE = 100
"""Maximum number of records that are indexed in one transaction. A transaction must be short,
because other writes wait for it."""

SEARCH_S = 2.0
"""Time limit of one search in seconds. The limit is needed because callers choose both the stored
texts and the search texts."""

_INDEX = text("""
    INSERT INTO record_words(rowid, words) SELECT seq, words FROM records
    WHERE seq > coalesce((SELECT max(id) FROM record_words_docsize), 0) ORDER BY seq LIMIT :most
""")

_INSERT = insert(CALLS)
_INSERT_RECORD = insert(RECORDS)

_SAME_NAME = (
    "principal_id", "agent_id", "session_id", "trace_id", "code", "ended_by", "cpu_ms", "cost",
    "currency", "input_tokens", "output_tokens", "tokens_used", "parent_id", "network",
)  # fmt: skip


NO_SUCH_CALL = "There is no such call of yours in the log. Do not retry."

APPROVAL_WAIT = "approval wait"
"""Name of the stage in which a call waits for a human's approval."""

_NOT_AUDITED = frozenset({"id", "at", "stages", "record"})


CallRow = Row
"""The row of one call, made by `pipeline/record`. Its keys are the columns of `CALLS` except `seq`
and `audit_seq`, and the key `record`, whose value is the call's `Record` or None. `stages`,
`network` and `record` may be missing."""


class CallLog:
    """The call log. Writes the calls of all principals, and reads a principal's own calls.

    The event `overdue` is set when the log has grown so much that `prune` should run.
    """

    def __init__(
        self,
        database: Database,
        *,
        kept_days: int,
        kept: int,
        recorded: Literal["all", "failed", "none"] = "none",
        record: RecordSettings | None = None,
    ) -> None:
        settings = record or RecordSettings()
        kept_mb = settings.kept_mb
        if database.directory is None:
            kept, kept_mb = min(kept, IN_MEMORY_KEPT), min(kept_mb, IN_MEMORY_MB)
        self._database = database
        self._kept_days = kept_days
        self._kept = kept
        self._recorded = recorded
        self._record_days = settings.kept_days
        self._record_bytes = MB * kept_mb
        self._unpruned = 0
        self._unpruned_bytes = 0
        self.overdue = asyncio.Event()

    def keeps_record_of(self, code: str) -> bool:
        """Return whether the log keeps the arguments and the answers of calls that end with this
        result code.
        """
        return self._recorded == "all" or (self._recorded == "failed" and code != "OK")

    def record(self, row: CallRow) -> None:
        """Add the row of one call without waiting. The row is lost if the engine crashes within the
        next second.
        """
        row["tokens_used"] = min(row["tokens_used"], MAX_INTEGER)
        record: Record | None = row.get("record")
        size = len(record.document) + len(record.words) if record is not None else 0
        if size * self._database.waiting > MAX_WAITING_BYTES:
            row["record"], size = None, 0
            self._database.note_dropped()
        self._database.post(_keep, row)
        self._unpruned += 1
        self._unpruned_bytes += size
        if self._unpruned * 10 >= self._kept or self._unpruned_bytes * 10 >= self._record_bytes:
            self.overdue.set()

    async def page(self, principal_id: str, query: CallQuery) -> CallPage:
        """Return one page of a principal's own calls that match the query, newest first. A call
        that has just ended is also found.

        Raises:
            ResourceNotFound: the query's cursor is not the id of a kept call of this principal.
            ReadFailed: the database cannot be read.
            InvalidParams: the text search took too long.
        """
        await all_found(self._database, query)
        return await self._database.read(lambda connection: _page(connection, principal_id, query))

    async def get(self, principal_id: str, call_id: str) -> CallRecord:
        """Read one call of a principal.

        Raises:
            ResourceNotFound: the principal has no such call, or it is no longer kept.
            ReadFailed: the database cannot be read.
        """
        found = await self.find(principal_id, call_id)
        if found is None:
            raise ResourceNotFound(NO_SUCH_CALL)
        return found[0]

    async def find(
        self, principal_id: str, call_id: str
    ) -> tuple[CallRecord, Recorded | None] | None:
        """Return one call of a principal, together with the call's arguments and envelope. The
        second item of the pair is None if the arguments and the envelope were not kept.

        Return None instead of the pair if the principal has no such call, or if the call is no
        longer kept.

        Raises:
            ReadFailed: the database cannot be read.
        """
        own = CALLS.c.principal_id == principal_id
        found = await find_row(self._database, call_id, own)
        return None if found is None else (record_of(found[0]), found[1])

    async def prune(self, now: datetime) -> int:
        """Delete rows that are too old or exceed the limits. Return the number of deleted calls.

        The newest row is never deleted, so that its `seq` is not used again.

        Raises:
            ReadFailed, WriteFailed: the database failed; the remaining rows stay until the next
                run.
        """
        if not self._unpruned and self._database.directory is None:
            return 0
        self._unpruned = self._unpruned_bytes = 0
        await self._database.flush()
        oldest = as_kept(now - timedelta(days=self._record_days))
        await self._database.delete(
            RECORDS.c.seq,
            await self._database.read(
                lambda connection: outdated_records(connection, oldest, self._record_bytes)
            ),
        )
        oldest_kept = as_kept(now - timedelta(days=self._kept_days))
        gone = await self._database.read(
            lambda connection: _outdated(connection, oldest_kept, self._kept)
        )
        # records first, because they are found through their calls
        for seq in (RECORDS.c.seq, CALLS.c.seq):
            await self._database.delete(seq, gone)
        return len(gone)


def _keep(connection: Connection, rows: list[Row]) -> None:
    last = chain_of(connection).append_all(connection, [_audited(row) for row in rows])
    first = last - len(rows) + 1
    seq = newest_seq(connection)
    kept: list[Row] = []
    recorded: list[Row] = []
    for audit_seq, row in enumerate(rows, first):
        seq += 1
        absent: Row = {"seq": seq, "stages": None, "network": None, "audit_seq": audit_seq}
        values = absent | row
        record: Record | None = values.pop("record", None)
        kept.append(values)
        if record is not None:
            recorded.append(record.row(seq))
    connection.execute(_INSERT, kept)
    if recorded:
        connection.execute(_INSERT_RECORD, recorded)
    if recorded and len(rows) < BUSY_ROWS:
        index_words(connection)


def _audited(row: Row) -> AuditEntry:
    """Return the audit entry of a call. The entry contains those fields of the call's row that have
    a value.
    """
    told = {
        key: value for key, value in row.items() if value is not None and key not in _NOT_AUDITED
    }
    return AuditEntry("call.ended", row["at"], {"call_id": row["id"], **told})


def _page(connection: Connection, principal_id: str, query: CallQuery) -> CallPage:
    own = CALLS.c.principal_id == principal_id
    wanted = [own]
    if query.cursor is not None:
        wanted.append(CALLS.c.seq < place_of(connection, query.cursor, own))
    items, has_more = matching(connection, query, wanted)
    return CallPage(
        items=items,
        has_more=has_more,
        next_cursor=items[-1].call_id if has_more else None,
        total_count=None if has_more or query.cursor is not None else len(items),
    )


async def find_row(
    database: Database, call_id: str, *own: ColumnElement[bool]
) -> tuple[RowMapping, Recorded | None] | None:
    """Return the row of a call, together with the call's arguments and envelope. The second item of
    the pair is None if the arguments and the envelope were not kept.

    Return None instead of the pair if there is no such row. `own` are further SQL conditions that
    the row must meet.
    """
    wanted = select(CALLS).where(CALLS.c.id == call_id, *own)

    def found(connection: Connection) -> tuple[RowMapping, Recorded | None] | None:
        row = connection.execute(wanted).mappings().one_or_none()
        return None if row is None else (row, record_at(connection, row["seq"]))

    await database.flush()
    return await database.read(found)


async def all_found(database: Database, query: CallQuery) -> None:
    """Prepare the database so that the query finds every call that has already ended: write pending
    rows and, for a text search, index their words.
    """
    await database.flush()
    if query.text is not None:
        await database.repeat(index_words)


def matching(
    connection: Connection, query: CallQuery, wanted: list[ColumnElement[bool]]
) -> tuple[tuple[CallRecord, ...], bool]:
    """Return the newest calls that match both the query and the SQL conditions in `wanted`, and
    whether more calls match. At most `query.limit` calls are returned.
    """
    wanted += filters_of(query)
    if query.text is None:
        return newest_first(connection, wanted, query.limit)
    with in_time(connection):
        wanted.append(mentions(connection, query.text))
        return newest_first(connection, wanted, query.limit)


def place_of(connection: Connection, cursor: str, *own: ColumnElement[bool]) -> int:
    """Return the sequence number (`seq`) of the call whose id is `cursor`. `own` are further SQL
    conditions that this call must meet. Raises ResourceNotFound if there is no such call.
    """
    named = select(CALLS.c.seq).where(CALLS.c.id == cursor, *own)
    seq: int | None = connection.execute(named).scalar_one_or_none()
    if seq is None:
        raise ResourceNotFound("There is no such cursor. Begin again without one.")
    return seq


def newest_first(
    connection: Connection, wanted: Sequence[ColumnElement[bool]], limit: int
) -> tuple[tuple[CallRecord, ...], bool]:
    """Return at most `limit` of the newest calls that match all SQL conditions in `wanted`, and
    whether more calls match.
    """
    listed = select(CALLS).where(*wanted).order_by(CALLS.c.seq.desc()).limit(limit + 1)
    rows = connection.execute(listed).mappings().all()
    return tuple(record_of(row) for row in rows[:limit]), len(rows) > limit


_EQUAL = {
    "agent": CALLS.c.agent_id, "code": CALLS.c.code, "principal": CALLS.c.principal_id,
    "session": CALLS.c.session_id, "trace": CALLS.c.trace_id, "parent": CALLS.c.parent_id,
}  # fmt: skip
"""Field of a query → the column whose value must equal the field."""


def filters_of(query: BaseModel) -> list[ColumnElement[bool]]:
    """Return the SQL conditions for the filters of a query. The query's cursor gives no condition.
    The filter `tool` may be `name@version`.
    """
    given = {name: value for name, value in query if value is not None}
    filters = [column == given[name] for name, column in _EQUAL.items() if name in given]
    if "since" in given:
        filters.append(CALLS.c.at >= as_kept(given["since"]))
    if "until" in given:
        filters.append(CALLS.c.at < as_kept(given["until"]))
    if "tool" in given:
        name, at, version = given["tool"].partition("@")
        filters.append(CALLS.c.tool == name)
        if at:
            filters.append(CALLS.c.version == version)
    return filters


def record_of(row: RowMapping) -> CallRecord:
    return CallRecord(
        call_id=row["id"],
        timestamp=row["at"],
        tool_name=row["tool"],
        tool_version=row["version"],
        execution_time_ms=row["total_ms"],
        cache_hit=bool(row["cache_hit"]),
        **{key: row[key] for key in _SAME_NAME},
    )


def _outdated(connection: Connection, oldest_kept: str, kept: int) -> list[int]:
    """Return the sequence number (`seq`) of each row to delete, oldest first.

    These are all rows of calls before `oldest_kept`. If a principal has more than `kept` calls, its
    oldest excess rows are also included. The newest row of the whole table is never included.
    """
    newest = connection.execute(select(func.max(CALLS.c.seq))).scalar()
    if newest is None:
        return []
    gone = set(connection.execute(select(CALLS.c.seq).where(CALLS.c.at < oldest_kept)).scalars())
    counts = select(CALLS.c.principal_id, func.count()).group_by(CALLS.c.principal_id)
    for principal_id, count in connection.execute(counts).all():
        if count > kept:
            own = select(CALLS.c.seq).where(CALLS.c.principal_id == principal_id)
            gone.update(connection.execute(own.order_by(CALLS.c.seq).limit(count - kept)).scalars())
    return sorted(gone - {newest})


def as_kept(moment: datetime) -> str:
    """Format a time as it is stored in the column `at`: in UTC, with milliseconds."""
    return f"{moment.astimezone(UTC).replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"


def newest_seq(connection: Connection) -> int:
    return connection.execute(select(func.max(CALLS.c.seq))).scalar() or 0


def failed(code: ColumnElement[Any]) -> ColumnElement[int]:
    return case((code.in_(NO_FAULT), 0), else_=1)


FAILED = failed(CALLS.c.code)
"""SQL expression for one call: 1 if the call failed because of a program, the engine or a service,
otherwise 0."""

# -- records of calls -----------------------------------------------------------------------


class Record(NamedTuple):
    """The record of one call in its stored form: the arguments and the envelope, and the words for
    full-text search.
    """

    document: bytes
    words: str

    @classmethod
    def of(cls, arguments: JsonObject, envelope: bytes, texts: Sequence[str]) -> Record | None:
        """Make the record of a call from the call's arguments and envelope. `envelope` is JSON.
        Full-text search will find the words in `texts`. Return None if the record would be too
        long.
        """
        document = b"%b\n%b" % (strict_json.dumps(arguments), envelope)
        if len(document) > MAX_ANSWER_BYTES:
            return None
        if len(document) >= COMPRESSED_FROM:
            document = zlib.compress(document, 1)
        return cls(document, only_words(" ".join(_ends(texts)))[:MAX_WORDS])

    def row(self, seq: int) -> dict[str, Any]:
        """Return the row for the table `records`. `seq` is the `seq` of the call's row."""
        size = len(self.document) + 2 * len(self.words)  # the index is about as long as the words
        return {"seq": seq, "size": size, "document": self.document, "words": self.words}


def texts_in(value: Any) -> list[str]:
    """Return all keys, texts and numbers in a JSON value, in order, as texts."""
    found: list[str] = []
    waiting: list[Any] = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, dict):
            for key in reversed(value):
                waiting += (value[key], key)
        elif isinstance(value, list | tuple):
            waiting += reversed(value)
        elif value is not None and not isinstance(value, bool):
            found.append(str(value))
    return found


def _ends(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts to index, until their total length reaches `MAX_WORDS` characters.

    If a text is longer than `MAX_TEXT_WORDS` characters, yield only its beginning and its end. Long
    texts that consist of encoded data are left out.
    """
    room = MAX_WORDS
    for one in texts:
        if len(one) >= 200 and _ENCODED.fullmatch(one):
            continue
        if len(one) > MAX_TEXT_WORDS:
            half = MAX_TEXT_WORDS // 2
            yield f"{one[:half]} {one[-half:]}"
        else:
            yield one
        room -= min(len(one), MAX_TEXT_WORDS) + 1
        if room <= 0:
            return


def index_words(connection: Connection, most: int = INDEXED_AT_ONCE) -> int:
    """Add at most `most` of the oldest unindexed records to the full-text index. Return the number
    of added records.

    Only SQLite needs this. Other databases update the index themselves; for them, nothing is done.
    """
    if connection.dialect.name != "sqlite":
        return 0
    return connection.execute(_INDEX, {"most": most}).rowcount


class Recorded(NamedTuple):
    """The arguments and the envelope of a call, read from the call's stored record. `envelope` is
    JSON.
    """

    arguments: JsonObject
    envelope: bytes


def record_at(connection: Connection, seq: int) -> Recorded | None:
    """Return the record of the call with this `seq`, or None if the call has no record."""
    found = connection.execute(select(RECORDS.c.document).where(RECORDS.c.seq == seq)).scalar()
    return None if found is None else read_record(found)


def read_record(document: bytes) -> Recorded:
    """Parse the stored document of a record. The document may be compressed."""
    whole = document if document.startswith(b"{") else zlib.decompress(document)
    arguments, _, envelope = whole.partition(b"\n")
    return Recorded(strict_json.loads(arguments), envelope)


def mentions(connection: Connection, wanted: str) -> ColumnElement[bool]:
    """Return the SQL condition that a call's record contains all the words and phrases in
    `wanted`.
    """
    phrases = words_in(wanted)
    if connection.dialect.name == "postgresql":
        words = func.to_tsvector(literal_column("'simple'"), RECORDS.c.words)
        queries = [func.phraseto_tsquery(literal_column("'simple'"), one) for one in phrases]
        return CALLS.c.seq.in_(select(RECORDS.c.seq).where(*(words.op("@@")(q) for q in queries)))
    match = " ".join(f'"{phrase}"' for phrase in phrases)
    found = text("SELECT rowid AS seq FROM record_words WHERE record_words MATCH :match")
    return CALLS.c.seq.in_(found.bindparams(match=match).columns(column("seq")))


@contextmanager
def in_time(connection: Connection) -> Iterator[None]:
    """Limit the searches within the block to `SEARCH_S` seconds. Raises InvalidParams if they take
    longer.
    """
    latest = time.monotonic() + SEARCH_S
    driver = connection.connection.driver_connection
    if isinstance(driver, sqlite3.Connection):
        driver.set_progress_handler(lambda: time.monotonic() > latest, 100)
    else:
        limit = func.set_config("statement_timeout", f"{SEARCH_S * 1000:.0f}", True)
        connection.execute(select(limit))
    try:
        yield
    except DatabaseError:
        if time.monotonic() < latest:
            raise
        words = f"The search took longer than {SEARCH_S:g} s. Use rarer words, or fewer."
        raise InvalidParams(words, fields=["text"]) from None
    finally:
        if isinstance(driver, sqlite3.Connection):
            driver.set_progress_handler(None, 0)


def outdated_records(connection: Connection, oldest_kept: str, kept_bytes: int) -> list[int]:
    """Return the `seq` of each record to delete.

    These are all records of calls before `oldest_kept`. If the other records use more than
    `kept_bytes` bytes in total, each principal gets the same limit. The limit is computed so that
    the records fit. If a principal is above the limit, its oldest records are also included.
    """
    both = RECORDS.join(CALLS, RECORDS.c.seq == CALLS.c.seq)
    old = select(RECORDS.c.seq).select_from(both).where(CALLS.c.at < oldest_kept)
    gone = set(connection.execute(old).scalars())
    sizes = (
        select(CALLS.c.principal_id, func.sum(RECORDS.c.size))
        .select_from(both)
        .where(CALLS.c.at >= oldest_kept)
        .group_by(CALLS.c.principal_id)
    )
    used = {principal: int(size) for principal, size in connection.execute(sizes).all()}
    share = _share(list(used.values()), kept_bytes)
    for principal, size in used.items():
        if size > share:
            gone.update(_oldest_records(connection, principal, size - share))
    return sorted(gone)


def _share(used: list[int], most: int) -> int:
    """Return the highest limit per principal at which all principals together use at most `most`
    bytes. `used` contains the bytes that each principal uses now.
    """
    left = most
    for done, amount in enumerate(sorted(used)):
        share = left // (len(used) - done)
        if amount > share:
            return share
        left -= amount
    return most


def _oldest_records(connection: Connection, principal: str, excess: int) -> Iterator[int]:
    """Yield the `seq` of a principal's oldest records until their total size reaches `excess`
    bytes.
    """
    both = RECORDS.join(CALLS, RECORDS.c.seq == CALLS.c.seq)
    own = select(RECORDS.c.seq, RECORDS.c.size).select_from(both)
    own = own.where(CALLS.c.principal_id == principal).order_by(RECORDS.c.seq)
    for seq, size in connection.execute(own):
        if excess <= 0:
            return
        excess -= size
        yield seq
