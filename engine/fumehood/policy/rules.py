"""One compiled rule: each of its conditions as a question about a call.

Host side, used by `policy/service`. Questions about the tool and the engine (`of_tool`) are
separate from those about the call (`of_call`), because the former are asked once for each tool.
Invariant: in doubt a rule that denies or asks matches, and one that allows does not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fumehood.core.names import compile_glob
from fumehood.core.tool import ToolDefinition
from fumehood.policy.model import CallFacts, Condition, ExplainedRule, Predicate, Rule, Verdict
from fumehood.policy.model import CheckedPart as Part
from fumehood.policy.predicates import (
    Answer,
    any_holds,
    compile_condition,
    values_at,
    why_in_doubt,
)

MAX_COMPARED = 5
"""Elements of a `*` that an explanation shows."""

MAX_SHOWN = 200
"""Characters of them."""


@dataclass(frozen=True, slots=True)
class OfTool:
    """A question about a tool."""

    says: str
    ask: Callable[[ToolDefinition], bool]


@dataclass(frozen=True, slots=True)
class OfCall:
    """A question about a call; the answer None is in doubt."""

    says: str
    ask: Callable[[CallFacts], Answer]
    conditions: tuple[Condition, ...] = ()
    """The conditions that it tests, if any."""


@dataclass(frozen=True, slots=True)
class CompiledRule:
    """A rule and its questions."""

    rule: Rule
    line: int | None
    of_tool: tuple[OfTool, ...]
    of_call: tuple[OfCall, ...]
    in_doubt: bool
    """The answer that counts when a question is in doubt."""

    def is_about(self, tool: ToolDefinition) -> bool:
        """Whether it can match calls of this tool."""
        return all(question.ask(tool) for question in self.of_tool)

    def matches(self, facts: CallFacts) -> bool:
        """Whether it matches a call of a tool that it applies to."""
        in_doubt = self.in_doubt
        for question in self.of_call:
            answer = question.ask(facts)
            if not (in_doubt if answer is None else answer):
                return False
        return True

    def doubt(self, facts: CallFacts) -> str | None:
        """Why it matches a call, if not because every condition holds."""
        for question in self.of_call:
            if question.conditions and question.ask(facts) is None:
                return "; ".join(
                    why_in_doubt(one, facts.tool, facts.arguments)
                    for one in question.conditions
                    if compile_condition(one, for_every=False)(facts.arguments) is None
                )
        return None

    def explained(self, facts: CallFacts) -> ExplainedRule:
        """Each question with its answer."""
        parts = [Part(says=one.says, holds=one.ask(facts.tool)) for one in self.of_tool]
        parts += [
            Part(says=one.says, holds=one.ask(facts), compared=_compared(one.conditions, facts))
            for one in self.of_call
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
    """Compile a rule for an engine in this environment."""
    return CompiledRule(
        rule=rule,
        line=line,
        of_tool=tuple(_of_tool(rule, environment)),
        of_call=tuple(_of_call(rule)),
        in_doubt=rule.decision is not Verdict.ALLOW,
    )


def names_exactly(pattern: str) -> bool:
    """Whether this entry of `tools` is an exact name."""
    return "*" not in pattern.partition("@")[0]


def compile_tool(pattern: str) -> Callable[[str, str], bool]:
    """Compile an entry of `tools` to a test of name and version."""
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


def _any_tool(patterns: tuple[str, ...]) -> Callable[[ToolDefinition], bool]:
    tests = tuple(map(compile_tool, patterns))
    return lambda tool: any(test(tool.name, tool.version) for test in tests)


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
    if rule.over_budget:
        yield OfCall("over_budget", lambda facts: facts.is_over_budget())


def _of_arguments(words: str, conditions: tuple[Condition, ...], *, for_every: bool) -> OfCall:
    """Whether one of these conditions holds."""
    asks = [compile_condition(condition, for_every=for_every) for condition in conditions]
    says = words + "; ".join(f"{one.name} {_words(one)}" for one in conditions)
    if len(asks) == 1:
        ask = asks[0]
        return OfCall(says, lambda facts: ask(facts.arguments), conditions)
    return OfCall(says, lambda facts: any_holds(one(facts.arguments) for one in asks), conditions)


def _compared(conditions: Sequence[Condition], facts: CallFacts) -> str | None:
    """The effective values that conditions test; None if there are none."""
    places = [place for condition in conditions for place in condition.places]
    found = [value for place in places for value in values_at(facts.arguments, place)]
    text = ", ".join(json.dumps(value, default=str) for value in found[:MAX_COMPARED])
    is_cut = len(text) > MAX_SHOWN or len(found) > MAX_COMPARED
    return f"{text[:MAX_SHOWN]}…" if is_cut else text or None


def _any_name(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    exact = frozenset(pattern for pattern in patterns if "*" not in pattern)
    globs = tuple(compile_glob(pattern) for pattern in patterns if "*" in pattern)
    if not globs:
        return exact.__contains__
    return lambda name: name in exact or any(fits(name) for fits in globs)


def _words(predicate: Predicate) -> str:
    """A predicate as it is written in the file."""
    if predicate.not_ is not None:
        return f"not {_words(predicate.not_)}"
    written = predicate.model_dump(
        mode="json", by_alias=True, exclude_unset=True, exclude={"argument"}
    )
    return ", ".join(f"{name} {value!r}" for name, value in written.items())


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
