"""Shorten a text that is too long to its beginning, or to its beginning and end."""

from __future__ import annotations

INLINE_BYTES = 10 * 1024
"""Bytes of UTF-8 of the longest text that stays whole."""

SIDE_BYTES = 5000
"""Bytes kept at each end. The note between them fits into the rest of `INLINE_BYTES`."""


def cut(text: str, longest: int) -> str:
    """Return the text, cut to `longest` characters with a mark at the end."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def head_and_tail(text: str, max_length: int | None = None) -> str:
    """Return both ends of a long text, with a note between them of how many characters are missing.

    At most `max_length` characters in total; only the head if the note between does not fit.
    """
    return ends_of(text[:SIDE_BYTES], text[-SIDE_BYTES:], len(text), max_length)


def ends_of(head: str, tail: str, length: int, max_length: int | None) -> str:
    """Like `head_and_tail`, for a text of which only the two ends are available."""
    if max_length is not None:
        side = (max_length - len(_left_out(length))) // 2
        if side < 1:
            return head[:max_length]
        head, tail = head[:side], tail[-side:]
    head = head.encode("utf-8", "replace")[:SIDE_BYTES].decode("utf-8", "ignore")
    tail = tail.encode("utf-8", "replace")[-SIDE_BYTES:].decode("utf-8", "ignore")
    return f"{head}{_left_out(length - len(head) - len(tail))}{tail}"


def _left_out(missing: int) -> str:
    return f"\n… {missing} characters left out …\n"
