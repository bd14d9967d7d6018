"""Conditions on a call's arguments, compiled to functions.

Host side, used by `policy/rules`. Every function returns True, False, or None for in doubt: the
argument is missing, has another type than the value it is compared with, or can be read in two
ways. Invariants: no argument makes a function fail, and each takes at most linear time. Text is
compared by code points, unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from typing import Any, Final, TypeVar, cast

from fumehood.core.arguments import ARGUMENTS
from fumehood.core.hosts import host_matches, host_of
from fumehood.core.json_types import JsonObject
from fumehood.core.names import compile_glob
from fumehood.core.tool import ToolDefinition
from fumehood.core.workspace_path import absolute_path
from fumehood.policy.model import Condition, Predicate

T = TypeVar("T")

Answer = bool | None
"""None is in doubt."""

MAX_LOOKED_AT = 1_000
"""Elements that a `*` condition tests; with more, it is in doubt."""

ABSENT: Final = object()
"""The value at a pointer that leads nowhere."""


def compile_condition(condition: Condition, *, for_every: bool) -> Callable[[JsonObject], Answer]:
    """Compile a condition to a function of the arguments.

    With several elements (`*`) or programs (`runs`) all must hold if `for_every`, else one is
    enough. Without any it is in doubt.
    """
    if condition.runs is not None:
        # Here, because it loads a parser: only where a rule needs it.
        from fumehood.policy.shell import runs

        programs = condition.programs
        return lambda arguments: runs(programs, arguments, for_every=for_every)
    ask, segments = compile_predicate(condition), condition.segments
    if "*" not in segments:
        if len(segments) == 1:
            name = segments[0]
            return lambda arguments: ask(arguments.get(name, ABSENT))
        return lambda arguments: ask(_one(arguments, segments))
    quantify = _every if for_every else any_holds

    def asked(arguments: JsonObject) -> Answer:
        found = _all(arguments, segments)
        return None if found is None else quantify(map(ask, found))

    return asked


def values_at(arguments: JsonObject, segments: Sequence[str]) -> Sequence[Any]:
    """The values at this pointer, without absent ones."""
    return [value for value in _all(arguments, segments) or () if value is not ABSENT]


def why_in_doubt(condition: Condition, tool: ToolDefinition, arguments: JsonObject) -> str:
    """Why the answer to a condition is None."""
    if condition.runs is not None:
        from fumehood.policy.shell import read_call

        return read_call(arguments).doubt or "an argument of the command is not written out"
    if "*" not in condition.segments:
        value = _one(arguments, condition.segments)
        if value is ABSENT:
            return f"{condition.argument} is absent{_instead(condition, tool, arguments)}"
        if isinstance(value, str) and condition.question <= {"path_inside", "host_in", "not"}:
            return f"{condition.argument} cannot be read"
        return f"{condition.argument} is of the type {kind_of(value)}"
    found = _all(arguments, condition.segments)
    if found is None:
        return f"{condition.argument} has more than {MAX_LOOKED_AT} elements"
    return f"{condition.argument} has no elements, or some that cannot be compared"


def _instead(condition: Condition, tool: ToolDefinition, arguments: JsonObject) -> str:
    """The argument that excludes the one which is absent."""
    exclusive = ARGUMENTS[tool.executor].exclusive if tool.executor in ARGUMENTS else ()
    for pair in exclusive:
        for name, other in (pair, reversed(pair)):
            if name == condition.segments[0] and other in arguments:
                return f", this call has {other}"
    return ""


def compile_predicate(predicate: Predicate) -> Callable[[Any], Answer]:
    """Compile a predicate to a function of one value or ABSENT."""
    (question,) = predicate.question
    return _COMPILERS[question](predicate)


def same(left: Any, right: Any) -> bool:
    """Whether two JSON values are equal. True is not 1; 1 is 1.0."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return kind_of(left) == kind_of(right) and bool(left == right)


def kind_of(value: Any) -> str:
    """The name of a JSON value's type; all numbers are one."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, dict) else "array"


def _on_text(test: Callable[[str], Answer]) -> Callable[[Any], Answer]:
    """In doubt for anything but text."""
    return lambda value: test(value) if isinstance(value, str) else None


def _prefix(predicate: Predicate) -> Callable[[Any], Answer]:
    prefix = _given(predicate.prefix)
    return _on_text(lambda text: text.startswith(prefix))


def _glob(predicate: Predicate) -> Callable[[Any], Answer]:
    return _on_text(compile_glob(_given(predicate.glob)))


def _equals(predicate: Predicate) -> Callable[[Any], Answer]:
    return _among((predicate.equals,))


def _one_of(predicate: Predicate) -> Callable[[Any], Answer]:
    return _among(_given(predicate.one_of))


def _among(wanted: Sequence[Any]) -> Callable[[Any], Answer]:
    kinds = frozenset(map(kind_of, wanted))
    if kinds == {"string"}:
        texts = frozenset(wanted)
        return _on_text(lambda text: text in texts)

    def asked(value: Any) -> Answer:
        if value is ABSENT or kind_of(value) not in kinds:
            return None
        return any(same(value, one) for one in wanted)

    return asked


def _range(predicate: Predicate) -> Callable[[Any], Answer]:
    least = predicate.min if predicate.min is not None else float("-inf")
    most = predicate.max if predicate.max is not None else float("inf")

    def asked(value: Any) -> Answer:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return least <= value <= most if value == value else None  # NaN

    return asked


def _path_inside(predicate: Predicate) -> Callable[[Any], Answer]:
    base = _given(absolute_path(_given(predicate.path_inside)))

    def asked(text: str) -> Answer:
        path = absolute_path(text)
        return None if path is None else path[: len(base)] == base

    return _on_text(asked)


def _host_in(predicate: Predicate) -> Callable[[Any], Answer]:
    patterns = _given(predicate.host_in)

    def asked(text: str) -> Answer:
        host = host_of(text)
        return None if host is None else any(host_matches(host, one) for one in patterns)

    return _on_text(asked)


def _missing(predicate: Predicate) -> Callable[[Any], Answer]:
    return lambda value: value is ABSENT


def _not(predicate: Predicate) -> Callable[[Any], Answer]:
    """In doubt stays in doubt."""
    ask = compile_predicate(_given(predicate.not_))

    def asked(value: Any) -> Answer:
        answer = ask(value)
        return None if answer is None else not answer

    return asked


_COMPILERS: dict[str, Callable[[Predicate], Callable[[Any], Answer]]] = {
    "prefix": _prefix,
    "glob": _glob,
    "equals": _equals,
    "in": _one_of,
    "range": _range,
    "path_inside": _path_inside,
    "host_in": _host_in,
    "missing": _missing,
    "not": _not,
}


def _given(value: T | None) -> T:
    """A field that the model's validation guarantees."""
    return cast("T", value)


def any_holds(answers: Iterable[Answer]) -> Answer:
    """True if any is True, False if all are False."""
    outcome: Answer = False
    is_empty = True
    for answer in answers:
        is_empty = False
        if answer:
            return True
        if answer is None:
            outcome = None
    return None if is_empty else outcome


def _every(answers: Iterable[Answer]) -> Answer:
    """True if all are True, False if any is False."""
    outcome: Answer = True
    is_empty = True
    for answer in answers:
        is_empty = False
        if answer is False:
            return False
        if answer is None:
            outcome = None
    return None if is_empty else outcome


def _one(arguments: Any, segments: Sequence[str]) -> Any:
    value = arguments
    for segment in segments:
        value = _step(value, segment)
        if value is ABSENT:
            return ABSENT
    return value


def _all(arguments: Any, segments: Sequence[str]) -> list[Any] | None:
    """The values at a pointer with `*`; None if there are too many.

    An element without a value at the rest of the pointer counts as ABSENT, and so does a value that
    is neither list nor object.
    """
    values: list[Any] = [arguments]
    for segment in segments:
        if segment == "*":
            elements = [_elements(value) for value in values]
            if sum(map(len, elements)) > MAX_LOOKED_AT:
                return None
            values = list(chain.from_iterable(elements))
        else:
            values = [_step(value, segment) for value in values]
    return values


def _elements(value: Any) -> Collection[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else (ABSENT,)


def _step(value: Any, segment: str) -> Any:
    if isinstance(value, dict):
        return value.get(segment, ABSENT)
    if isinstance(value, list) and segment.isascii() and segment.isdigit():
        is_index = segment == "0" or not segment.startswith("0")
        # Longer than any list; Python converts a limited number of digits only.
        if is_index and len(segment) < 10 and int(segment) < len(value):
            return value[int(segment)]
    return ABSENT
