"""YAML restricted to JSON's values: one document of objects, arrays and scalars.

Host side, used by `protocol/files`. The library only splits the text into events; this file
interprets them, by the core schema of YAML 1.2 (`no` is a string, `010` is ten). Invariants:
anchors and tags are refused before they can have an effect; nesting and the number of values are
limited while reading, so the cost is linear in the length.
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
"""PyYAML's loader in C, if it was built with libyaml. It produces the same events."""


class YamlError(ValueError):
    """The text is not YAML, or has more than JSON's values. The message says where."""


def loads(text: str, lines: Lines | None = None, *, number_keys: bool = False) -> Any:
    """Parse one document. `lines` is filled with the line of every value.

    With `number_keys` a key may be an integer, such as a status of HTTP; it is read as its text.

    Raises:
        YamlError: not YAML; not exactly one document; a directive, anchor, alias or tag; a key
            that is not a string or is repeated; NaN or infinity; an integer over 4,300
            digits; nesting over 64 levels; more than 200,000 values.
    """
    if _DIRECTIVE.search(text):
        # libyaml compares each with all previous ones: quadratic time in their number.
        raise YamlError("directives (lines that begin with '%') are not accepted")
    try:
        return _one_document(iter(yaml.parse(text, Loader=_Loader)), _Builder(lines, number_keys))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        raise YamlError(f"not YAML: {error.problem}{where}") from None
    except yaml.YAMLError:
        raise YamlError("not YAML: it holds characters that YAML does not allow") from None


def _one_document(events: Iterator[Any], builder: _Builder) -> Any:
    documents = 0
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise YamlError(f"a second document begins{_at(event)}; one file holds one")
        elif isinstance(event, yaml.NodeEvent):
            builder.take(event)
        elif isinstance(event, yaml.CollectionEndEvent):
            builder.close()
    if documents == 0:
        raise YamlError("it is empty")
    return builder.root


class _Builder:
    """Builds values without recursion, because the sender controls the depth."""

    def __init__(self, lines: Lines | None, number_keys: bool) -> None:
        self._number_keys = number_keys
        self.root: Any = None
        self._open: list[Any] = []
        self._keys: list[str | None] = []
        self._count = 0
        self._lines = lines
        self._within: Path = ()
        """The path of the innermost list or object that has not ended."""

    def take(self, event: Any) -> None:
        self._count += 1
        if self._count > MAX_VALUES:
            raise YamlError(f"it holds more than {MAX_VALUES} values")
        _refuse_more_than_json(event)
        if isinstance(event, yaml.ScalarEvent):
            value = _scalar(event)
            if self._open and isinstance(self._open[-1], dict) and self._keys[-1] is None:
                self._begin_pair(value, event)
            else:
                self._put(value, event)
            return
        opened: Any = {} if isinstance(event, yaml.MappingStartEvent) else []
        within = self._path()
        self._put(opened, event)
        if len(self._open) >= MAX_DEPTH:
            raise YamlError(f"nested deeper than {MAX_DEPTH} levels{_at(event)}")
        self._open.append(opened)
        self._keys.append(None)
        self._within = within

    def close(self) -> None:
        self._open.pop()
        self._keys.pop()
        self._within = self._within[:-1]

    def _begin_pair(self, key: Any, event: Any) -> None:
        if self._number_keys and isinstance(key, int) and not isinstance(key, bool):
            key = str(event.value)
        if not isinstance(key, str):
            raise YamlError(f"a key is not a string{_at(event)}; quote it")
        if key in self._open[-1]:
            raise YamlError(f"the key {key[:40]!a} is given twice{_at(event)}")
        self._keys[-1] = key
        if self._lines is not None and event.start_mark is not None:
            self._lines[self._path()] = event.start_mark.line + 1

    def _path(self) -> Path:
        """Return the path of the next value."""
        if not self._open:
            return ()
        innermost, key = self._open[-1], self._keys[-1]
        return (*self._within, len(innermost) if isinstance(innermost, list) else str(key))

    def _put(self, value: Any, event: Any) -> None:
        if self._lines is not None and event.start_mark is not None:
            self._lines.setdefault(self._path(), event.start_mark.line + 1)
        if not self._open:
            self.root = value
            return
        container, key = self._open[-1], self._keys[-1]
        if isinstance(container, list):
            container.append(value)
        elif key is None:
            raise YamlError(f"a key is not a string{_at(event)}")
        else:
            container[key] = value
            self._keys[-1] = None


def _refuse_more_than_json(event: Any) -> None:
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
    mark = event.start_mark
    return f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
