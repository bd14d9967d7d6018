"""Streams that are kept: short ones whole in memory, long ones as blobs with both ends here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fumehood.executors import program
from fumehood.executors.program import KeptStreams
from fumehood.redaction.redactor import Redactor
from fumehood.storage.blobs import BlobStore
from support.blobs import blob_store, read_blob

pytestmark = [pytest.mark.anyio, pytest.mark.row("E6", "S8")]

OWNER = "uid:1"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "SPILL_CHARACTERS", 1000)
    monkeypatch.setattr(program, "FEED_CHARACTERS", 300)
    monkeypatch.setattr(program, "SIDE_CHARACTERS", 50)


@pytest.fixture
async def blobs(home: Path) -> AsyncIterator[BlobStore]:
    async with blob_store(home) as store:
        yield store


async def whole(blobs: BlobStore, url: str) -> str:
    return (await read_blob(blobs, url)).decode()


@pytest.mark.parametrize("size", [7, 299, 5000])
async def test_long_output_stream_is_stored_as_a_blob(blobs: BlobStore, size: int) -> None:
    text = "".join(f"ä{number:04}" for number in range(1000))
    streams = KeptStreams(blobs, OWNER, 10**6, Redactor())
    for start in range(0, len(text), size):
        streams.hear("stdout", text[start : start + size])
    streams.hear("stderr", "short")
    kept = await streams.finish()
    assert (kept["stderr"].text, kept["stderr"].cut) == ("short", None)
    assert kept["stdout"].text == ""
    cut = kept["stdout"].cut
    assert (cut.field, cut.head, cut.tail, cut.length) == ("stdout", text[:50], text[-50:], 5000)
    assert await whole(blobs, cut.link["resource_url"]) == text


async def test_output_stream_is_kept_and_reported_up_to_its_limit(blobs: BlobStore) -> None:
    told: list[str] = []
    streams = KeptStreams(blobs, OWNER, 10, Redactor(), lambda stream, text: told.append(text))
    for _ in range(5):
        streams.hear("stdout", "abcd")
    assert (await streams.finish())["stdout"].text == "".join(told) == "abcdabcdab"


@pytest.mark.parametrize(("is_cut", "text"), [(True, "a key: "), (False, "a key: ghp_a1B2c3D4")])
async def test_attack_key_at_the_end_of_a_stream_that_is_cut_leaves_no_part(
    blobs: BlobStore, is_cut: bool, text: str
) -> None:
    """Twin: a program that prints so much and ends."""
    streams = KeptStreams(blobs, OWNER, 10**6, Redactor())
    streams.hear("stdout", "a key: ghp_a1B2c3D4")
    assert (await streams.finish(is_cut=is_cut))["stdout"].text == text


async def test_output_stream_that_cannot_be_stored_keeps_head_and_tail(blobs: BlobStore) -> None:
    blobs.room.share.most_of_one = 50
    streams = KeptStreams(blobs, OWNER, 10**6, Redactor())
    streams.hear("stdout", "a" * 3000 + "z")
    cut = (await streams.finish())["stdout"].cut
    assert (cut.head[:1], cut.tail[-1:], cut.length) == ("a", "z", 3001)
    assert "share" in cut.link["not_kept"]


async def test_discarded_streams_leave_no_files(blobs: BlobStore) -> None:
    streams = KeptStreams(blobs, OWNER, 10**6, Redactor())
    streams.hear("stdout", "a" * 3000)
    streams.discard()
    blobs.room.close()  # waits for its thread
    assert [path.name for path in blobs.room.directory.iterdir()] == []
