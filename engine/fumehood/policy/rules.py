"""Rules and their conditions, compiled to functions.

Host side, used by `policy/service`. Tests of the tool and the engine (`of_tool`) run only once for
each tool, so they are separate from tests of the call (`of_call`). A test of arguments returns
True, False, or None for "in doubt". It is in doubt if the argument is missing or ambiguous, or has
another type than the value with which it is compared. Invariants: in doubt, a rule that denies or
asks matches, and a rule that allows does not match; no argument makes a test raise an error; each
test takes at most linear time. Texts are compared by code points, without normalization.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, Final, TypeVar, cast

from fumehood.core.hosts import host_matches, host_of
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Grade
from fumehood.core.long_text import cut
from fumehood.core.names import compile_glob
from fumehood.core.tool import ToolDefinition
from fumehood.core.workspace_path import absolute_path
from fumehood.policy.model import (
    Answer,
    CallFacts,
    CheckedPart,
    Condition,
    ExplainedRule,
    Predicate,
    Rule,
    Verdict,
)
from fumehood.registry.arguments import arguments_of

T = TypeVar("T")

MAX_LOOKED_AT = 1_000
"""Maximum number of elements that a condition with `*` tests. If an argument has more elements, the
condition is in doubt."""

MAX_SHOWN = 200
"""Maximum number of characters of the compared values in an explanation. Longer texts are cut
off."""

ABSENT: Final = object()
"""Stands for the value at a pointer if the call has no such argument."""


@dataclass(frozen=True, slots=True)
class OfTool:
    """A test of a rule whose result depends only on the tool and the engine, not on the call.
    `says` is the test's description in explanations, and `ask` is the function that performs the
    test.
    """

    says: str
    ask: Callable[[ToolDefinition], bool]


@dataclass(frozen=True, slots=True)
class OfCall:
    """A test of a rule whose result depends on the call. `says` is the test's description in
    explanations, and `ask` is the function that performs the test.
    """

    says: str
    ask: Callable[[CallFacts], Answer]
    conditions: tuple[Condition, ...] = ()
    """The conditions on arguments that the test evaluates. Empty if the test evaluates none."""


@dataclass(frozen=True, slots=True)
class CompiledRule:
    """A rule, compiled to functions that test a tool (`of_tool`) and a call (`of_call`)."""

    rule: Rule
    line: int | None
    of_tool: tuple[OfTool, ...]
    of_call: tuple[OfCall, ...]
    in_doubt: bool
    """How a test that is in doubt counts: True if the rule denies or asks, False if it allows."""

    def is_about(self, tool: ToolDefinition) -> bool:
        """Return whether the rule can match calls of this tool."""
        return all(question.ask(tool) for question in self.of_tool)

    def matches(self, facts: CallFacts) -> bool:
        """Return whether the rule matches the call. `is_about` must be True for the call's tool."""
        in_doubt = self.in_doubt
        for question in self.of_call:
            answer = question.ask(facts)
            if not (in_doubt if answer is None else answer):
                return False
        return True

    def doubt(self, facts: CallFacts) -> str | None:
        """Return a clause that says which conditions of the rule are in doubt, and why. Return None
        if no condition is in doubt.

        A condition is in doubt if it is neither true nor false for the call. The caller must pass a
        call that the rule matches.
        """
        for question in self.of_call:
            if question.conditions and question.ask(facts) is None:
                return "; ".join(
                    why_in_doubt(condition, facts.tool, facts.arguments)
                    for condition in question.conditions
                    if compile_condition(condition, for_every=False)(facts.arguments) is None
                )
        return None

    def explained(self, facts: CallFacts) -> ExplainedRule:
        """Return whether the rule matches a call, and the result of each test of the rule."""
        parts = [CheckedPart(says=test.says, holds=test.ask(facts.tool)) for test in self.of_tool]
        parts += [
            CheckedPart(
                says=test.says,
                holds=test.ask(facts),
                compared=_compared(test.conditions, facts),
            )
            for test in self.of_call
        ]
        return ExplainedRule(
            id=self.rule.id,
            decision=self.rule.decision,
            mode=self.rule.mode,
            line=self.line,
            matches=self.is_about(facts.tool) and self.matches(facts),
            parts=tuple(parts),
        )


def compile_rule(rule: Rule, line: int | None, environment: str) -> CompiledRule:
    """Compile a rule for an engine in this environment. `line` is the rule's line in the policy
    file, or None.
    """
    return CompiledRule(
        rule=rule,
        line=line,
        of_tool=tuple(_of_tool(rule, environment)),
        of_call=tuple(_of_call(rule)),
        in_doubt=rule.decision is not Verdict.ALLOW,
    )


def names_exactly(pattern: str) -> bool:
    """Return whether a pattern in a rule's `tools` contains an exact tool name, that is, no `*` in
    the name. The version in the pattern may contain a `*`.
    """
    return "*" not in pattern.partition("@")[0]


def compile_tool(pattern: str) -> Callable[[str, str], bool]:
    """Compile a pattern in a rule's `tools` to a function that tests a tool's name and version."""
    name, at, version = pattern.partition("@")
    fits_name = compile_glob(name)
    if not at:
        return lambda tool, _: fits_name(tool)
    fits_version = compile_glob(version)
    return lambda tool, of_version: fits_name(tool) and fits_version(of_version)


def _of_tool(rule: Rule, environment: str) -> Iterable[OfTool]:
    if rule.environments is not None:
        is_here = environment in rule.environments
        yield OfTool(f"environments {_listed(rule.environments)}", lambda _: is_here)
    if rule.tools is not None:
        yield OfTool(f"tools {_listed(rule.tools)}", _any_tool(rule.tools))
    if rule.decision is Verdict.ALLOW:
        exact = _any_tool(tuple(filter(names_exactly, rule.tools or ())))
        yield OfTool(
            "a tool that is not dangerous, or named exactly in tools",
            lambda tool: not tool.dangerous or exact(tool),
        )
    for name in ("dangerous", "read_only", "sandboxed"):
        wanted = getattr(rule, name)
        if wanted is not None:
            yield OfTool(f"{name} = {str(wanted).lower()}", _has_flag(name, wanted=wanted))
    if (categories := rule.categories) is not None:
        yield OfTool(f"categories {_listed(categories)}", lambda tool: tool.category in categories)
    if (tags := rule.tags) is not None:
        yield OfTool(f"tags {_listed(tags)}", lambda tool: any(tag in tags for tag in tool.tags))
    if (cost := rule.cost_over) is not None:
        yield OfTool(f"cost_over {cost}", lambda tool: tool.cost_per_use > cost)


ALSO: Mapping[str, str] = MappingProxyType({"start_process": "run_shell"})
"""Tool → another tool whose rules also apply to the first one. For example, starting a process also
means running a shell command."""


def names_for(tool: ToolDefinition) -> tuple[str, ...]:
    """Return the names by which rules can refer to a tool. These are its own name and, if `ALSO`
    has an entry for the tool, the name of the tool whose rules also apply to it.
    """
    return (tool.name, ALSO[tool.name]) if tool.name in ALSO else (tool.name,)


def _any_tool(patterns: tuple[str, ...]) -> Callable[[ToolDefinition], bool]:
    tests = tuple(map(compile_tool, patterns))

    return lambda tool: any(test(name, tool.version) for name in names_for(tool) for test in tests)


def _has_flag(name: str, *, wanted: bool) -> Callable[[ToolDefinition], bool]:
    return lambda tool: getattr(tool, name) is wanted


def _of_call(rule: Rule) -> Iterable[OfCall]:
    if rule.principals is not None:
        is_named = _any_name(rule.principals)
        yield OfCall(
            f"principals {_listed(rule.principals)}", lambda facts: is_named(facts.principal_id)
        )
    if rule.agents is not None:
        is_agent = _any_name(rule.agents)
        yield OfCall(
            f"agents {_listed(rule.agents)}",
            lambda facts: facts.agent_id is not None and is_agent(facts.agent_id),
        )
    is_allow = rule.decision is Verdict.ALLOW
    for condition in rule.when:
        yield _of_arguments("", (condition,), for_every=is_allow)
    if rule.any is not None:
        yield _of_arguments("any of: ", rule.any, for_every=is_allow)
    for key in rule.exceeds:
        yield OfCall(key, partial(_exceeds, key))
    # The last test, because a call that it alone excludes is kept from weaker containers.
    if (below := rule.grade_below) is not None:
        yield OfCall(f"grade_below {below}", partial(_is_weaker, below, binds=rule.is_enforced))


def _is_weaker(below: Grade, facts: CallFacts, *, binds: bool) -> Answer:
    answer = facts.is_weaker(below)
    if binds and answer is False:
        facts.bind(below)
    return answer


def _exceeds(key: str, facts: CallFacts) -> bool:
    return facts.exceeds(key)


def _of_arguments(words: str, conditions: tuple[Condition, ...], *, for_every: bool) -> OfCall:
    """Return a test that holds if at least one of these conditions holds. The test's description
    consists of `words` and the conditions.

    With `for_every`, a condition on several elements (`*`) holds only if all elements meet it.
    Otherwise, one element is enough.
    """
    asks = [compile_condition(condition, for_every=for_every) for condition in conditions]
    says = words + "; ".join(f"{condition.name} {_words(condition)}" for condition in conditions)
    if len(asks) == 1:
        ask = asks[0]
        return OfCall(says, lambda facts: ask(facts.arguments), conditions)
    return OfCall(says, lambda facts: any_holds(ask(facts.arguments) for ask in asks), conditions)


def _compared(conditions: Sequence[Condition], facts: CallFacts) -> str | None:
    """Return the values that the conditions test, including defaults, as shortened JSON. Return
    None if the call has none of the tested arguments.
    """
    places = [place for condition in conditions for place in condition.places]
    found = [value for place in places for value in _all(facts.arguments, place) or ()]
    text = ", ".join(json.dumps(value, default=str) for value in found if value is not ABSENT)
    return cut(text, MAX_SHOWN) or None


def _any_name(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    exact = frozenset(pattern for pattern in patterns if "*" not in pattern)
    globs = tuple(compile_glob(pattern) for pattern in patterns if "*" in pattern)
    if not globs:
        return exact.__contains__
    return lambda name: name in exact or any(fits(name) for fits in globs)


def _words(predicate: Predicate) -> str:
    """Return a predicate as text, in a form similar to that in the policy file."""
    if predicate.not_ is not None:
        return f"not {_words(predicate.not_)}"
    written = predicate.model_dump(
        mode="json", by_alias=True, exclude_unset=True, exclude={"argument"}
    )
    return ", ".join(f"{name} {value!r}" for name, value in written.items())


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


# -- conditions on arguments ------------------------------------------------------------------


def compile_condition(condition: Condition, *, for_every: bool) -> Callable[[JsonObject], Answer]:
    """Compile a condition to a function of a call's arguments.

    A condition on several elements (`*`) holds if at least one element meets it. With `for_every`,
    it holds only if all elements meet it. If there are no elements, the condition is in doubt.
    """
    if condition.of_part is not None:
        return condition.of_part.compiled(for_every=for_every)
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


def why_in_doubt(condition: Condition, tool: ToolDefinition, arguments: JsonObject) -> str:
    """Return a clause that explains why a condition is in doubt, that is, neither true nor false,
    for a call with these arguments.
    """
    if condition.of_part is not None:
        return condition.of_part.why_in_doubt(arguments)
    if "*" not in condition.segments:
        value = _one(arguments, condition.segments)
        if value is ABSENT:
            return f"{condition.argument} is absent{_instead(condition, tool, arguments)}"
        if isinstance(value, str) and condition.question <= {"path_inside", "host_in", "not"}:
            return f"{condition.argument} cannot be parsed"
        return f"{condition.argument} has the type {kind_of(value)}"
    found = _all(arguments, condition.segments)
    if found is None:
        return f"{condition.argument} has more than {MAX_LOOKED_AT} elements"
    return f"{condition.argument} has no elements, or some that cannot be compared"


def _instead(condition: Condition, tool: ToolDefinition, arguments: JsonObject) -> str:
    """Return a clause such as ", this call has argv", or "" if there is nothing to say.

    The caller must have found that the argument that the condition tests is absent. If the call has
    another argument that excludes the tested one, the clause names it.
    """
    model = arguments_of(tool.executor)
    for pair in model.exclusive if model is not None else ():
        for name, other in (pair, reversed(pair)):
            if name == condition.segments[0] and other in arguments:
                return f", this call has {other}"
    return ""


def compile_predicate(predicate: Predicate) -> Callable[[Any], Answer]:
    """Compile a predicate to a function that tests one value. The function's argument is ABSENT if
    the call has no such value.
    """
    (question,) = predicate.question
    return _COMPILERS[question](predicate)


def same(left: Any, right: Any) -> bool:
    """Return whether two JSON values are equal. `true` differs from 1, and 1 equals 1.0."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return kind_of(left) == kind_of(right) and bool(left == right)


def kind_of(value: Any) -> str:
    """Return the name of a JSON value's type. Integers and other numbers are both named
    `number`.
    """
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
    """Extend a test of texts to a test of any value. For a value that is not a text, the result is
    None (in doubt).
    """
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
        return any(same(value, candidate) for candidate in wanted)

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
        return None if host is None else any(host_matches(host, each) for each in patterns)

    return _on_text(asked)


def _missing(predicate: Predicate) -> Callable[[Any], Answer]:
    return lambda value: value is ABSENT


def _not(predicate: Predicate) -> Callable[[Any], Answer]:
    """Return a function that negates the test in a predicate's key `not`. If the test returns None
    (in doubt), the function returns None as well.
    """
    ask = compile_predicate(_given(predicate.not_))
    return lambda value: _negated(ask(value))


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
    """Return the value of a field. The validation of the model guarantees that the value is not
    None.
    """
    return cast("T", value)


def any_holds(answers: Iterable[Answer]) -> Answer:
    """Return True if any answer is True, False if all answers are False, and None otherwise.
    Without any answers, return None.
    """
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
    """Return False if any answer is False, True if all answers are True, and None otherwise.
    Without any answers, return None.
    """
    return _negated(any_holds(map(_negated, answers)))


def _negated(answer: Answer) -> Answer:
    return None if answer is None else not answer


def _one(arguments: Any, segments: Sequence[str]) -> Any:
    value = arguments
    for segment in segments:
        value = _step(value, segment)
        if value is ABSENT:
            return ABSENT
    return value


def _all(arguments: Any, segments: Sequence[str]) -> list[Any] | None:
    """Return the values at the path `segments`, which contains `*`. Return None if the `*` match
    more than `MAX_LOOKED_AT` elements.

    A missing value is represented by ABSENT. A value is missing if an element does not contain the
    rest of the path, or if the value at `*` is neither a list nor an object.
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
        # A longer index exceeds any list, and Python refuses to convert very many digits.
        if is_index and len(segment) < 10 and int(segment) < len(value):
            return value[int(segment)]
    return ABSENT
