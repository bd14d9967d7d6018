"""YAML restricted to JSON's values: one document of objects, arrays and scalars.

Host side, used by `protocol/files`. PyYAML only splits the text into events, such as the start of a
mapping. This module interprets them, following the core schema of YAML 1.2 (`no` is a string, `010`
is ten). Invariants: anchors and tags are refused before they can have an effect; nesting and the
number of values are limited while reading, so the cost is linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from fumehood.protocol.files import MAX_VALUES, Lines, Path
from fumehood.protocol.strict_json import MAX_DEPTH, MAX_INTEGER_DIGITS

# *Source*: yaml.org, YAML 1.2.2, section 10.3.2 (core schema).
_NULL = {"", "~", "null", "Null", "NULL"}
_BOOLEANS = {"true": True, "True": True, "TRUE": True,
             "false": False, "False": False, "FALSE": False}  # fmt: skip
_INTEGER = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_DIRECTIVE = re.compile(r"^%", re.MULTILINE)
_NO_NUMBER = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's loader. It is the loader in C if PyYAML was built with libyaml. Otherwise it is the
loader in Python, which produces the same events.
"""


class YamlError(ValueError):
    """The text is not YAML, or contains a value that JSON cannot represent. The message says where
    in the text the fault is.
    """


def loads(text: str, lines: Lines | None = None, *, number_keys: bool = False) -> Any:
    """Parse one YAML document, and return its value. If `lines` is given, add the line of every
    value to `lines`.

    If `number_keys` is True, a key may be an integer, such as an HTTP status. Such a key is read as
    a string.

    YAML is restricted: directives, anchors, aliases, tags, repeated keys, keys of other types, NaN
    and infinity are refused. So are integers over 4,300 digits, nesting over 64 levels, and more
    than 200,000 values.

    Raises:
        YamlError: the text is not exactly one YAML document, or contains something that is refused.
    """
    if _DIRECTIVE.search(text):
        # libyaml compares each directive with all previous ones, which takes quadratic time.
        raise YamlError("directives (lines that begin with '%') are not accepted")
    try:
        return _Builder(yaml.parse(text, Loader=_Loader), lines, number_keys).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        raise YamlError(f"not YAML: {error.problem}{where}") from None
    except yaml.YAMLError:
        raise YamlError("not YAML: it holds characters that YAML does not allow") from None


class _Builder:
    """Builds the value of a document from the events of PyYAML. It recurses at most `MAX_DEPTH`
    levels.
    """

    def __init__(self, events: Iterator[Any], lines: Lines | None, number_keys: bool) -> None:
        self._events = events
        self._lines = lines
        self._number_keys = number_keys
        self._count = 0

    def document(self) -> Any:
        """Build the value of the only document."""
        next(self._events)  # the stream begins
        if isinstance(next(self._events), yaml.StreamEndEvent):
            raise YamlError("it is empty")
        value = self._value(next(self._events), ())
        next(self._events)  # the document ends
        after = next(self._events)
        if not isinstance(after, yaml.StreamEndEvent):
            raise YamlError(f"a second document begins{_at(after)}; one file holds one")
        return value

    def _value(self, event: Any, path: Path) -> Any:
        """Build and return the value that begins with `event`. `path` leads to this value in the
        document.
        """
        self._admit(event)
        if self._lines is not None:
            self._lines.setdefault(path, event.start_mark.line + 1)
        if isinstance(event, yaml.ScalarEvent):
            return _scalar(event)
        if len(path) >= MAX_DEPTH:
            raise YamlError(f"nested deeper than {MAX_DEPTH} levels{_at(event)}")
        is_list = isinstance(event, yaml.SequenceStartEvent)
        return self._list(path) if is_list else self._object(path)

    def _list(self, path: Path) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._value(event, (*path, len(items))))
        return items

    def _object(self, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._key(event)
            if key in found:
                raise YamlError(f"the key {key[:40]!a} is given twice{_at(event)}")
            place = (*path, key)
            if self._lines is not None:
                self._lines[place] = event.start_mark.line + 1
            found[key] = self._value(next(self._events), place)
        return found

    def _key(self, event: Any) -> str:
        self._admit(event)
        key = _scalar(event) if isinstance(event, yaml.ScalarEvent) else None
        if self._number_keys and type(key) is int:
            key = str(event.value)
        if not isinstance(key, str):
            raise YamlError(f"a key is not a string{_at(event)}; quote it")
        return key

    def _admit(self, event: Any) -> None:
        self._count += 1
        if self._count > MAX_VALUES:
            raise YamlError(f"it holds more than {MAX_VALUES} values")
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise YamlError(f"anchors and aliases are not accepted{_at(event)}")
        if event.tag is not None:
            raise YamlError(f"tags are not accepted{_at(event)}")


def _scalar(event: Any) -> Any:
    text: str = event.value
    if event.style:  # quoted or a block: a string, whatever it looks like
        return text
    if text in _NULL:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _NO_NUMBER.fullmatch(text):
        raise YamlError(f"NaN and infinity are not accepted{_at(event)}")
    for pattern, base in ((_INTEGER, 10), (_OCTAL, 8), (_HEXADECIMAL, 16)):
        if pattern.fullmatch(text):
            if len(text) > MAX_INTEGER_DIGITS:
                raise YamlError(f"an integer has too many digits{_at(event)}")
            return int(text, base)
    return float(text) if _FLOAT.fullmatch(text) else text


def _at(event: Any) -> str:
    return f" (line {event.start_mark.line + 1}, column {event.start_mark.column + 1})"
