"""The policy file: parses the file's bytes to a valid policy, or finds every fault in them.

Host side, used by the engine and by `fumehood policy`. Invariants: a policy is used completely or
not at all; a file that other users can write is refused.
"""

from __future__ import annotations

import hashlib
import stat
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from threading import RLock
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, create_model
from pydantic_core import ErrorDetails

from fumehood.core.names import EXTERNAL, NET_TOOL, compile_glob, suggestion
from fumehood.core.part import Part, PartError, imported
from fumehood.core.tool import ToolDefinition
from fumehood.core.value import table_of
from fumehood.parts import parts
from fumehood.policy.model import (
    MAX_CONDITIONS,
    MAX_RULES,
    Condition,
    Policy,
    PolicyError,
    PolicyFault,
    Predicate,
    Rule,
    Verdict,
)
from fumehood.policy.rules import compile_rule, compile_tool, names_exactly
from fumehood.protocol.files import FileFault, Lines, line_of, one_line, read_values
from fumehood.sandbox.trusted_files import (
    MAX_FILE_BYTES,
    TOO_LARGE,
    Signature,
    Untrusted,
    read_trusted,
)
from fumehood.storage.directory import write_private

Known = ToolDefinition | tuple[str, str]
"""A registered tool: its definition, or only its name and version. If the version is empty, the
name is instead a prefix, and tools whose names begin with this prefix may be registered later."""

Place = tuple[str | int, ...]
"""The path to a value in a rule: keys of tables and indexes of lists."""

SUFFIXES = (".toml", ".yaml", ".yml")
OWN_KEYS = ("mode", "rules")
"""The top-level keys of a policy file that are not added by parts."""
VERSION_DIGITS = 12
"""Number of hexadecimal digits of a policy file's SHA-256 that form the version of the file."""


def load_policy(path: Path, tools: Iterable[Known]) -> Policy:
    """Load the policy from a file.

    `tools` are the registered tools. If one of them is given by name and version instead of its
    definition, the names of arguments in rules are not checked. A rule that can never decide a call
    is a fault.

    Raises:
        PolicyError: the policy has faults, or the file is missing or can be written by other users.
            The error lists all faults.
    """
    return parse_policy(path.name, _read(path)[0], tools)


def parse_policy(name: str, data: bytes, tools: Iterable[Known]) -> Policy:
    """Parse a policy from a file's name and bytes. `tools` are the registered tools. Raises
    PolicyError as `load_policy` does.
    """
    lines: Lines = {}
    found = _Faults(name, lines)
    document = _document(name, data, lines)
    entries = found.checked_entries(document)
    of_parts = {key: found.of_part(key, document[key]) for key in document.keys() & _OF_PARTS}
    # Invalid rules do not end the checks, because the author wants every fault at once.
    shaped = {n: rule for n, entry in enumerate(entries) if (rule := found.rule(n, entry))}
    found.check_ids()
    definitions, coming, is_complete = list[ToolDefinition](), list[str](), True
    versions: dict[str, list[str]] = defaultdict(list)
    for tool in tools:
        if isinstance(tool, ToolDefinition):
            definitions.append(tool)
            versions[tool.name].append(tool.version)
        elif tool[1]:
            versions[tool[0]].append(tool[1])
            is_complete = False
        else:
            coming.append(tool[0])
    for number, rule in shaped.items():
        is_known = _check_tools(number, rule, versions, tuple(coming), found)
        is_external = any(
            pattern.startswith(EXTERNAL) or pattern == NET_TOOL for pattern in rule.tools or ()
        )
        if is_known and is_complete and not is_external:
            _check_arguments(number, rule, definitions, found)
    _check_shadowed(shaped, found)
    rules = list(shaped.values())
    found.raise_if_any()
    if document.get("mode") == "shadow":
        rules = [rule.model_copy(update={"mode": "shadow"}) for rule in rules]
    return Policy(
        version=version_of(data),
        file=name,
        rules=tuple(rules),
        lines=tuple(line_of(lines, ("rules", number)) for number in range(len(rules))),
        of_parts=of_parts,
    )


class Outdated(Exception):
    """The policy file has changed since it was read."""


def version_of(data: bytes) -> str:
    """Return the version of a policy file with this content: the first digits of the content's
    SHA-256.
    """
    return hashlib.sha256(data).hexdigest()[:VERSION_DIGITS]


class PolicyFile:
    """The policy file at one path. `tools` returns the registered tools. Only one thread at a time
    may call `poll`.
    """

    def __init__(self, path: Path, tools: Callable[[], Iterable[Known]]) -> None:
        self.path = path
        self._tools = tools
        self._lock = RLock()
        self._used: Signature | str | None = None
        self._last: Signature | str | None = None

    def load(self) -> Policy:
        """Load the file's current content. Raises PolicyError as `load_policy` does."""
        with self._lock:
            try:
                data, self._used = _read(self.path)
            except PolicyError as refused:
                self._used = str(refused)
                raise
            finally:
                self._last = self._used
        return parse_policy(self.path.name, data, self._tools())

    def text(self) -> tuple[str, str]:
        """Return the file's content and the version of this content. Raises PolicyError if the file
        cannot be read.
        """
        data, _ = _read(self.path)
        return data.decode("utf-8", "replace"), version_of(data)

    def replace(self, text: str, version: str) -> Policy:
        """Replace the file's content by `text`, and return the new policy. `version` is the version
        of the content that is to be replaced. A crash leaves either the old file or the new file.

        Raises:
            PolicyError: the new content has faults; nothing was written.
            Outdated: the file no longer has the version `version`; nothing was written.
            OSError: the file cannot be written.
        """
        data = text.encode()
        if len(data) > MAX_FILE_BYTES:
            _refuse(self.path.name, TOO_LARGE)
        with self._lock:
            parse_policy(self.path.name, data, self._tools())
            if version_of(_read(self.path)[0]) != version:
                raise Outdated
            write_private(self.path, data, stat.S_IMODE(self.path.lstat().st_mode))
            return self.load()

    def poll(self) -> Policy | PolicyError | None:
        """Check the file. If it has changed, return the new policy, or the error that lists its
        faults. Otherwise, return None.

        A change is reported only after two consecutive polls have found the same new version.
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
    if path.suffix not in SUFFIXES:
        _refuse(path.name, f"its name must end in one of {', '.join(SUFFIXES)}")
    try:
        return read_trusted(path)
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


class _Faults:
    """Collects the faults of one policy file."""

    def __init__(self, file: str, lines: Lines) -> None:
        self._file = file
        self._lines = lines
        self._found: list[tuple[int, PolicyFault]] = []
        """Pairs of a rule's number (-1 if the fault belongs to no rule) and the fault."""
        self._ids: dict[int, str] = {}

    def checked_entries(self, document: dict[str, Any]) -> list[Any]:
        """Check all top-level keys of a document, and return its unparsed rules. Add a fault for
        each invalid key.

        Raises:
            PolicyError: there are too many rules.
        """
        known_keys = sorted((*OWN_KEYS, *_OF_PARTS))
        for key in document.keys() - set(known_keys):
            known = _known(str(key), known_keys)
            self._note((key,), f"unknown key {key[:40]!a}{known}")
        if document.get("mode", "enforce") not in ("enforce", "shadow"):
            self._note(("mode",), "mode must be 'enforce' or 'shadow'")
        has_others = any(document.get(key) for key in _OF_PARTS)
        entries = document.get("rules", [] if has_others else None)
        if not isinstance(entries, list) or not (entries or has_others):
            self._note(("rules",), "it holds no rules; without rules, leave policy_file out")
            return []
        if len(entries) > MAX_RULES:
            self._note(("rules",), f"it holds {len(entries)} rules, more than {MAX_RULES}")
            self.raise_if_any()
        return entries

    def of_part(self, key: str, value: Any) -> Any:
        """Parse the value of a key that a part adds to the policy file. If the value is invalid,
        add its faults and return None.
        """
        kind = _OF_PARTS[key]
        try:
            return TypeAdapter(kind).validate_python(value)
        except ValidationError as error:
            model = table_of(kind)
            for fault in error.errors(include_url=False, include_input=False):
                words = plain_words(fault, _keys(model) if model is not None else ())
                number, *inner = fault["loc"] or (None,)
                of = key if number is None else f"{key.removesuffix('s')} number {int(number) + 1}"
                where = "".join(f"{part}." for part in inner)[:-1]
                self._note((key, *fault["loc"]), f"{of}: {where + ': ' if where else ''}{words}")
            return None

    def rule(self, number: int, entry: Any) -> Rule | None:
        """Parse the rule with this number. If it is invalid, add its faults and return None."""
        if isinstance(entry, dict) and isinstance(entry.get("id"), str):
            self._ids[number] = entry["id"]
        try:
            return RuleOfFile.model_validate(entry)
        except ValidationError as error:
            for fault in error.errors(include_url=False, include_input=False):
                self.add(number, fault["loc"], plain_words(fault, _keys_at(fault["loc"])))
            return None

    def check_ids(self) -> None:
        """Add a fault for each rule that has the same id as an earlier rule. The ids of invalid
        rules are compared too.
        """
        first: dict[str, int] = {}
        for number, name in self._ids.items():
            if first.setdefault(name, number) != number:
                self.add(number, ("id",), f"the id {one_line(name, 80)} is given twice")

    def add(self, number: int, place: Place, words: str) -> None:
        """Add a fault of the rule with this number. `place` is the path to the faulty value in the
        rule, and `words` describes the fault.
        """
        who = self._ids.get(number)
        named = f"rule {one_line(who, 80)!a}" if who is not None else f"rule number {number + 1}"
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)[1:]
        self._note(("rules", number, *place), f"{named}: {where + ': ' if where else ''}{words}")

    def _note(self, place: Place, words: str) -> None:
        fault = PolicyFault(line=line_of(self._lines, place), message=one_line(words))
        number = place[1] if len(place) > 1 else -1
        self._found.append((int(number), fault))

    def raise_if_any(self) -> None:
        """Raise PolicyError with all faults, if there are any. The faults are in the order of their
        lines, or of their rules if lines are unknown.
        """
        if self._found:
            ordered = [
                fault for _, fault in sorted(self._found, key=lambda it: (it[1].line or 0, it[0]))
            ]
            raise PolicyError(self._file, tuple(ordered))


def _keys(model: type[BaseModel], *more: str) -> tuple[str, ...]:
    return tuple(
        sorted({*(field.alias or name for name, field in model.model_fields.items()), *more})
    )


def keys_of(found: Iterable[Part]) -> Mapping[str, Any]:
    """Return the keys that these parts add to a policy file, each with the type of its value.

    Raises:
        PartError: a part adds a key that every policy file already has.
    """
    keys = {key: imported(place) for part in found for key, place in part.policy.items()}
    if taken := keys.keys() & set(OWN_KEYS):
        raise PartError(f"A part adds the key {min(taken)!r} to the policy, which is the kernel's.")
    return keys


def condition_of(found: Iterable[Part]) -> type[Condition]:
    """Return the model of a condition, extended by the keys that these parts add.

    Raises:
        PartError: a part adds a key that conditions already have.
    """
    kinds = {key: imported(place) for part in found for key, place in part.conditions.items()}
    if taken := kinds.keys() & {*dir(Condition), *_keys(Condition)}:
        raise PartError(f"A part adds the key {min(taken)!r} to conditions, which is the kernel's.")
    keys: dict[str, Any] = {key: (kind | None, None) for key, kind in kinds.items()}
    doc = Condition.__doc__
    return create_model("Condition", __base__=Condition, __module__=__name__, __doc__=doc, **keys)


def rule_of(found: Collection[Part]) -> type[Rule]:
    """Return the model of a rule, extended by the keys that these parts add.

    These are the keys of the parts' conditions (`Part.conditions`) and gates (`Part.excesses`). A
    gate is a check that a part makes before a call. A rule that has the key of a gate matches only
    calls that the gate would refuse.

    Raises:
        PartError: a part adds a key that rules already have, or that another part adds.
    """
    condition: Any = condition_of(found)
    keys: dict[str, Any] = {key: (Literal[True] | None, None) for p in found for key in p.excesses}
    short = set(condition.keys_of_parts())
    if taken := (keys.keys() | short) & {*dir(Rule), *Rule.model_fields}:
        raise PartError(f"A part adds the key {min(taken)!r} to rules, which is the kernel's.")
    if twice := keys.keys() & short:
        raise PartError(f"Two parts add the key {min(twice)!r} to rules.")
    some: Any = tuple[condition, ...]
    keys["when"] = (Annotated[some, Field(max_length=MAX_CONDITIONS)], ())
    keys["any"] = (Annotated[some, Field(min_length=1, max_length=MAX_CONDITIONS)] | None, None)
    return create_model("Rule", __base__=Rule, __module__=__name__, __doc__=Rule.__doc__, **keys)


_OF_PARTS = keys_of(parts())
RuleOfFile = rule_of(parts())
"""The model of a rule in a policy file, extended by the keys of all parts."""

_RULE_KEYS = _keys(RuleOfFile, *RuleOfFile.short_keys())
_CONDITION_KEYS = _keys(condition_of(parts()))
_PREDICATE_KEYS = _keys(Predicate)


def _keys_at(place: Place) -> tuple[str, ...]:
    """Return the keys that are valid in a table of a rule. `place` is the path to any key in this
    table.
    """
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
    "string_pattern_mismatch": "must begin with a letter or digit, and have at most 64 letters, "
    "digits and _ . -",
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
    """Return a clause that describes a validation error. If the error is an unknown key, the clause
    lists `known_keys`.
    """
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


# -- faults between rules, and between rules and tools ---------------------------------------


_STRICTNESS = {Verdict.ALLOW: 0, Verdict.ASK: 1, Verdict.DENY: 2}


def _check_tools(
    number: int,
    rule: Rule,
    versions: Mapping[str, Sequence[str]],
    coming: tuple[str, ...],
    found: _Faults,
) -> bool:
    """Add a fault for each entry of the rule's `tools` that matches no registered tool. Return
    whether every entry matches a registered tool.

    `versions` maps the name of each registered tool to the tool's versions. `coming` are prefixes
    of the names of tools that may be registered later. An entry that begins with such a prefix is
    not a fault.
    """
    unknown = [pattern for pattern in rule.tools or () if not _is_registered(pattern, versions)]
    for pattern in unknown:
        name = pattern.partition("@")[0]
        if name.startswith(coming):
            continue
        known = ", ".join(sorted(versions.get(name, ()))[:10])
        hint = f"; {name} has {known}" if known else suggestion(name, versions)
        found.add(number, ("tools",), f"no registered tool matches {pattern!a}{hint}")
    return not unknown


def _is_registered(pattern: str, versions: Mapping[str, Sequence[str]]) -> bool:
    """Return whether a pattern in a rule's `tools` matches any version of any registered tool."""
    name, _, version = pattern.partition("@")
    if name.startswith(EXTERNAL) or pattern == NET_TOOL:
        return True  # these need not be declared
    if names_exactly(pattern):
        return any(map(compile_glob(version or "*"), versions.get(name, ())))
    fits = compile_tool(pattern)
    return any(fits(name, version) for name, known in versions.items() for version in known)


def _check_arguments(
    number: int, rule: Rule, definitions: Collection[ToolDefinition], found: _Faults
) -> None:
    """Add a fault for each condition of the rule that tests an argument which none of the rule's
    tools accepts.
    """
    compiled = compile_rule(rule.model_copy(update={"environments": None}), None, "")
    matching = [tool for tool in definitions if compiled.is_about(tool)]
    for key, conditions in (("when", rule.when), ("any", rule.any or ())):
        for position, condition in enumerate(conditions):
            if not matching or any(
                takes(tool, path) for tool in matching for path in condition.places
            ):
                continue
            known = {name for tool in matching for name in tool.parameters.get("properties", {})}
            asked, end = f"the argument {condition.argument[:80]!a}", "argument"
            if condition.of_part is not None:
                asked = f"a {' or '.join(map(repr, condition.of_part.arguments))}"
                (end,) = condition.question
            hint = suggestion(condition.segments[0], known)
            words = f"no tool that the rule matches takes {asked}{hint}"
            found.add(number, (key, position, end), words)


def takes(tool: ToolDefinition, segments: Sequence[str]) -> bool:
    """Return whether a tool may accept an argument at this path, that is, whether the tool's schema
    does not exclude it.
    """
    schema: Any = tool.parameters
    for segment in segments:
        if not isinstance(schema, Mapping) or not _is_complete(schema):
            return True
        properties = schema.get("properties", {})
        if segment in properties:
            schema = properties[segment]
        elif segment == "*" and properties:
            return True
        elif "items" in schema and (segment == "*" or segment.isdigit()):
            schema = schema["items"]
        else:
            is_open = schema is not tool.parameters and not properties and "items" not in schema
            return is_open and schema.get("type") not in _SCALARS
    return True


_SCALARS = ("string", "number", "integer", "boolean", "null")
_MAY_ADD_PROPERTIES = frozenset({
    "$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else",
    "patternProperties", "additionalProperties", "prefixItems", "dependentSchemas",
})  # fmt: skip


def _is_complete(schema: Mapping[str, Any]) -> bool:
    """Return whether the key `properties` names every property that the schema accepts."""
    return all(schema.get(key) is False for key in _MAY_ADD_PROPERTIES & schema.keys())


def _check_shadowed(rules: Mapping[int, Rule], found: _Faults) -> None:
    """Add a fault for each rule that can never decide a call.

    This is the case if another rule matches at least the same calls and always decides first. A
    rule decides first if it is stricter, or if it has the same verdict and is earlier.
    """
    enforced = {number: rule for number, rule in rules.items() if rule.is_enforced}
    others: dict[str | None, list[tuple[int, Rule]]] = defaultdict(list)
    for number, rule in enforced.items():
        for pattern in rule.tools or (None,):
            others[pattern].append((number, rule))
    for number, rule in enforced.items():
        near = others[rule.tools[0]] if rule.tools is not None else []
        for place, other in (*others[None], *near):
            excess = _STRICTNESS[other.decision] - _STRICTNESS[rule.decision]
            if (excess > 0 or (excess == 0 and place < number)) and _takes_all(other, rule):
                order = f", as {other.decision} wins over {rule.decision} in any order"
                words = f"it can never decide: the rule {other.id} always decides first"
                found.add(number, (), words + (order if excess else ""))
                break


def _takes_all(stricter: Rule, rule: Rule) -> bool:
    """Return whether `rule` never decides a call, because `stricter` decides all calls that `rule`
    matches.

    The caller must ensure that `stricter` wins if both rules match. So it is stricter, or has the
    same verdict and is earlier.
    """
    if not stricter.is_unconditional and _tests(stricter) != _tests(rule):
        return False
    if rule.decision is stricter.decision is Verdict.ASK and _asks_more(rule, stricter):
        return False
    lists = ("agents", "principals", "environments", "categories", "tags")
    values = ("dangerous", "read_only", "sandboxed", "cost_over")
    return (
        all(_includes(getattr(stricter, key), getattr(rule, key)) for key in lists)
        and all(getattr(stricter, key) in (None, getattr(rule, key)) for key in values)
        and _includes(stricter.tools, rule.tools)
        # Only a rule that names a dangerous tool exactly allows it.
        and not (
            stricter.decision is Verdict.ALLOW and stricter.tools is None and rule.tools is not None
        )
    )


def _tests(rule: Rule) -> tuple[object, ...]:
    return rule.when, rule.any, rule.exceeds, rule.grade_below


def _asks_more(rule: Rule, than: Rule) -> bool:
    """Return whether `rule` asks for something that the rule `than` does not ask for. This is the
    case if `rule` requires more approvals or other approvers, or names a gate (`Rule.exceeds`) that
    `than` does not name.
    """
    narrows = rule.approvers is not None and rule.approvers != than.approvers
    more = (rule.quorum or 1) > (than.quorum or 1)
    return narrows or more or not set(rule.exceeds) <= set(than.exceeds)


def _includes(wide: Sequence[str] | None, narrow: Sequence[str] | None) -> bool:
    return wide is None or (narrow is not None and set(wide) >= set(narrow))
