"""Links to blobs: made for one owner and one time, and the key is nobody else's."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fumehood.protocol.blob_urls import BlobUrl, parse_blob_url
from fumehood.storage.blob_links import KEY_BYTES, BlobLinks, load_key

BLOB = "blob_" + "0f" * 16
pytestmark = [pytest.mark.row("E7", "D4")]


def _signature(links: BlobLinks, *parts: object) -> str:
    return parse_blob_url(links.make(*parts)).signature  # type: ignore[arg-type]


def test_address_is_genuine_for_what_it_was_made_for_and_nothing_else() -> None:
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


def test_address_is_one_that_clients_take_apart() -> None:
    links = BlobLinks(b"k" * KEY_BYTES)
    url = links.make(BLOB, "uid:1", 1000)
    assert parse_blob_url(url) == BlobUrl(BLOB, "1000", _signature(links, BLOB, "uid:1", 1000))


@pytest.mark.parametrize(
    "change",
    [("/v1/blobs/", "/v1/tools/"), ("/v1", "http://elsewhere/v1"), ("blob_", "../x_"), ("&", "&a=1&"),
     ("expires=1", "expires=-1"), ("?", "#"), ("signature=", "signature=\n")],
)  # fmt: skip
def test_other_addresses_are_none_of_a_blob(change: tuple[str, str]) -> None:
    url = BlobLinks(b"k" * KEY_BYTES).make(BLOB, "uid:1", 1000)
    with pytest.raises(ValueError, match="no address of a blob"):
        parse_blob_url(url.replace(*change, 1))


def test_key_is_made_once_and_private_whatever_the_umask(home: Path) -> None:
    before = os.umask(0)
    try:
        key = load_key(home / "key")
    finally:
        os.umask(before)
    assert len(key) == KEY_BYTES
    assert load_key(home / "key") == key
    assert stat.S_IMODE((home / "key").stat().st_mode) == 0o600
    assert [path.name for path in home.iterdir()] == ["key"]


def test_key_that_others_could_read_is_closed_to_them(home: Path) -> None:
    load_key(home / "key")
    (home / "key").chmod(0o644)
    load_key(home / "key")
    assert stat.S_IMODE((home / "key").stat().st_mode) == 0o600


@pytest.mark.parametrize("broken", [b"", b"short", b"x" * (KEY_BYTES + 1)])
def test_file_that_holds_no_key_is_replaced(home: Path, broken: bytes) -> None:
    (home / "key").write_bytes(broken)
    (home / "key.new").write_bytes(b"left by a crash")
    key = load_key(home / "key")
    assert len(key) == KEY_BYTES
    assert load_key(home / "key") == key
    assert [path.name for path in home.iterdir()] == ["key"]


def test_link_in_the_place_of_the_key_is_not_followed(home: Path) -> None:
    (home / "theirs").write_bytes(b"t" * KEY_BYTES)
    (home / "key").symlink_to(home / "theirs")
    with pytest.raises(OSError, match="symbolic"):
        load_key(home / "key")
