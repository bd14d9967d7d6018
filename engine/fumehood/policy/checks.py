"""Faults of a policy as a whole: an unknown tool or argument, and rules that never decide.

Host side, used by `policy/loader` for rules that are valid by themselves. A dead rule is worse than
no rule, because its author relies on it. Other rules that no call can satisfy are not looked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from fumehood.core.names import EXTERNAL, compile_glob, suggestion
from fumehood.core.tool import ToolDefinition
from fumehood.policy.model import Condition, Rule, Verdict
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
    versions: dict[str, list[str]] = defaultdict(list)
    for name, version in names:
        versions[name].append(version)
    for number, rule in enumerate(rules):
        is_known = _check_tools(number, rule, versions, report, coming)
        is_checked = is_known and len(definitions) == len(names) and not _names_external(rule)
        if is_checked and definitions:
            _check_definitions(number, rule, definitions, report)
    _check_shadowed(rules, report)


def _is_registered(pattern: str, versions: Mapping[str, Sequence[str]]) -> bool:
    """Whether an entry of `tools` matches any version of any tool."""
    name, _, version = pattern.partition("@")
    if name.startswith(EXTERNAL):
        return True  # it need not be declared
    if not names_exactly(pattern):
        fits = compile_tool(pattern)
        return any(fits(name, one) for name, all_ in versions.items() for one in all_)
    return any(map(compile_glob(version or "*"), versions.get(name, ())))


def _names_external(rule: Rule) -> bool:
    """Whether it is about tools of which nothing is known."""
    return any(pattern.startswith(EXTERNAL) for pattern in rule.tools or ())


def _check_tools(
    number: int,
    rule: Rule,
    versions: Mapping[str, Sequence[str]],
    report: Report,
    coming: tuple[str, ...],
) -> bool:
    """Whether every entry of `tools` matches a registered tool."""
    unknown = [pattern for pattern in rule.tools or () if not _is_registered(pattern, versions)]
    for pattern in unknown:
        name = pattern.partition("@")[0]
        if name.startswith(coming):
            continue
        if name in versions:
            known = ", ".join(sorted(versions[name])[:10])
            hint = f"; {name} has {known}"
        else:
            hint = suggestion(name, versions)
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
    compiled = compile_rule(rule.model_copy(update={"environments": None}), None, "")
    meant = [tool for tool in definitions if compiled.is_about(tool)]
    if not meant:
        return
    for place, condition in _conditions(rule):
        if not any(takes(tool, path) for tool in meant for path in condition.places):
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
    lists = ("agents", "principals", "environments", "categories", "tags")
    values = ("dangerous", "read_only", "sandboxed", "cost_over")
    return (
        all(_is_wider(getattr(one, key), getattr(other, key)) for key in lists)
        and all(getattr(one, key) in (None, getattr(other, key)) for key in values)
        and _covers_tools(one, other)
    )


def _covers_tools(one: Rule, other: Rule) -> bool:
    if one.decision is Verdict.ALLOW:  # its patterns allow no dangerous tools
        return one.tools is not None and {*one.tools} >= {*(other.tools or ("",))}
    if one.tools is None or other.tools is None:
        return one.tools is None
    texts = ((pattern, pattern.partition("@")[0]) for pattern in other.tools)
    return all(any(_is_wider(one.tools, [text]) for text in pair) for pair in texts)


def _is_wider(wide: Sequence[str] | None, narrow: Sequence[str] | None) -> bool:
    """Whether one list covers every name in the other. A `*` is within a `*`."""
    if wide is None:
        return True
    if narrow is None:
        return False
    rest = [name for name in narrow if name not in wide]
    globs = [one for one in wide if "*" in one] if rest else ()
    return all(any(compile_glob(one)(name) for one in globs) for name in rest)
