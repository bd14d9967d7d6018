"""What a program leaves behind: its last value for JSON, and as text of bounded length.

Guest side. The value is the program's: only exact built-in types are looked into, all else
is shown by its own `repr`, whose faults are the program's faults.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from fumehood.guest.interpreter.programs.refusal import OutputFull

JSON_SAFE_INTEGER = 2**53 - 1
"""Readers that keep numbers as doubles change anything beyond it."""

MAX_DEPTH = 16
MAX_REPR_CHARACTERS = 4000
LEAST_BYTES = 2
"""What an element takes in JSON at least: a digit and a comma."""


class _NoJson(Exception):
    """JSON has no form for it."""


def json_value(value: Any, max_bytes: int) -> Any:
    """The value as JSON holds it; None where it cannot hold all of it exactly.

    Raises:
        OutputFull: it is longer than `max_bytes`, which is seen before all of it is walked.
    """
    try:
        return _plain(value, [max_bytes // LEAST_BYTES], MAX_DEPTH)
    except _NoJson:
        return None


def short_repr(value: Any) -> str:
    """`repr(value)`, cut after 4,000 characters; long containers are not walked to their end."""
    text = _repr(value, MAX_REPR_CHARACTERS + 1, MAX_DEPTH)
    if len(text) > MAX_REPR_CHARACTERS:
        text = text[:MAX_REPR_CHARACTERS] + "…"
    return utf8(text)


def utf8(text: str) -> str:
    """The text with lone surrogates shown by escapes: the channel refuses them."""
    return text.encode("utf-8", "backslashreplace").decode()


def _plain(value: Any, left: list[int], depth: int) -> Any:
    left[0] -= 1
    if left[0] < 0:
        raise OutputFull
    if depth == 0:
        raise _NoJson
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int and -JSON_SAFE_INTEGER <= value <= JSON_SAFE_INTEGER:
        return value
    if kind is float and math.isfinite(value):
        return value
    if kind is str:
        return _text(value)
    if kind is list or kind is tuple:
        return [_plain(item, left, depth - 1) for item in value]
    if kind is dict:
        return {_key(key): _plain(item, left, depth - 1) for key, item in value.items()}
    raise _NoJson


def _key(key: Any) -> str:
    if type(key) is not str:
        raise _NoJson
    return _text(key)


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _NoJson from None
    return value


def _repr(value: Any, room: int, depth: int) -> str:
    kind = type(value)
    if kind is str or kind is bytes:
        return repr(value[:room])
    if depth == 0 or not value or kind not in (list, tuple, set, dict):
        return _own_repr(value)
    if kind is dict:
        pairs = ((key, item) for key, item in value.items())
        return "{" + _joined((_pair(*pair, room, depth - 1) for pair in pairs), room) + "}"
    inner = _joined((_repr(item, room, depth - 1) for item in value), room)
    if kind is list:
        return f"[{inner}]"
    if kind is set:
        return "{" + inner + "}"
    return f"({inner},)" if len(value) == 1 else f"({inner})"


def _pair(key: Any, item: Any, room: int, depth: int) -> str:
    return f"{_repr(key, room, depth)}: {_repr(item, room, depth)}"


def _joined(parts: Iterable[str], room: int) -> str:
    taken: list[str] = []
    for part in parts:
        taken.append(part)
        room -= len(part) + 2
        if room < 0:
            break
    return ", ".join(taken)


def _own_repr(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:
        if type(value) is int:  # Python turns no integer of so many digits into text
            return f"an integer of {value.bit_length()} bits"
        raise
