"""Blobs: atomic, private to their owner, expiring and bounded in size."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from sqlalchemy import func, select

from fumehood.core.errors import ResourceNotFound
from fumehood.core.returned_file import parse_blob_url
from fumehood.storage.blobs import KEY_BYTES, Blob, BlobLinks, BlobStore, Draft, NotKept
from fumehood.storage.database import FILE_NAME, Database
from fumehood.storage.schema import BLOBS
from fumehood.testing import ManualClock
from support.blobs import blob_store, read_blob
from support.state import set_full, set_roomy

pytestmark = [pytest.mark.anyio, pytest.mark.row("E6", "E7")]

OWNER, OTHER = "uid:1", "uid:2"
KB = 1024


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@asynccontextmanager
async def opened(
    home: Path, clock: ManualClock, *, max_bytes: int = 100 * KB
) -> AsyncIterator[BlobStore]:
    database = home / FILE_NAME
    async with blob_store(home, database=database, max_bytes=max_bytes, now=clock.now) as store:
        yield store


@pytest.fixture
async def store(home: Path, clock: ManualClock) -> AsyncIterator[BlobStore]:
    async with opened(home, clock) as made:
        yield made


def fed(store: BlobStore, content: bytes = b"abc", owner: str = OWNER) -> Draft:
    draft = store.draft(owner)
    for start in range(0, len(content), KB):
        draft.feed(content[start : start + KB])
    return draft


async def keep(store: BlobStore, content: bytes = b"abc", owner: str = OWNER) -> Blob:
    return await store.keep(fed(store, content, owner), "a/b.txt", "text/plain")


async def keep_on(store: BlobStore) -> None:
    """Keep blobs until the database's free pages are used up."""
    for _ in range(500):
        await keep(store, b"x")


def files(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "blobs").iterdir())


def rows(database: Database) -> int:
    return database.read_now(
        lambda c: c.execute(select(func.count()).select_from(BLOBS)).scalar_one()
    )


@pytest.mark.parametrize("content", [b"", b"abc", bytes(range(256)) * 100])
async def test_blob_content_is_read_back_unchanged_from_private_file(
    store: BlobStore, home: Path, content: bytes
) -> None:
    blob = await keep(store, content)
    assert (blob.filename, blob.content_type, blob.size) == ("a/b.txt", "text/plain", len(content))
    assert await read_blob(store, blob.url) == content
    assert files(home) == [blob.id]
    assert (home / "blobs").stat().st_mode & 0o777 == 0o700
    assert (home / "blobs" / blob.id).stat().st_mode & 0o777 == 0o600


async def test_expired_blob_is_refused_at_once_and_removed_on_prune(
    store: BlobStore, home: Path, clock: ManualClock
) -> None:
    blob = await keep(store)
    clock.advance(59)
    assert await read_blob(store, blob.url) == b"abc"
    clock.advance(1)
    with pytest.raises(ResourceNotFound, match="has expired"):
        await read_blob(store, blob.url)
    assert files(home) == [blob.id]
    assert await store.prune(clock.now()) == 1
    assert files(home) == []
    assert (rows(store._database), store.room.share.total) == (0, 0)
    assert await store.prune(clock.now()) == 0


async def test_discarded_draft_leaves_no_file(store: BlobStore, home: Path) -> None:
    fed(store, b"x" * 5 * KB).discard()
    await keep(store)  # the thread has come past it
    assert len(files(home)) == 1
    assert store.room.share.total == 3


async def test_principals_oldest_blob_is_evicted_for_its_newest(
    store: BlobStore, home: Path, clock: ManualClock
) -> None:
    twin = await keep(store, b"x" * 40 * KB, OTHER)
    old = [await keep(store, b"%d" % number * 20 * KB) for number in range(2)]
    new = await keep(store, b"n" * 20 * KB)
    assert files(home) == sorted([twin.id, old[1].id, new.id])
    assert store.room.share.total == 80 * KB
    with anyio.fail_after(120):
        await store.overdue.wait()
    assert await store.prune(clock.now()) == rows(store._database) - 2 == 1
    with pytest.raises(ResourceNotFound, match="newer ones took its place"):
        await read_blob(store, old[0].url)
    for blob, owner in ((old[1], OWNER), (new, OWNER), (twin, OTHER)):
        assert await read_blob(store, blob.url, owner)


async def test_content_over_share_or_total_is_not_kept(store: BlobStore, home: Path) -> None:
    with pytest.raises(NotKept, match="your share"):
        await keep(store, b"x" * 51 * KB)
    assert store.overdue.is_set()
    assert (files(home), store.room.share.total) == ([], 0)
    drafts = [fed(store, b"x" * 50 * KB, owner) for owner in (OWNER, OTHER)]
    with pytest.raises(NotKept, match="is used up"):  # what is not yet a blob does not go
        await keep(store, b"x", "uid:3")
    for draft in drafts:
        assert (await store.keep(draft, "a", "text/plain")).size == 50 * KB


async def test_principal_with_most_storage_is_evicted_if_total_is_used_up(
    store: BlobStore, home: Path
) -> None:
    most = [await keep(store, b"x" * 10 * KB, OTHER) for _ in range(5)]
    own = [await keep(store, b"x" * 20 * KB) for _ in range(2)]
    new = [await keep(store, b"x" * 10 * KB, "uid:3") for _ in range(2)]
    assert files(home) == sorted(blob.id for blob in (*most[1:], *own, *new))
    assert store.room.share.total == 100 * KB


async def test_eviction_order_survives_restart(home: Path, clock: ManualClock) -> None:
    async with opened(home, clock) as store:
        kept = []
        for _ in range(5):
            kept.append(await keep(store, b"x" * 10 * KB))
            clock.advance(1)
    async with opened(home, clock) as store:
        new = await keep(store, b"x" * 20 * KB)
        assert files(home) == sorted(blob.id for blob in (*kept[2:], new))


@pytest.mark.sqlite
async def test_blob_file_is_removed_if_its_row_cannot_be_written(
    store: BlobStore, home: Path
) -> None:
    set_full(store._database)
    with pytest.raises(NotKept, match="state cannot be written"):
        await keep_on(store)
    set_roomy(store._database)
    blob = await keep(store)
    assert len(files(home)) == rows(store._database)
    assert await read_blob(store, blob.url) == b"abc"


async def test_restart_removes_orphan_files_and_rows_and_keeps_the_rest(
    home: Path, clock: ManualClock
) -> None:
    async with opened(home, clock) as store:
        kept, lost, cut = [await keep(store, text) for text in (b"kept", b"lost", b"cut")]
        directory = store.room.directory
    (directory / lost.id).unlink()
    (directory / cut.id).write_bytes(b"c")
    (directory / ("blob_" + "0" * 32)).write_bytes(b"without a row")
    (directory / ("blob_" + "1" * 32 + ".new")).write_bytes(b"a draft")
    async with opened(home, clock) as store:
        assert files(home) == [kept.id]
        assert rows(store._database) == 1
        assert store.room.share.total == 4
        assert await read_blob(store, kept.url) == b"kept"
        with pytest.raises(ResourceNotFound):
            await read_blob(store, lost.url)


def _cut(path: Path) -> None:
    path.write_bytes(b"")


def _grow(path: Path) -> None:
    path.write_bytes(b"abcd")


def _link(path: Path) -> None:
    path.rename(path.parents[1] / "elsewhere")
    path.symlink_to(path.parents[1] / "elsewhere")


@pytest.mark.parametrize("spoil", [Path.unlink, _cut, _grow, _link])
async def test_blob_whose_file_is_missing_changed_or_a_link_is_not_found(
    store: BlobStore, home: Path, spoil: Callable[[Path], None]
) -> None:
    blob = await keep(store)
    spoil(home / "blobs" / blob.id)
    with pytest.raises(ResourceNotFound):
        await read_blob(store, blob.url)


async def test_draft_cannot_be_kept_after_store_is_closed(home: Path, clock: ManualClock) -> None:
    async with opened(home, clock) as store:
        begun = store.draft(OWNER)
    begun.feed(b"late")
    begun.discard()
    with pytest.raises(NotKept):
        await store.keep(begun, "a", "text/plain")
    assert files(home) == []


# -- signed addresses ----------------------------------------------------------------------


BLOB = "blob_" + "0f" * 16


def _signature(links: BlobLinks, *parts: object) -> str:
    return parse_blob_url(links.make(*parts)).signature  # type: ignore[arg-type]


@pytest.mark.row("E7", "D4")
def test_blob_signature_is_valid_only_for_its_blob_principal_and_expiry() -> None:
    links = BlobLinks(b"k" * KEY_BYTES)
    signature = _signature(links, BLOB, "uid:1", 1000)
    assert links.is_genuine(BLOB, "uid:1", 1000, signature)
    for blob_id, principal, end in (
        (BLOB[:-1] + "0", "uid:1", 1000), (BLOB, "uid:2", 1000), (BLOB, "uid:1", 1001),
        (BLOB, "uid:", 11000), (BLOB, "", 1000),
    ):  # fmt: skip
        assert not links.is_genuine(blob_id, principal, end, signature)
    for forged in ("", "0" * 64, signature[:-1], signature + "0", signature.upper(), "ä", "\ud800"):
        assert not links.is_genuine(BLOB, "uid:1", 1000, forged)
    assert not BlobLinks(b"l" * KEY_BYTES).is_genuine(BLOB, "uid:1", 1000, signature)


@pytest.mark.row("E7", "D4")
@pytest.mark.parametrize(
    "change",
    [("/v1/blobs/", "/v1/tools/"), ("/v1", "http://elsewhere/v1"), ("blob_", "../x_"), ("&", "&a=1&"),
     ("expires=1", "expires=-1"), ("?", "#"), ("signature=", "signature=\n")],
)  # fmt: skip
def test_url_that_is_not_a_blob_url_is_rejected(change: tuple[str, str]) -> None:
    url = BlobLinks(b"k" * KEY_BYTES).make(BLOB, "uid:1", 1000)
    with pytest.raises(ValueError, match="not the address of a blob"):
        parse_blob_url(url.replace(*change, 1))
