"""Texts and values that are too long to be shown in full or to be processed in the event loop."""

from __future__ import annotations

import hashlib
from typing import Any

from fumehood.core.json_types import JsonObject

INLINE_BYTES = 10 * 1024
"""Maximum size of a text that is not shortened, in bytes of UTF-8."""

SIDE_BYTES = 5000
"""Number of bytes that a shortened text keeps at its beginning and at its end. The note between
them fits into the rest of `INLINE_BYTES`."""

LOOP_SIZE = 64 * 1024
"""Maximum size of a value that is processed in the event loop: its characters, plus `ELEMENT_SIZE`
for each element. Larger values are processed in a thread, so that other calls need not wait.
"""

ELEMENT_SIZE = 16


def is_long(value: Any) -> bool:
    """Return whether a JSON value is so long that it must be processed in a thread.

    The check itself takes bounded time. If the value contains objects that are not JSON values,
    their size does not count.
    """
    # A tool's function may return such objects. Measuring them would run their own code.
    left, waiting = LOOP_SIZE, [value]
    while waiting and left >= 0:
        value = waiting.pop()
        kind = type(value)
        if kind in (str, bytes):
            left -= len(value)
        elif kind in (dict, list, tuple):
            left -= ELEMENT_SIZE * len(value)
            if left >= 0:
                waiting += (*value, *value.values()) if kind is dict else value
    return left < 0


def cut(text: str, longest: int) -> str:
    """Return the text, or its beginning with an ellipsis if it is longer than `longest`
    characters.
    """
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def head_and_tail(text: str, max_length: int | None = None) -> str:
    """Return the beginning and the end of a long text. A note between them gives the number of
    missing characters.

    If `max_length` is given, the result has at most `max_length` characters. If there is no room
    for the note, only the beginning is returned.
    """
    return ends_of(text[:SIDE_BYTES], text[-SIDE_BYTES:], len(text), max_length)


def ends_of(head: str, tail: str, length: int, max_length: int | None) -> str:
    """Shorten a long text like `head_and_tail`, if only its two ends are known.

    `head` is the beginning of the text, `tail` is its end, and `length` is its length in
    characters. The result is the same as that of `head_and_tail` for the whole text.
    """
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


MAX_SHOWN_BYTES = 64 * 1024
"""Maximum size of a body that an approver sees as text. A larger one is shown by hash and size."""


def shown_body(body: bytes) -> JsonObject:
    """Return the body of a request in the form that an approver sees: as text, or only its hash and
    size if it is too long or not UTF-8.
    """
    if len(body) <= MAX_SHOWN_BYTES:
        try:
            return {"body": body.decode()}
        except UnicodeDecodeError:
            pass
    return {"body_sha256": hashlib.sha256(body).hexdigest(), "body_bytes": len(body)}
