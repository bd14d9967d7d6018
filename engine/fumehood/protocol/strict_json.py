"""Strict JSON: the one parser for all JSON that comes from outside.

The host uses this module for HTTP bodies and for frames from guests, and a guest uses it for frames
from the host. So it needs only the standard library. `framing` and the daemon's routes use it.

Invariant: a value that `loads` returns can be encoded as UTF-8 JSON again, and means the same to
every reader. JSON does not define what repeated keys, NaN, lone surrogates and endless nesting
mean. All of them are refused here, because a check can be bypassed if two readers understand a
document differently. A byte order mark has no meaning. `unmarked` and `decoded` remove it, also
from text in other formats.
"""

from __future__ import annotations

import json
import math
from typing import Any

MAX_DEPTH = 64
"""Maximum number of levels of nested arrays and objects. Deeper JSON is refused
(`INVALID_PARAMS`).
"""

MAX_VALUE_DEPTH = 50
"""Maximum number of levels of nesting in a value that a program reports. It is below `MAX_DEPTH`,
because the report is put into other messages.
"""

MAX_INTEGER_DIGITS = 4300
"""Maximum number of decimal digits of an integer. CPython itself converts no more digits, because
the conversion takes quadratic time.
"""

MAX_INTEGER = 10**MAX_INTEGER_DIGITS - 1
"""Largest integer with `MAX_INTEGER_DIGITS` digits."""

MAX_SAFE_INTEGER = 2**53 - 1
"""Largest integer that all readers keep. Readers that store numbers as doubles change larger
integers. *Source*: RFC 8785, section 3.2.2.3, by way of I-JSON.
"""


BYTE_ORDER_MARK = "\ufeff"
"""A mark that some editors and libraries, mostly on Windows, write before UTF-8 text. At the
beginning of a text, it does not belong to the text.
"""

UTF_8 = "utf-8-sig"
"""Codec for streams of text that removes the byte order mark, like `unmarked`."""

_MARK = BYTE_ORDER_MARK.encode()


class StrictJsonError(ValueError):
    """The bytes are not JSON that all readers interpret in the same way. The message says why."""


def unmarked(data: bytes) -> bytes:
    """Return UTF-8 text without a byte order mark at its beginning."""
    return data.removeprefix(_MARK)


def decoded(data: bytes) -> str:
    """Decode UTF-8 text, without a byte order mark at its beginning. Raises UnicodeDecodeError."""
    return unmarked(data).decode()


def loads(data: bytes, *, max_depth: int = MAX_DEPTH) -> Any:
    """Parse one JSON document.

    Raises:
        StrictJsonError: the data is not UTF-8 or not JSON, or it contains a repeated key, NaN or
            infinity, a lone surrogate, an integer over 4,300 digits, or nesting over `max_depth`.
    """
    try:
        text = decoded(data)
    except UnicodeDecodeError as error:
        raise StrictJsonError(f"not UTF-8 at byte {error.start}") from None
    try:
        value = _decode(text)
    except json.JSONDecodeError as error:
        raise StrictJsonError(
            f"not JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from None
    except RecursionError:
        raise StrictJsonError(f"nested deeper than {max_depth} levels") from None
    # Without that many opening brackets the depth cannot be reached, and without a \u escape no
    # lone surrogate can come out of valid UTF-8: the walk is only for the rare other documents.
    if data.count(b"[") + data.count(b"{") > max_depth or b"\\u" in data:
        _check_tree(value, max_depth)
    return value


def dumps(value: Any) -> bytes:
    """Encode a value as compact ASCII JSON.

    Raises:
        ValueError: the value contains NaN, infinity or itself.
        TypeError: the value contains something that JSON cannot represent.
    """
    return _ENCODER.encode(value).encode("ascii")


class Inexact(ValueError):
    """JSON cannot hold the value exactly."""


class TooLong(ValueError):
    """As JSON, the value would be longer than allowed."""


LEAST_BYTES = 2
"""Minimum size in bytes of an array element in JSON: a digit and a comma."""


def exact(value: Any, max_bytes: int) -> Any:
    """Convert a program's value, without loss, to the built-in types that JSON can represent.
    Tuples become lists.

    Raises:
        Inexact: JSON cannot hold the value, or the value is nested deeper than `MAX_VALUE_DEPTH`.
        TooLong: the value as JSON is certainly longer than `max_bytes`. This is detected before the
            whole value is visited.
    """
    return _exact(value, [max_bytes // LEAST_BYTES], MAX_VALUE_DEPTH)


def _exact(value: Any, left: list[int], depth: int) -> Any:
    kind = type(value)
    left[0] -= len(value) // LEAST_BYTES if kind is str else 1
    if left[0] < 0:
        raise TooLong
    if value is None or kind is bool:
        return value
    if kind is int and -MAX_SAFE_INTEGER <= value <= MAX_SAFE_INTEGER:
        return value
    if kind is float and math.isfinite(value):
        return value
    if kind is str and _is_unicode(value):
        return value
    if depth == 0:
        raise Inexact
    if kind is list or kind is tuple:
        return [_exact(item, left, depth - 1) for item in value]
    if kind is dict and all(type(key) is str and _is_unicode(key) for key in value):
        return {key: _exact(item, left, depth - 1) for key, item in value.items()}
    raise Inexact


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _decode(text: str) -> Any:
    """Return the value of a document, like `JSONDecoder.decode`, but faster. `JSONDecoder.decode`
    spends half of its time on white space around the document.
    """
    if text[:1] == "{":
        value, end = _DECODER.raw_decode(text)
        if end == len(text) or not text[end:].strip(" \t\n\r"):
            return value
    return _DECODER.decode(text)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise StrictJsonError(f"the key {_shown(repeated)} is given twice")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise StrictJsonError("a number is too large for a double")
    return value


def _bounded_integer(text: str) -> int:
    if len(text) > MAX_INTEGER_DIGITS + 1 or len(text.lstrip("-")) > MAX_INTEGER_DIGITS:
        raise StrictJsonError(f"an integer has more than {MAX_INTEGER_DIGITS} digits")
    return int(text)


def _no_constant(name: str) -> Any:
    raise StrictJsonError(f"{name} is not a JSON value")


def _check_tree(value: Any, max_depth: int) -> None:
    """Check a parsed document. Raises StrictJsonError if it contains a lone surrogate, or nesting
    deeper than `max_depth`. The check does not recurse, because the sender chooses the depth.
    """
    level: list[Any] = [value]
    depth = 0
    while level:
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, str):
                _check_text(item)
            elif isinstance(item, dict):
                for key in item:
                    _check_text(key)
                deeper.extend(item.values())
            elif isinstance(item, list):
                deeper.extend(item)
        if any(isinstance(item, dict | list) for item in level):
            depth += 1
            if depth > max_depth:
                raise StrictJsonError(f"nested deeper than {max_depth} levels")
        level = deeper


def _check_text(text: str) -> None:
    if not _is_unicode(text):
        raise StrictJsonError("a string holds a lone surrogate")


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 40 else text[:40] + "…")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_keys,
    parse_float=_finite,
    parse_int=_bounded_integer,
    parse_constant=_no_constant,
)
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=True)
