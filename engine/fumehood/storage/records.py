"""The record of calls: what each was given and what it answered, for a while after its end.

Host side, used by `storage/calls`, which writes a record with the row of its call. A record holds
the arguments and the envelope as two lines of JSON, redacted as its caller got them, and the words
in them for the search by text. Invariant: a record has at most `MAX_DOCUMENT_BYTES` of JSON and
`MAX_WORDS` characters of words.
"""

from __future__ import annotations

import re
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    column,
    func,
    literal_column,
    select,
    text,
)
from sqlalchemy.exc import DatabaseError

from fumehood.core.call_log import only_words, words_in
from fumehood.core.errors import InvalidParams
from fumehood.core.json_types import JsonObject
from fumehood.protocol import strict_json
from fumehood.storage.schema import CALLS, RECORDS

MAX_DOCUMENT_BYTES = 1 << 20
"""Bytes of the JSON of one record. Of a longer one, the result is left out."""

MAX_WORDS = 16 * 1024
"""Characters of one record that the search by text finds."""

MAX_TEXT_WORDS = MAX_WORDS // 4
"""Characters of one text of a record that it finds: half of them at each end."""

COMPRESSED_FROM = 2048
"""Bytes from which a document is compressed: below, that takes longer than it saves."""

_ENCODED = re.compile(r"[A-Za-z0-9+/=_-]{200,}")
"""A text without words, such as the content of a file."""

INDEXED_AT_ONCE = 100
"""Records whose words are indexed in one transaction, for which other writes wait."""

SEARCH_S = 2.0
"""The longest time of one search: the words of its records are its callers' choice."""

_INDEX = text("""
    INSERT INTO record_words(rowid, words) SELECT seq, words FROM records
    WHERE seq > coalesce((SELECT max(id) FROM record_words_docsize), 0) ORDER BY seq LIMIT :most
""")


class Record(NamedTuple):
    """The record of one call, as it is stored."""

    document: bytes
    words: str

    @classmethod
    def of(cls, arguments: JsonObject, envelope: bytes, texts: Sequence[str]) -> Record | None:
        """Make the record of a call from its arguments and its envelope as JSON. `texts` are those
        that are found. Return None if it is too long.
        """
        document = b"%b\n%b" % (strict_json.dumps(arguments), envelope)
        if len(document) > MAX_DOCUMENT_BYTES:
            return None
        if len(document) >= COMPRESSED_FROM:
            document = zlib.compress(document, 1)
        return cls(document, only_words(" ".join(_ends(texts)))[:MAX_WORDS])

    def row(self, seq: int) -> dict[str, Any]:
        """The row of a call's record."""
        size = len(self.document) + 2 * len(self.words)  # the index is about as long as they are
        return {"seq": seq, "size": size, "document": self.document, "words": self.words}


def texts_in(value: Any) -> list[str]:
    """Return the texts and numbers in a JSON value and its keys, in order."""
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
    """Yield texts, of long ones both ends, until there are enough."""
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
    """Let the words of the oldest records be found that are not yet; return their number. SQLite
    only: in PostgreSQL an index does that.
    """
    if connection.dialect.name == "postgresql":
        return 0
    return connection.execute(_INDEX, {"most": most}).rowcount


class Recorded(NamedTuple):
    """What the record of a call says. The envelope is JSON."""

    arguments: JsonObject
    envelope: bytes


def recorded(connection: Connection, seq: int) -> Recorded | None:
    """Return the record of a call, or None if it has none."""
    found = connection.execute(select(RECORDS.c.document).where(RECORDS.c.seq == seq)).scalar()
    return None if found is None else read(found)


def read(document: bytes) -> Recorded:
    """Read a stored document."""
    whole = document if document.startswith(b"{") else zlib.decompress(document)
    arguments, _, envelope = whole.partition(b"\n")
    return Recorded(strict_json.loads(arguments), envelope)


def mentions(connection: Connection, wanted: str) -> ColumnElement[bool]:
    """Return the condition that the record of a call has all words and phrases of a text."""
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
    """Let a search take `SEARCH_S` at most. Raises InvalidParams."""
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


def outdated(connection: Connection, oldest_kept: str, kept_bytes: int) -> list[int]:
    """Return the `seq` of each record to delete: those of calls before a moment, and the oldest
    ones of who has more than a fair share of `kept_bytes`.
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
            gone.update(_oldest(connection, principal, size - share))
    return sorted(gone)


def _share(used: list[int], most: int) -> int:
    """Return how much each may have at most, so that all together have at most `most`."""
    left = most
    for done, amount in enumerate(sorted(used)):
        share = left // (len(used) - done)
        if amount > share:
            return share
        left -= amount
    return most


def _oldest(connection: Connection, principal: str, excess: int) -> Iterator[int]:
    """Yield the `seq` of a principal's oldest records that have together at least `excess`."""
    both = RECORDS.join(CALLS, RECORDS.c.seq == CALLS.c.seq)
    own = select(RECORDS.c.seq, RECORDS.c.size).select_from(both)
    own = own.where(CALLS.c.principal_id == principal).order_by(RECORDS.c.seq)
    for seq, size in connection.execute(own):
        if excess <= 0:
            return
        excess -= size
        yield seq
