"""What is allowed in a policy, and was perhaps not meant: rules that match where nobody knows.

Host side, asked by `fumehood policy check`. A rule that denies or asks takes what is in doubt for
yes. So one that is about a tool without its argument matches every call of that tool, and one
whose condition no value satisfies matches just the calls that do not say. One that allows a
dangerous tool by a pattern does not allow it. Nothing is refused here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from fumehood.core.tool import ToolDefinition
from fumehood.policy.contradictions import no_value_satisfies
from fumehood.policy.decision import Verdict
from fumehood.policy.faults import Place, Report, meant_tools
from fumehood.policy.model import Condition, Rule
from fumehood.policy.reach import answers_of, place_of, takes_in_words

MAX_NAMED = 3
"""Tools of which one notice writes out the names."""


def note_rules(
    rules: Sequence[Rule], definitions: Collection[ToolDefinition], note: Report
) -> None:
    """Tell everything of this kind. The rules are sound otherwise."""
    for number, rule in enumerate(rules):
        for place, words in _of_patterns(rule, definitions):
            note(number, place, words)
        if rule.when:
            meant = list(meant_tools(rule, definitions))
            for place, words in _of_rule(rule, meant):
                note(number, place, words)


def _of_patterns(
    rule: Rule, definitions: Collection[ToolDefinition]
) -> Iterator[tuple[Place, str]]:
    """The dangerous tools that a rule which allows names by `*` alone."""
    if rule.decision is not Verdict.ALLOW or rule.tools is None:
        return
    # A rule that denies has the same tools, but for those that have to be written out.
    named = list(meant_tools(rule.model_copy(update={"decision": Verdict.DENY}), definitions))
    allowed = list(meant_tools(rule, definitions))
    left_out = [tool for tool in named if tool not in allowed]
    if left_out:
        nothing = "" if allowed else " (it allows nothing)"
        words = "a dangerous tool is not allowed by an entry with '*', so the rule does not allow "
        cure = "to allow it, write its name out in tools"
        yield ("tools",), f"{words}{_names(left_out)}{nothing}; {cure}"


def _of_rule(rule: Rule, meant: Sequence[ToolDefinition]) -> Iterator[tuple[Place, str]]:
    if rule.decision is Verdict.ALLOW:
        if meant and all(_never_allows(rule, tool) for tool in meant):
            yield ("when",), "no call of a tool that there is now can satisfy all conditions"
        return
    reached = [tool for tool in meant if not _is_never(rule, tool)]
    for position, condition in enumerate(rule.when):
        where = ("when", position)
        if any(_only_in_doubt(condition, other) for other in rule.when[:position]):
            words = "no value satisfies this condition and an earlier one on the argument; only "
            yield where, f"{words}calls match of which it is in doubt"
        for words, tools in _in_doubt(condition, reached).items():
            yield where, f"{_named(tools)} {words}"


def _never_allows(rule: Rule, tool: ToolDefinition) -> bool:
    return any(True not in answers_of(condition, tool) for condition in rule.when)


def _is_never(rule: Rule, tool: ToolDefinition) -> bool:
    return any(answers_of(condition, tool) == {False} for condition in rule.when)


def _only_in_doubt(one: Condition, other: Condition) -> bool:
    is_same = one.argument == other.argument and "*" not in one.segments
    return is_same and no_value_satisfies(one, other)


def _in_doubt(
    condition: Condition, tools: Sequence[ToolDefinition]
) -> dict[str, list[ToolDefinition]]:
    """What is to be said, and of which tools."""
    said: dict[str, list[ToolDefinition]] = {}
    for tool in tools:
        words = _words(condition, tool)
        if words is not None:
            said.setdefault(words, []).append(tool)
    return said


def _words(condition: Condition, tool: ToolDefinition) -> str | None:
    answers, place = answers_of(condition, tool), place_of(tool, condition.segments)
    if place is None or True in answers or None not in answers:
        return None
    argument = ascii(condition.argument[:80])
    if place.schema is None:
        return (
            f"takes no argument {argument}, so the condition is always in doubt, and holds for "
            "every call of it"
        )
    takes = takes_in_words(place.schema)
    if answers == {None}:
        return (
            f"takes {takes} as {argument}, so the condition is always in doubt, and holds for "
            "every call of it"
        )
    return (
        f"takes {takes} as {argument}, which never satisfies the condition; it holds only where "
        "the argument is left out or in doubt"
    )


def _named(tools: Sequence[ToolDefinition]) -> str:
    names = _names(tools)
    return f"{names}: each" if names.endswith(" more tools") else names


def _names(tools: Sequence[ToolDefinition]) -> str:
    names = list(dict.fromkeys(tool.name for tool in tools))
    more = len(names) - MAX_NAMED
    shown = ", ".join(names[:MAX_NAMED])
    return f"{shown} and {more} more tools" if more > 0 else shown


__all__ = ["note_rules"]
