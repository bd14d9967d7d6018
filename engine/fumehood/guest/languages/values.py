"""The value of a program as its claim tells it: plain where JSON can hold it, and as text.

Guest side, in the child.
"""

from __future__ import annotations

from typing import Any

from fumehood.guest.languages.tables import TOO_LARGE, NoTable, TooLarge, plain_table
from fumehood.protocol import strict_json

MAX_VALUE_BYTES = 64 * 1024
MAX_VALUE_DEPTH = 50
"""A little under what the host reads: a value stands inside a claim inside a frame."""
MAX_REPR_CHARACTERS = 10_000
MAX_SAFE_INTEGER = 2**53 - 1
"""Readers whose numbers are doubles would read a larger one as another."""

Claim = dict[str, Any]


class NoValue:
    """The program does not end with an expression."""


def success(value: Any) -> Claim:
    """What is told of a value; `notes` say why it is not there whole."""
    if value is NoValue or value is None:
        return {"result": {"value": None, "has_value": False, "value_repr": None}}
    notes = []
    try:
        plain = _plain(plain_table(value))
    except TooLarge:
        plain, notes = None, [TOO_LARGE]
    except NoTable:
        plain = _plain(value)
    told = {"value": plain, "has_value": True, "value_repr": represent(value)}
    return {"result": told | ({"notes": notes} if notes else {})}


def _plain(value: Any) -> Any:
    """The value where JSON can hold it as it is; None elsewhere."""
    try:
        if _is_plain(value, MAX_VALUE_DEPTH, [MAX_VALUE_BYTES]):
            encoded = strict_json.dumps(value)
            if len(encoded) <= MAX_VALUE_BYTES:
                return strict_json.loads(encoded, max_depth=MAX_VALUE_DEPTH)
    except (ValueError, TypeError, RecursionError, UnicodeError):
        pass
    return None


def _is_plain(value: Any, depth: int, room: list[int]) -> bool:
    """Whether it is made of exactly JSON's own types, not too deep, nor too many of them."""
    room[0] -= 1
    kind = type(value)
    if depth < 0 or room[0] < 0:
        return False
    if value is None or kind in (bool, float, str):
        return kind is not str or len(value) <= MAX_VALUE_BYTES
    if kind is int:
        return bool(-MAX_SAFE_INTEGER <= value <= MAX_SAFE_INTEGER)
    if kind in (list, tuple):
        return all(_is_plain(item, depth - 1, room) for item in value)
    if kind is dict:
        return all(type(key) is str for key in value) and all(
            _is_plain(item, depth - 1, room) for item in value.values()
        )
    return False


def represent(value: Any) -> str:
    try:
        text = repr(value)
        if type(text) is not str:  # a subclass of it is the program's own
            text = str.__str__(text)
    except MemoryError:
        raise
    except BaseException as error:
        return f"<repr() failed: {type(error).__name__}>"
    return shortened(text, MAX_REPR_CHARACTERS)


def shortened(text: str, most: int) -> str:
    """Short enough, and such that every reader can read it; the end says more than the middle."""
    if len(text) > most:
        kept = most // 2 - 20
        text = f"{text[:kept]}\n… {len(text) - 2 * kept} characters …\n{text[-kept:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
