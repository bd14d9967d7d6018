"""The last megabyte of a registered process's output."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fumehood.guest.container.keeper import RING_BYTES, Piece, Ring

MOST = 64 * 1024


@pytest.fixture
def ring() -> Iterator[Ring]:
    ring = Ring()
    yield ring
    ring.close()


def test_output_is_read_piece_by_piece_to_its_end(ring: Ring) -> None:
    ring.append(b"hello ")
    assert ring.read(0, MOST, is_over=False) == Piece("hello ", 6, 0, False)
    ring.append(b"world")
    assert ring.read(6, 3, is_over=True) == Piece("wor", 9, 0, False)
    assert ring.read(9, MOST, is_over=True) == Piece("ld", 11, 0, True)
    assert ring.read(99, MOST, is_over=True) == Piece("", 11, 0, True)


def test_only_the_last_megabyte_is_kept_and_the_rest_counts_as_skipped(ring: Ring) -> None:
    for number in range(40):
        ring.append(bytes([65 + number % 26]) * 50_000)
    total = 40 * 50_000
    first = ring.read(0, MOST, is_over=True)
    assert (first.skipped, first.offset) == (total - RING_BYTES, total - RING_BYTES + MOST)
    text, offset = first.text, first.offset
    while not (piece := ring.read(offset, MOST, is_over=True)).is_last:
        assert piece.skipped == 0
        text, offset = text + piece.text, piece.offset
    text += piece.text
    whole = "".join(chr(65 + number % 26) * 50_000 for number in range(40))
    assert text == whole[-RING_BYTES:]


def test_character_is_never_cut_in_two(ring: Ring) -> None:
    ring.append("añb".encode()[:2])
    piece = ring.read(0, MOST, is_over=False)
    assert piece == Piece("a", 1, 0, False)  # the rest of it may come
    ring.append("añb".encode()[2:])
    assert ring.read(piece.offset, MOST, is_over=False) == Piece("ñb", 4, 0, False)
    assert ring.read(0, 2, is_over=False) == Piece("a", 1, 0, False)


def test_half_a_character_at_the_end_and_other_bytes_are_replaced(ring: Ring) -> None:
    ring.append(b"\xff\xc3")
    assert ring.read(0, MOST, is_over=False) == Piece("\ufffd", 1, 0, False)
    assert ring.read(1, MOST, is_over=True) == Piece("\ufffd", 2, 0, True)


def test_skipped_output_begins_with_a_whole_character(ring: Ring) -> None:
    for _ in range(30):
        ring.append("€".encode() * 20_000)
    piece = ring.read(0, MOST, is_over=False)
    assert set(piece.text) == {"€"}
    assert piece.skipped % 3 == 0
