"""The policy file: from bytes to a valid policy, or to every fault in it.

Host side, used by the engine and by `fumehood policy`. Invariants: a policy is used whole or not at
all; a file that other users can write is refused.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from threading import RLock
from typing import Any, NoReturn

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fumehood.core.names import suggestion
from fumehood.core.tool import ToolDefinition
from fumehood.policy.checks import Place, check_rules
from fumehood.policy.model import (
    MAX_RULES,
    Condition,
    Policy,
    PolicyError,
    PolicyFault,
    Predicate,
    Rule,
)
from fumehood.protocol.files import FileFault, Lines, line_of, one_line, read_values
from fumehood.sandbox.trusted_files import Signature, Untrusted, open_directory, read_file

Known = ToolDefinition | tuple[str, str]
"""A tool, or its name and version; without a version how the names of tools begin that are listed
later."""
"""A registered tool: its definition, or its name and version if only those are known."""

SUFFIXES = (".toml", ".yaml", ".yml")
VERSION_DIGITS = 12
MAX_FAULTS = 50
"""Faults reported for one file."""


def load_policy(path: Path, tools: Iterable[Known]) -> Policy:
    """Load the policy from a file.

    Definitions among `tools` are used to check categories, tags and arguments.

    Raises:
        PolicyError: with every fault; also if the file is missing or other users can write it.
    """
    return parse_policy(path.name, _read(path)[0], tools)


def parse_policy(name: str, data: bytes, tools: Iterable[Known]) -> Policy:
    """Parse a policy from the bytes of a file with this name. Raises as `load_policy`."""
    given = list(tools)
    lines: Lines = {}
    found = _Faults(name, lines)
    document = _document(name, data, lines)
    entries = found.checked_entries(document)
    shaped = {n: rule for n, entry in enumerate(entries) if (rule := found.rule(n, entry))}
    found.check_ids()
    definitions = [tool for tool in given if isinstance(tool, ToolDefinition)]
    names = [_name(tool) for tool in given]
    coming = tuple(name for name, version in names if not version)
    names = [name for name in names if name[1]]
    numbers, rules = list(shaped), list(shaped.values())
    # Also with invalid rules: the author wants every fault at once.
    check_rules(
        rules,
        names,
        definitions,
        lambda at, place, words: found.add(numbers[at], place, words),
        coming,
    )
    found.raise_if_any()
    if document.get("mode") == "shadow":
        rules = [rule.model_copy(update={"mode": "shadow"}) for rule in rules]
    return Policy(
        version=hashlib.sha256(data).hexdigest()[:VERSION_DIGITS],
        file=name,
        rules=tuple(rules),
        lines=tuple(line_of(lines, ("rules", number)) for number in range(len(rules))),
    )


class PolicyFile:
    """The policy file at one path, polled by one thread at a time."""

    def __init__(self, path: Path, tools: Callable[[], Iterable[Known]]) -> None:
        self.path = path
        self._tools = tools
        self._lock = RLock()
        self._used: Signature | str | None = None
        self._last: Signature | str | None = None

    def load(self) -> Policy:
        """Load the file as it is now. Raises as `load_policy`."""
        with self._lock:
            try:
                data, self._used = _read(self.path)
            except PolicyError as refused:
                self._used = str(refused)
                raise
            finally:
                self._last = self._used
        return parse_policy(self.path.name, data, self._tools())

    def poll(self) -> Policy | PolicyError | None:
        """The policy or its faults, if they changed since the last report.

        A change counts once two polls in a row have seen it.
        """
        with self._lock:
            seen = self._look()
            before, self._last = self._last, seen
            if seen == self._used or seen != before:
                return None
            try:
                return self.load()
            except PolicyError as refused:
                return refused

    def _look(self) -> Signature | str:
        try:
            return _read(self.path)[1]
        except PolicyError as refused:
            return str(refused)


def _read(path: Path) -> tuple[bytes, Signature]:
    owners = frozenset({0, os.geteuid()})
    if path.suffix not in SUFFIXES:
        _refuse(path.name, f"its name must end in one of {', '.join(SUFFIXES)}")
    try:
        directory = open_directory(path.parent, owners)
        try:
            return read_file(directory, path.name, owners)
        finally:
            os.close(directory)
    except Untrusted as refused:
        _refuse(path.name, str(refused))
    except OSError as error:
        _refuse(path.name, f"it cannot be read: {error.strerror}")


def _refuse(name: str, words: str) -> NoReturn:
    raise PolicyError(name, (PolicyFault(line=None, message=words),))


def _document(name: str, data: bytes, lines: Lines) -> dict[str, Any]:
    try:
        value = read_values(name, data, lines)
    except FileFault as fault:
        _refuse(name, str(fault))
    if not isinstance(value, dict):
        _refuse(name, "it holds no table with 'rules'")
    return value


def _name(tool: Known) -> tuple[str, str]:
    return (tool.name, tool.version) if isinstance(tool, ToolDefinition) else tool


class _Faults:
    """Collects the faults of one document."""

    def __init__(self, file: str, lines: Lines) -> None:
        self._file = file
        self._lines = lines
        self._found: list[tuple[int, PolicyFault]] = []
        """Each with its rule's number, or -1 if it belongs to no rule."""
        self._ids: dict[int, str] = {}

    def checked_entries(self, document: dict[str, Any]) -> list[Any]:
        """The raw rules; the other top-level keys are checked."""
        for key in document.keys() - {"rules", "mode"}:
            self._tell((key,), f"unknown key {key[:40]!a}{_known(str(key), ('mode', 'rules'))}")
        if document.get("mode", "enforce") not in ("enforce", "shadow"):
            self._tell(("mode",), "mode must be 'enforce' or 'shadow'")
        entries = document.get("rules")
        if not isinstance(entries, list) or not entries:
            self._tell(("rules",), "it holds no rules; without rules, leave policy_file out")
            return []
        if len(entries) > MAX_RULES:
            self._tell(("rules",), f"it holds {len(entries)} rules, more than {MAX_RULES}")
            self.raise_if_any()
        return entries

    def rule(self, number: int, entry: Any) -> Rule | None:
        """One rule, or None after its faults were added."""
        if isinstance(entry, dict) and isinstance(entry.get("id"), str):
            self._ids[number] = entry["id"]
        try:
            return Rule.model_validate(entry)
        except ValidationError as error:
            for fault in error.errors(include_url=False, include_input=False):
                self.add(number, fault["loc"], plain_words(fault, _keys_at(fault["loc"])))
            return None

    def check_ids(self) -> None:
        """Report ids that are used twice, including those of invalid rules."""
        first: dict[str, int] = {}
        for number, name in self._ids.items():
            if first.setdefault(name, number) != number:
                self.add(number, ("id",), f"the id {one_line(name, 80)} is given twice")

    def add(self, number: int, place: Place, words: str) -> None:
        """Add a fault of one rule."""
        who = self._ids.get(number)
        named = f"rule {one_line(who, 80)!a}" if who is not None else f"rule number {number + 1}"
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)[1:]
        self._tell(("rules", number, *place), f"{named}: {where + ': ' if where else ''}{words}")

    def _tell(self, place: Place, words: str) -> None:
        fault = PolicyFault(line=line_of(self._lines, place), message=one_line(words))
        number = place[1] if len(place) > 1 else -1
        self._found.append((int(number), fault))

    def raise_if_any(self) -> None:
        """Raises PolicyError if there are faults, ordered by line or by rule."""
        if self._found:
            ordered = [
                fault for _, fault in sorted(self._found, key=lambda it: (it[1].line or 0, it[0]))
            ]
            told, more = ordered[:MAX_FAULTS], len(ordered) - MAX_FAULTS
            if more > 0:
                told.append(PolicyFault(line=None, message=f"and {more} more"))
            raise PolicyError(self._file, tuple(told))


def _keys(model: type[BaseModel], *more: str) -> tuple[str, ...]:
    return tuple(
        sorted({*(field.alias or name for name, field in model.model_fields.items()), *more})
    )


_RULE_KEYS = _keys(Rule, "runs")
_CONDITION_KEYS = _keys(Condition)
_PREDICATE_KEYS = _keys(Predicate)


def _keys_at(place: Place) -> tuple[str, ...]:
    """The keys of the table in a rule that has this key."""
    if "not" in place[:-1]:
        return _PREDICATE_KEYS
    return _CONDITION_KEYS if len(place) > 1 else _RULE_KEYS


def _known(key: str, known: Collection[str]) -> str:
    return f"{suggestion(key, known)}; known are {', '.join(known)}"


Context = Mapping[str, Any]

MONEY = 'is not an amount; write money as a string, such as "0.10"'
_PLAIN: Mapping[str, str] = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "decimal_parsing": MONEY,
    "decimal_type": MONEY,
    "dict_type": "must be a table",
    "finite_number": MONEY,
    "int_from_float": "must be a whole number",
    "int_type": "must be a whole number",
    "invalid-json-value": "is not a JSON value",
    "invalid_key": "its keys must be strings",
    "missing": "is missing",
    "model_type": "must be a table",
    "string_pattern_mismatch": "begins with a letter or digit, has only letters, digits and _ . - "
    "and at most 64 of them",
    "string_too_short": "must not be empty",
    "string_type": "must be a string",
    "too_short": "must not be empty",
    "tuple_type": "must be a list",
}
_OF_CONTEXT: Mapping[str, Callable[[Context], str]] = {
    "decimal_max_digits": lambda given: f"has more than {given['max_digits']} digits",
    "decimal_max_places": lambda given: f"has more than {given['decimal_places']} decimal places",
    "decimal_whole_digits": lambda given: f"has more than {given['whole_digits']} whole digits",
    "enum": lambda given: f"must be {given['expected']}",
    "greater_than_equal": lambda given: f"must be {given['ge']} or more",
    "less_than_equal": lambda given: f"must be {given['le']} or less",
    "literal_error": lambda given: _only(given["expected"]),
    "string_too_long": lambda given: f"has more than {given['max_length']} characters",
    "too_long": lambda given: f"has more than {given['max_length']} entries",
}


def plain_words(fault: ErrorDetails, known_keys: Collection[str]) -> str:
    """The fault in plain English. `known_keys` are listed for an unknown one."""
    kind, place = fault["type"], fault["loc"]
    if kind == "extra_forbidden":
        return f"unknown key{_known(str(place[-1]), known_keys)}"
    if kind in _PLAIN:
        words = _PLAIN[kind]
    elif kind in _OF_CONTEXT:
        words = _OF_CONTEXT[kind](fault.get("ctx", {}))
    else:
        return fault["msg"].removeprefix("Value error, ")
    is_entry = bool(place) and isinstance(place[-1], int)
    return f"entry {place[-1] + 1} {words}" if is_entry else words  # type: ignore[operator]


def _only(expected: str) -> str:
    if expected == "True":
        return "can only be true; leave the key out instead"
    return f"must be {expected}"
