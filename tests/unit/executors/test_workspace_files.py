"""Files of a run: small ones in the answer, large ones beside it, none under a false name."""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fumehood.core.returned_file import parse_blob_url
from fumehood.executors.program import (
    MAX_INLINE_BYTES,
    MAX_INLINE_TOTAL_BYTES,
    ProgramFiles,
    content_type_of,
)
from fumehood.storage.blobs import BlobStore
from support.blobs import blob_store

pytestmark = [pytest.mark.anyio, pytest.mark.row("E7")]

OWNER = "uid:1"
CHUNK = 64 * 1024


@pytest.fixture
async def store(home: Path) -> AsyncIterator[BlobStore]:
    async with blob_store(home, max_bytes=64 << 20) as made:
        yield made


def put(files: ProgramFiles, path: str, content: bytes = b"abc", size: int | None = None) -> None:
    files.start(path, len(content) if size is None else size)
    for start in range(0, len(content), CHUNK):
        files.write(content[start : start + CHUNK])


def taker(store: BlobStore, **sent: bytes) -> ProgramFiles:
    return ProgramFiles(store, OWNER, sent)


async def content(store: BlobStore, entry: dict[str, Any]) -> bytes:
    if "content_base64" in entry:
        return base64.b64decode(entry["content_base64"])
    link = parse_blob_url(entry["url"])
    _, file = await store.open_blob(link.blob_id, OWNER, link.expires, link.signature)
    with file:
        return file.read()


async def test_file_of_one_megabyte_or_more_is_stored_as_a_blob(store: BlobStore) -> None:
    files = taker(store)
    below, at = os.urandom(MAX_INLINE_BYTES - 1), os.urandom(MAX_INLINE_BYTES)
    put(files, "below", below)
    put(files, "at.png", at)
    first, second = await files.entries()
    assert first.keys() == {"filename", "content_type", "size", "content_base64"}
    assert second.keys() == {"filename", "content_type", "size", "url", "expires_at"}
    assert (second["content_type"], second["size"]) == ("image/png", MAX_INLINE_BYTES)
    assert second["expires_at"] == "2026-01-01T00:01:00.000Z"
    assert [await content(store, first), await content(store, second)] == [below, at]


async def test_total_size_of_inline_files_is_bounded(store: BlobStore) -> None:
    files = taker(store)
    texts = [os.urandom(900_000) for _ in range(7)]
    for number, text in enumerate(texts):
        put(files, str(number), text)
    put(files, "small")
    *entries, small = await files.entries()
    assert [await content(store, entry) for entry in entries] == texts
    inline = [entry["size"] for entry in entries if "content_base64" in entry]
    assert sum(inline) <= MAX_INLINE_TOTAL_BYTES
    assert len(inline) == 4
    assert "content_base64" in small


@pytest.mark.parametrize("size", [3, 0, 2 * MAX_INLINE_BYTES])
async def test_unchanged_input_files_are_not_returned(store: BlobStore, size: int) -> None:
    sent = os.urandom(size)
    files = taker(store, same=sent, longer=sent, other=sent, gone=sent)
    put(files, "same", sent)
    put(files, "longer", sent + b"x")
    put(files, "other", sent[:-1] + bytes([sent[-1] ^ 1]) if sent else b"y")
    put(files, "renamed", sent)
    assert [entry["filename"] for entry in await files.entries()] == ["longer", "other", "renamed"]
    assert files.left_out == 0
    await store.keep(store.draft(OWNER), "last", "text/plain")
    assert store.room.share.total == (3 * size + 1 if size >= MAX_INLINE_BYTES else 0)


@pytest.mark.parametrize("path", ["/etc/passwd", "../a", "n" * 256])
async def test_file_with_an_invalid_path_is_left_out(store: BlobStore, path: str) -> None:
    files = taker(store)
    put(files, path, b"x" * 2 * MAX_INLINE_BYTES)
    put(files, "twin")
    assert [entry["filename"] for entry in await files.entries()] == ["twin"]
    assert files.left_out == 1


async def test_duplicate_file_name_is_left_out(store: BlobStore) -> None:
    files = taker(store)
    put(files, "a", b"first")
    put(files, "a", b"second")
    (entry,) = await files.entries()
    assert base64.b64decode(entry["content_base64"]) == b"first"
    assert files.left_out == 1


@pytest.mark.parametrize(
    ("text", "size"),
    [(b"abc", 2), (b"abc", 4), (b"x" * 2 * MAX_INLINE_BYTES, 10 * MAX_INLINE_BYTES)],
    ids=["longer", "shorter", "large"],
)
async def test_file_shorter_than_declared_is_left_out(
    store: BlobStore, text: bytes, size: int
) -> None:
    files = taker(store)
    put(files, "a", text, size=size)
    assert await files.entries() == []
    assert files.left_out == 1


async def test_file_that_cannot_be_stored_has_a_note(home: Path) -> None:
    async with blob_store(home, max_bytes=MAX_INLINE_BYTES) as store:
        files = taker(store)
        put(files, "large", b"x" * MAX_INLINE_BYTES)
        put(files, "small")
        large, small = await files.entries()
    assert large.keys() == {"filename", "content_type", "size", "not_kept"}
    assert "your share" in large["not_kept"]
    assert "content_base64" in small
    assert os.listdir(home / "blobs") == []


async def test_discarded_run_files_leave_no_blobs(store: BlobStore, home: Path) -> None:
    files = taker(store)
    put(files, "a", b"x" * 2 * MAX_INLINE_BYTES)
    put(files, "b", b"x" * 2 * MAX_INLINE_BYTES)
    files.discard()
    last = await store.keep(store.draft(OWNER), "last", "text/plain")
    assert os.listdir(home / "blobs") == [last.id]
    assert store.room.share.total == 0


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("a.png", "image/png"),
        ("x/a.json", "application/json"),
        ("a.CSV", "text/csv"),
        ("a.html", "text/html"),
        ("a", "application/octet-stream"),
        ("a.csv.gz", "application/octet-stream"),
        ("png", "application/octet-stream"),
        ("data:text/html,x", "application/octet-stream"),
        ("http://x/a.png?b", "application/octet-stream"),
    ],
)
def test_content_type_follows_from_the_file_name(path: str, kind: str) -> None:
    assert content_type_of(path) == kind
