"""The policy gate: decides on one call by the operator's rules, or by the defaults.

Host side, called by `pipeline/authorize`, and again before an approved call starts. The gate works
in memory and does no I/O. Invariants: deny wins over ask, and ask wins over allow, whatever the
order and the specificity of the rules; a dangerous tool is allowed only by a rule with the tool's
exact name; all matching rules that ask apply together, so adding a rule that denies or asks never
permits a call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fumehood.core.tool import ToolDefinition
from fumehood.policy.model import CallFacts, Decision, Explanation, Policy, RuleStatus, Verdict
from fumehood.policy.rules import CompiledRule, compile_rule

DANGEROUS_ASKS = "default: dangerous tools wait for a human"
HARMLESS_PASSES = "default: harmless tools are allowed"
NO_POLICY = "none"
"""The version that is recorded if there is no policy."""

MAX_TOOLS_KNOWN = 20_000
"""Maximum number of tool definitions whose applicable rules are cached."""


@dataclass(frozen=True, slots=True)
class _About:
    """The rules that apply to one tool. The enforced rules are grouped by verdict, and `shadow`
    contains the rules in shadow mode. Each group is in the order of the policy file.
    """

    tool: ToolDefinition
    deny: tuple[CompiledRule, ...] = ()
    ask: tuple[CompiledRule, ...] = ()
    allow: tuple[CompiledRule, ...] = ()
    shadow: tuple[CompiledRule, ...] = ()


class _Rules:
    """The compiled rules of one version of the policy, with a cache of the rules that apply to each
    tool.
    """

    def __init__(self, policy: Policy | None, environment: str) -> None:
        self.version = policy.version if policy is not None else NO_POLICY
        written = zip(policy.rules, policy.lines, strict=True) if policy is not None else ()
        self.all = tuple(compile_rule(rule, line, environment) for rule, line in written)
        # Keyed by identity: definitions are immutable, so a changed definition is another object.
        self._known: dict[int, _About] = {}
        self.default = {
            True: Decision(Verdict.ASK, DANGEROUS_ASKS, policy_version=self.version),
            False: Decision(Verdict.ALLOW, HARMLESS_PASSES, policy_version=self.version),
        }

    def about(self, tool: ToolDefinition) -> _About:
        """Return the rules that apply to this tool."""
        known = self._known.get(id(tool))
        if known is not None and known.tool is tool:
            return known
        if len(self._known) >= MAX_TOOLS_KNOWN:
            self._known.clear()
        made = self._known[id(tool)] = self._make(tool)
        return made

    def _make(self, tool: ToolDefinition) -> _About:
        found = [compiled for compiled in self.all if compiled.is_about(tool)]
        enforced = [compiled for compiled in found if compiled.rule.is_enforced]
        return _About(
            tool,
            deny=_with_verdict(Verdict.DENY, enforced),
            ask=_with_verdict(Verdict.ASK, enforced),
            allow=_with_verdict(Verdict.ALLOW, enforced),
            shadow=tuple(compiled for compiled in found if not compiled.rule.is_enforced),
        )


class PolicyGate:
    """Decides on calls by the current policy, or by the defaults if there is no policy."""

    def __init__(self, policy: Policy | None, environment: str) -> None:
        self.environment = environment
        self.replace(policy)

    @property
    def version(self) -> str:
        """The version of the current policy (`Policy.version`), or `none` if there is no policy."""
        return self._rules.version

    def replace(self, policy: Policy | None) -> None:
        """Replace the whole policy atomically, and set the counts of decided calls to zero. If
        `policy` is None, the defaults apply from now on.
        """
        self._rules = _Rules(policy, self.environment)
        self._counts: Counter[str] = Counter()
        self._shadow_counts: Counter[str] = Counter()

    def decide(self, facts: CallFacts) -> Decision:
        """Return the decision on one call. The decision is not counted."""
        rules = self._rules
        if not rules.all:
            return rules.default[facts.tool.dangerous]
        about = rules.about(facts.tool)
        decision = _enforced(about, facts, rules)
        return decision if not about.shadow else _with_shadow(decision, about.shadow, facts)

    def decide_request(self, facts: CallFacts) -> Decision:
        """Return the decision on one network request of a program, and count the decision.

        A decision to ask is not counted here, because the request then becomes a call, and the
        decision on this call is counted instead.
        """
        decision = self.decide(facts)
        if decision.verdict is not Verdict.ASK:
            self.count(decision)
        return decision

    def count(self, decision: Decision) -> None:
        """Count the decision for the rule that made it, and for the matching rules in shadow mode.
        Call this only for calls that are really made, not for explanations.
        """
        self._counts[decision.rule] += 1
        if decision.shadow:
            self._shadow_counts.update(words.partition(" ")[0] for words in decision.shadow)

    def explain(self, facts: CallFacts) -> Explanation:
        """Return the decision on a call, and how each rule applies to the call."""
        decision = self.decide(facts)
        return Explanation(
            tool=f"{facts.tool.name}@{facts.tool.version}",
            environment=self.environment,
            verdict=decision.verdict,
            rule=decision.rule,
            reason=decision.reason,
            approvers=decision.approvers,
            quorum=decision.quorum,
            policy_version=decision.policy_version,
            shadow=decision.shadow,
            rules=tuple(compiled.explained(facts) for compiled in self._rules.all),
        )

    def rules(self) -> tuple[RuleStatus, ...]:
        """Return the status of every rule. It contains how many calls the rule has decided, or
        would have decided if it were not in shadow mode.
        """
        return tuple(map(self._status, self._rules.all))

    def _status(self, compiled: CompiledRule) -> RuleStatus:
        rule = compiled.rule
        return RuleStatus(
            id=rule.id,
            decision=rule.decision,
            mode=rule.mode,
            line=compiled.line,
            is_of_this_environment=rule.environments is None
            or self.environment in rule.environments,
            reason=rule.reason,
            decided=self._counts[rule.id],
            would_have_decided=self._shadow_counts[rule.id],
        )


def _with_verdict(verdict: Verdict, rules: Iterable[CompiledRule]) -> tuple[CompiledRule, ...]:
    return tuple(compiled for compiled in rules if compiled.rule.decision is verdict)


def _enforced(about: _About, facts: CallFacts, rules: _Rules) -> Decision:
    """Return the strictest decision of the matching rules that are enforced. If none matches,
    return the default decision.
    """
    denies = next((compiled for compiled in about.deny if compiled.matches(facts)), None)
    if denies is not None:
        return Decision(
            Verdict.DENY,
            denies.rule.id,
            reason=_reason(denies, facts),
            policy_version=rules.version,
        )
    asking = [compiled for compiled in about.ask if compiled.matches(facts)]
    if asking:
        return _asked(asking, facts, rules.version)
    allows = next((compiled.rule for compiled in about.allow if compiled.matches(facts)), None)
    if allows is not None:
        return Decision(
            Verdict.ALLOW, allows.id, reason=allows.reason, policy_version=rules.version
        )
    return rules.default[facts.tool.dangerous]


def _reason(rule: CompiledRule, facts: CallFacts) -> str | None:
    """Return the rule's reason, or None if it has none. If conditions of the rule are in doubt, the
    text begins with an explanation of the doubt.
    """
    doubt = rule.doubt(facts)
    if doubt is None:
        return rule.rule.reason
    own = f" The rule's reason: {rule.rule.reason}" if rule.rule.reason else ""
    return f"In doubt: {doubt}.{own}"


def _asked(asking: Sequence[CompiledRule], facts: CallFacts, version: str) -> Decision:
    """Return the decision of all matching rules that ask, combined.

    The decision requires the largest quorum of these rules, and accepts only approvers whom all of
    these rules accept. If there are fewer such approvers than the quorum, it denies the call.
    """
    first = asking[0].rule
    rules = [compiled.rule for compiled in asking]
    named = [rule.approvers for rule in rules if rule.approvers is not None]
    approvers = (
        tuple(name for name in named[0] if all(name in them for them in named)) if named else ()
    )
    quorum = max(rule.quorum or 1 for rule in rules)
    if named and len(approvers) < quorum:
        ids = ", ".join(rule.id for rule in rules)
        return Decision(
            Verdict.DENY,
            first.id,
            reason=f"These rules ask, but have too few approvers in common: {ids}",
            policy_version=version,
        )
    return Decision(
        Verdict.ASK,
        first.id,
        reason=_reason(asking[0], facts),
        approvers=approvers,
        quorum=quorum,
        policy_version=version,
        asked_by=tuple(rule.id for rule in rules),
        may_exceed=tuple(sorted({key for rule in rules for key in rule.exceeds})),
        may_run_first=all(rule.preview for rule in rules),
    )


def _with_shadow(decision: Decision, shadow: Sequence[CompiledRule], facts: CallFacts) -> Decision:
    """Add to a decision what the matching rules in shadow mode would have decided."""
    rules = [compiled.rule for compiled in shadow if compiled.matches(facts)]
    if not rules:
        return decision
    return replace(decision, shadow=tuple(f"{rule.id} would {rule.decision}" for rule in rules))
