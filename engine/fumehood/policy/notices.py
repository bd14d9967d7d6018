"""Sound rules that were perhaps not meant: told by `fumehood policy check`, and used as they are.

Host side. A rule that denies or asks takes what is in doubt for yes, so one that is about a tool
without its argument matches every call of that tool. One that allows a dangerous tool by a pattern
does not allow it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from fumehood.core.tool import ToolDefinition
from fumehood.policy.decision import Verdict
from fumehood.policy.faults import Place, Report, meant_tools, takes
from fumehood.policy.model import Predicate, Rule

MAX_NAMED = 3
"""Tools of which one notice writes out the names."""


def note_rules(
    rules: Sequence[Rule], definitions: Collection[ToolDefinition], note: Report
) -> None:
    """Tell everything of this kind. The rules are sound otherwise."""
    for number, rule in enumerate(rules):
        for place, words in _of_patterns(rule, definitions):
            note(number, place, words)
        for place, words in _of_arguments(rule, definitions):
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


def _of_arguments(
    rule: Rule, definitions: Collection[ToolDefinition]
) -> Iterator[tuple[Place, str]]:
    """The tools that lack an argument of a rule which denies or asks."""
    if rule.decision is Verdict.ALLOW or not rule.when:
        return
    meant = list(meant_tools(rule, definitions))
    for position, condition in enumerate(rule.when):
        lacking = [tool for tool in meant if not takes(tool, condition.segments)]
        if lacking and not _asks_for_absence(condition):
            words = (
                f"{_named(lacking)} takes no argument {condition.argument[:80]!a}, so the "
                "condition is always in doubt, and holds for every call of it"
            )
            yield ("when", position), words


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


__all__ = ["note_rules"]
