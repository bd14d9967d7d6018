"""What a program prints: counted as it comes, cut at its limit, never in a character."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from fumehood.guest.container.prefork_pool import Stream


@given(st.text(max_size=60), st.lists(st.integers(1, 9), min_size=1, max_size=40))
def test_characters_split_between_reads_are_reassembled(text: str, cuts: list[int]) -> None:
    data = text.encode("utf-8", "replace")
    readable, writable = os.pipe()
    os.set_blocking(readable, False)
    stream, said = Stream("stdout", readable), ""
    try:
        for cut in [*cuts, len(data)]:
            piece, data = data[:cut], data[cut:]
            if piece:
                os.write(writable, piece)
                stream.read(10_000)
                said += "".join(stream.take())
        said += "".join(stream.take(last=True))
    finally:
        os.close(readable)
        os.close(writable)
    assert said == text.encode("utf-8", "replace").decode()
