"""Read JSON, TOML and YAML files as plain values. The suffix of a file's name determines its
format.

Host side, for files that operators write (definitions of tools, the policy). Values that exist only
in some of the formats (dates, anchors, NaN) are refused. Invariant: the time for parsing is bounded
by the length of the file.
"""

from __future__ import annotations

import codecs
import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import re2

from fumehood.protocol import strict_json

Path = tuple[str | int, ...]
"""The keys and indexes that lead from the top of a document to a value."""

Lines = dict[Path, int]
"""Path of each key in a YAML text → the key's line number, counted from 1. For other formats, the
line numbers are not known.
"""

MAX_VALUES = 200_000
"""Maximum number of scalars, arrays and objects in one file. A definition of a tool has a few
dozen.
"""

# The standard library's parser takes quadratic time in the parts of a dotted key.
_PART = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\[^\n])*"|'[^'\n]*')"""
_LONG_KEY = re2.compile(rf"{_PART}(?:[ \t]*\.[ \t]*{_PART}){{{strict_json.MAX_DEPTH}}}")


class FileFault(Exception):
    """A file cannot be used. The message says why, in words for the operator."""


def read_values(
    name: str, data: bytes, lines: Lines | None = None, *, number_keys: bool = False
) -> Any:
    """Parse `data`, the content of the file `name`, and return its value. The suffix of `name`
    determines the format. If `lines` is given and the format is YAML, add the line of each key to
    `lines`.

    If `number_keys` is True, keys in YAML may be integers, which are read as strings.

    Raises:
        FileFault: the data is not in that format, or is too large.
    """
    # All three formats begin with an ASCII character, so in UTF-16 one of its two bytes is zero.
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or data[:2].count(0) == 1:
        raise FileFault("it looks like UTF-16; save it as UTF-8")
    if b"\0" in data:
        raise FileFault("it holds NUL bytes")
    try:
        value = _PARSERS[PurePath(name).suffix](data, lines, number_keys)
        _require_few_values(value)
    except UnicodeDecodeError as error:
        raise FileFault(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise FileFault(f"nested deeper than {strict_json.MAX_DEPTH} levels") from None
    except ValueError as error:
        raise FileFault(one_line(str(error))) from None
    return value


def line_of(lines: Lines, path: Path) -> int | None:
    """Return the line of the value at `path`. If this line is not in `lines`, return the line of
    the innermost enclosing value whose line is known. Return None if no line is known.
    """
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None


def one_line(text: str, longest: int = 1000) -> str:
    """Return untrusted text on one line, safe for a terminal and a log, cut to `longest`
    characters.
    """
    shown = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text[: longest + 1])
    return shown if len(shown) <= longest else f"{shown[:longest]}…"


def _json(data: bytes, lines: Lines | None, number_keys: bool) -> Any:
    return strict_json.loads(data)


def _toml(data: bytes, lines: Lines | None, number_keys: bool) -> Any:
    text = strict_json.decoded(data)
    if _LONG_KEY.search(text):
        raise ValueError(f"a dotted key has more than {strict_json.MAX_DEPTH} parts")
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"not TOML: {error}") from None
    except ValueError:  # Python's own limit on digits
        raise ValueError("a number has too many digits") from None
    return _through_json(value)


def _yaml(data: bytes, lines: Lines | None, number_keys: bool) -> Any:
    from fumehood.protocol import yaml_values

    text = strict_json.decoded(data)
    return _through_json(yaml_values.loads(text, lines, number_keys=number_keys))


def _through_json(value: Any) -> Any:
    """Return `value` after it was encoded as JSON and decoded again. This refuses dates, NaN and
    deep nesting.

    Raises:
        ValueError: the value is refused. The message gives the reason.
    """
    return strict_json.loads(_ENCODER.encode(value).encode())


def _refuse(value: Any) -> Any:
    raise ValueError(f"a {type(value).__name__} is not accepted; write it as a string")


_ENCODER = json.JSONEncoder(default=_refuse, allow_nan=False)


_PARSERS: Mapping[str, Callable[[bytes, Lines | None, bool], Any]] = {
    ".json": _json,
    ".toml": _toml,
    ".yaml": _yaml,
    ".yml": _yaml,
}
SUFFIXES = tuple(_PARSERS)


def _require_few_values(value: Any) -> None:
    waiting, seen = [value], 0
    while waiting:
        seen += 1
        if seen > MAX_VALUES:
            raise ValueError(f"it holds more than {MAX_VALUES} values")
        item = waiting.pop()
        if isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
