"""A blob store of its own, and what it holds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path

from fumehood.core.returned_file import parse_blob_url
from fumehood.storage.blobs import BlobStore
from fumehood.storage.database import open_database
from fumehood.testing import ManualClock

OWNER = "uid:1"


@asynccontextmanager
async def blob_store(
    home: Path,
    *,
    database: Path | None = None,
    max_bytes: int = 1 << 20,
    now: Callable[[], datetime] | None = None,
) -> AsyncIterator[BlobStore]:
    """An open store, with its rows in this database or in memory. Blobs live for a minute."""
    opened = open_database(database)
    now = now or ManualClock().now
    store = BlobStore(opened, home, max_bytes=max_bytes, lifetime_s=60, now=now)
    await store.open()
    try:
        yield store
    finally:
        store.room.close()
        opened.close()


async def read_blob(store: BlobStore, url: str, owner: str = OWNER) -> bytes:
    """The content behind a blob's address."""
    link = parse_blob_url(url)
    _, file = await store.open_blob(link.blob_id, owner, link.expires, link.signature)
    with file:
        return file.read()
