"""Faults of a policy as a whole, and notices about rules that may not be meant.

Host side, used by `policy/loader` for rules that are valid by themselves. A dead rule is worse than
no rule, because its author relies on it. So these are faults: a tool or argument that does not
exist, conditions that exclude each other, and a rule that other rules leave nothing to decide.
Other unsatisfiable conditions are not looked for.

Notices go to `fumehood policy check` only; the rules apply as written. A condition in doubt counts
as true for rules that deny or ask, so such a rule matches every call of a tool that lacks its
argument. A rule that allows does not allow dangerous tools by pattern.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fumehood.core.names import EXTERNAL, compile_glob, suggestion
from fumehood.core.tool import ToolDefinition
from fumehood.policy.model import Condition, Predicate, Rule, Verdict
from fumehood.policy.predicates import compile_predicate
from fumehood.policy.rules import compile_rule, compile_tool, names_exactly

Place = tuple[str | int, ...]
Report = Callable[[int, Place, str], None]
"""Takes the rule's number, the place in the rule, and the fault."""

_STRICTNESS = {Verdict.ALLOW: 0, Verdict.ASK: 1, Verdict.DENY: 2}


def check_rules(
    rules: Sequence[Rule],
    names: Collection[tuple[str, str]],
    definitions: Collection[ToolDefinition],
    report: Report,
    coming: tuple[str, ...] = (),
) -> None:
    """Report every fault of the rules among themselves and against the tools.

    `names` has the name and version of every tool, `coming` how those begin of tools that are
    listed later: a rule that names one is not checked against the tools. Without `definitions`,
    the tools' categories, tags and arguments are not checked.
    """
    tools = _Tools(names, definitions)
    for number, rule in enumerate(rules):
        is_known = _check_tools(number, rule, tools, report, coming)
        is_checked = is_known and len(definitions) == len(names) and not _names_external(rule)
        if is_checked and definitions:
            _check_definitions(number, rule, definitions, report)
        _check_contradictions(number, rule, report)
    _check_shadowed(rules, report)


class _Tools:
    """The registered tools, by name."""

    def __init__(
        self, names: Collection[tuple[str, str]], definitions: Collection[ToolDefinition]
    ) -> None:
        self.versions: dict[str, list[str]] = defaultdict(list)
        for name, version in names:
            self.versions[name].append(version)

    def has(self, pattern: str) -> bool:
        """Whether an entry of `tools` matches any of them."""
        name, _, version = pattern.partition("@")
        if name.startswith(EXTERNAL):
            return True  # it need not be declared
        if not names_exactly(pattern):
            fits = compile_tool(pattern)
            return any(fits(name, one) for name, all_ in self.versions.items() for one in all_)
        fits_version = compile_glob(version or "*")
        return any(map(fits_version, self.versions.get(name, ())))


def _names_external(rule: Rule) -> bool:
    """Whether it is about tools of which nothing is known."""
    return any(pattern.startswith(EXTERNAL) for pattern in rule.tools or ())


def _check_tools(
    number: int, rule: Rule, tools: _Tools, report: Report, coming: tuple[str, ...]
) -> bool:
    """Whether every entry of `tools` matches a registered tool."""
    unknown = [pattern for pattern in rule.tools or () if not tools.has(pattern)]
    for pattern in unknown:
        name = pattern.partition("@")[0]
        if name.startswith(coming):
            continue
        if name in tools.versions:
            known = ", ".join(sorted(tools.versions[name])[:10])
            hint = f"; {name} has {known}"
        else:
            hint = suggestion(name, tools.versions)
        report(number, ("tools",), f"no registered tool matches {pattern!a}{hint}")
    return not unknown


def _check_definitions(
    number: int, rule: Rule, definitions: Collection[ToolDefinition], report: Report
) -> None:
    for key, known in (
        ("categories", {tool.category for tool in definitions if tool.category is not None}),
        ("tags", {tag for tool in definitions for tag in tool.tags}),
    ):
        for name in getattr(rule, key) or ():
            if name not in known:
                words = (
                    f"no registered tool has {name[:80]!a} in its {key}{suggestion(name, known)}"
                )
                report(number, (key,), words)
    meant = list(meant_tools(rule, definitions))
    if not meant:
        if rule.tools is not None and all(map(names_exactly, rule.tools)):
            report(
                number,
                ("tools",),
                "it can never match: none of these tools meets its other conditions",
            )
        return
    for place, condition in _conditions(rule):
        if not any(_takes_one(tool, condition) for tool in meant):
            known_names = {name for tool in meant for name in tool.parameters.get("properties", {})}
            words = (
                f"no tool that the rule matches takes {_argument(condition)}"
                f"{suggestion(condition.segments[0], known_names)}"
            )
            key = "argument" if condition.runs is None else "runs"
            report(number, (*place, key), words)


def _conditions(rule: Rule) -> Iterator[tuple[Place, Condition]]:
    """Each condition on arguments, with its place in the rule."""
    for key, conditions in (("when", rule.when), ("any", rule.any or ())):
        for position, condition in enumerate(conditions):
            yield (key, position), condition


def _argument(condition: Condition) -> str:
    if condition.runs is not None:
        return "a 'command' or 'argv'"
    return f"the argument {condition.argument[:80]!a}"


def _takes_one(tool: ToolDefinition, condition: Condition) -> bool:
    return any(takes(tool, place) for place in condition.places)


def meant_tools(rule: Rule, definitions: Collection[ToolDefinition]) -> Iterator[ToolDefinition]:
    """The registered tools that the rule applies to in any environment."""
    compiled = compile_rule(rule.model_copy(update={"environments": None}), None, "")
    return (tool for tool in definitions if compiled.is_about(tool))


def takes(tool: ToolDefinition, segments: Sequence[str]) -> bool:
    """Whether the tool accepts such an argument; True if its schema does not say."""
    schema: Any = tool.parameters
    for segment in segments:
        if not isinstance(schema, Mapping) or not _is_plain(schema):
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
_NOT_PLAIN = frozenset({
    "$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else",
    "patternProperties", "additionalProperties", "prefixItems", "dependentSchemas",
})  # fmt: skip


def _is_plain(schema: Mapping[str, Any]) -> bool:
    """Whether `properties` is complete. Keywords that add more are not followed."""
    return all(schema.get(key) is False for key in _NOT_PLAIN & schema.keys())


def _check_contradictions(number: int, rule: Rule, report: Report) -> None:
    """Report conditions on one argument that are equal or exclude each other."""
    for position, condition in enumerate(rule.when):
        for other in rule.when[:position]:
            if condition == other:
                report(number, ("when", position), "it is written twice")
            elif condition.argument == other.argument != "" and _exclude(condition, other, rule):
                words = "no value can satisfy this condition and an earlier one on the argument"
                report(number, ("when", position), words)


def _exclude(one: Condition, other: Condition, rule: Rule) -> bool:
    if "*" in one.segments and rule.decision is not Verdict.ALLOW:
        return False  # different elements may be meant
    return no_value_satisfies(one, other)


def no_value_satisfies(one: Predicate, other: Predicate) -> bool:
    """Whether two lists of values have none in common, or two ranges do not meet."""
    questions = one.question | other.question
    if questions <= {"equals", "in"}:
        is_other = compile_predicate(other)
        return not any(is_other(value) for value in one.one_of or (one.equals,))
    return questions == {"range"} and (_is_below(one, other) or _is_below(other, one))


def _is_below(one: Predicate, other: Predicate) -> bool:
    return one.max is not None and other.min is not None and one.max < other.min


def _check_shadowed(rules: Sequence[Rule], report: Report) -> None:
    """Report rules that never decide, because another rule always does."""
    of_any = [n for n, rule in enumerate(rules) if rule.is_enforced and not _exact_names(rule)]
    by_name: dict[str, list[int]] = defaultdict(list)
    for number, rule in enumerate(rules):
        if rule.is_enforced:
            for name in _exact_names(rule):
                by_name[name].append(number)
    for number, rule in enumerate(rules):
        near = by_name[min(_exact_names(rule))] if _exact_names(rule) else ()
        for other in (*of_any, *near) if rule.is_enforced else ():
            if other != number and _leaves_nothing(rules[other], other, rule, number):
                words = f"it can never decide: the rule {rules[other].id} always decides first"
                report(number, (), words)
                break


def _exact_names(rule: Rule) -> frozenset[str]:
    """The tool names in `tools`, if all of them are exact."""
    tools = rule.tools or ()
    if not all(map(names_exactly, tools)):
        return frozenset()
    return frozenset(pattern.partition("@")[0] for pattern in tools)


def _leaves_nothing(one: Rule, at: int, other: Rule, number: int) -> bool:
    """Whether `one` decides every call that `other` would decide."""
    stricter = _STRICTNESS[one.decision] - _STRICTNESS[other.decision]
    if stricter < 0 or (stricter == 0 and at > number):
        return False
    if not one.is_unconditional and _tests(one) != _tests(other):
        return False
    if stricter == 0 and one.decision is Verdict.ASK and _asks_more(other, one):
        return False
    return _covers(one, other)


def _tests(rule: Rule) -> tuple[object, ...]:
    return rule.when, rule.any, rule.over_budget


def _asks_more(rule: Rule, than: Rule) -> bool:
    """Whether it asks for other or more approvers than the other rule."""
    narrows = rule.approvers is not None and rule.approvers != than.approvers
    more = (rule.quorum or 1) > (than.quorum or 1)
    return narrows or more or bool(rule.over_budget and not than.over_budget)


def _covers(one: Rule, other: Rule) -> bool:
    """Whether `one` is at least as wide as `other`, conditions aside."""
    return (
        _is_wider(one.agents, other.agents)
        and _is_wider(one.principals, other.principals)
        and _is_wider(one.environments, other.environments)
        and _is_wider(one.categories, other.categories)
        and _is_wider(one.tags, other.tags)
        and all(
            getattr(one, flag) is None or getattr(one, flag) is getattr(other, flag)
            for flag in ("dangerous", "read_only", "sandboxed")
        )
        and (
            one.cost_over is None
            or (other.cost_over is not None and other.cost_over >= one.cost_over)
        )
        and _covers_tools(one, other)
    )


def _covers_tools(one: Rule, other: Rule) -> bool:
    if one.decision is Verdict.ALLOW and other.names_a_tool and other.dangerous is not False:
        # A pattern does not allow a dangerous tool, an exact name does.
        exact = tuple(filter(names_exactly, one.tools or ()))
        return bool(exact) and _all_within(exact, other.tools or ())
    return one.tools is None or (other.tools is not None and _all_within(one.tools, other.tools))


def _all_within(wide: Iterable[str], narrow: Iterable[str]) -> bool:
    """Whether each entry of `tools` in one list is within an entry of the other."""
    tests = [
        (compile_glob(name), at, compile_glob(version)) for name, at, version in map(_split, wide)
    ]
    return all(
        any(
            fits_name(name) and (not wide_at or (bool(at) and fits_version(version)))
            for fits_name, wide_at, fits_version in tests
        )
        for name, at, version in map(_split, narrow)
    )


def _split(pattern: str) -> tuple[str, str, str]:
    return pattern.partition("@")


def _is_wider(wide: Sequence[str] | None, narrow: Sequence[str] | None) -> bool:
    """Whether one list covers every name in the other. A `*` is within a `*`."""
    if wide is None:
        return True
    if narrow is None:
        return False
    rest = [name for name in narrow if name not in wide]
    globs = [one for one in wide if "*" in one] if rest else ()
    return all(any(compile_glob(one)(name) for one in globs) for name in rest)


MAX_NAMED = 3
"""Tools that one notice names."""


def note_rules(
    rules: Sequence[Rule], definitions: Collection[ToolDefinition], note: Report
) -> None:
    """Report every notice. The rules are valid."""
    for number, rule in enumerate(rules):
        for place, words in _of_patterns(rule, definitions):
            note(number, place, words)
        for place, words in _of_arguments(rule, definitions):
            note(number, place, words)


def _of_patterns(
    rule: Rule, definitions: Collection[ToolDefinition]
) -> Iterator[tuple[Place, str]]:
    """Dangerous tools that an allowing rule names only by a pattern."""
    if rule.decision is not Verdict.ALLOW or rule.tools is None:
        return
    # A denying rule covers the same tools, and dangerous ones by pattern too.
    named = list(meant_tools(rule.model_copy(update={"decision": Verdict.DENY}), definitions))
    allowed = list(meant_tools(rule, definitions))
    left_out = [tool for tool in named if tool not in allowed]
    if left_out:
        nothing = "" if allowed else " (it allows nothing)"
        words = "an entry with '*' does not allow dangerous tools, so the rule does not allow "
        cure = "to allow it, put its exact name into tools"
        yield ("tools",), f"{words}{_names(left_out)}{nothing}; {cure}"


def _of_arguments(
    rule: Rule, definitions: Collection[ToolDefinition]
) -> Iterator[tuple[Place, str]]:
    """Tools that lack an argument of a rule that denies or asks."""
    if rule.decision is Verdict.ALLOW or rule.is_unconditional:
        return
    meant = list(meant_tools(rule, definitions))
    for place, condition in _conditions(rule):
        lacking = [tool for tool in meant if not _takes_one(tool, condition)]
        if lacking and not _asks_for_absence(condition):
            lacked = _argument(condition).removeprefix("the ").removeprefix("a ")
            words = (
                f"{_named(lacking)} takes no {lacked}, so the "
                "condition is always in doubt, and counts as true for every call of it"
            )
            yield place, words


def _asks_for_absence(condition: Predicate) -> bool:
    innermost = condition if condition.not_ is None else condition.not_
    return "missing" in innermost.question


def _named(tools: Sequence[ToolDefinition]) -> str:
    names = _names(tools)
    return f"{names}: each" if names.endswith(" more tools") else names


def _names(tools: Sequence[ToolDefinition]) -> str:
    names = list(dict.fromkeys(tool.name for tool in tools))
    more = len(names) - MAX_NAMED
    shown = ", ".join(names[:MAX_NAMED])
    return f"{shown} and {more} more tools" if more > 0 else shown
