"""The policy gate: the decision of the operator's rules, or of the defaults, on one call.

Host side, called by `pipeline/authorize` and again before an approved call starts. In memory, no
I/O. Invariants: deny > ask > allow, whatever the rules' order and detail; a dangerous tool is
allowed only by a rule with its exact name; all asking rules apply together, so an additional rule
that denies or asks never permits a call.
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
"""The policy version that is recorded if there is no policy."""

MAX_TOOLS_KNOWN = 20_000
"""Maximum number of tool definitions whose rules are cached."""


@dataclass(frozen=True, slots=True)
class _About:
    """The rules that apply to one tool, grouped by verdict and in the file's order."""

    tool: ToolDefinition
    deny: tuple[CompiledRule, ...] = ()
    ask: tuple[CompiledRule, ...] = ()
    allow: tuple[CompiledRule, ...] = ()
    shadow: tuple[CompiledRule, ...] = ()


class _Rules:
    """The rules of one policy version. The rules that apply to a tool are cached."""

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
        found = [one for one in self.all if one.is_about(tool)]
        enforced = [one for one in found if one.rule.is_enforced]
        return _About(
            tool,
            deny=_saying(Verdict.DENY, enforced),
            ask=_saying(Verdict.ASK, enforced),
            allow=_saying(Verdict.ALLOW, enforced),
            shadow=tuple(one for one in found if not one.rule.is_enforced),
        )


class PolicyGate:
    """Decides on calls by the current policy, or by the defaults if there is no policy."""

    def __init__(self, policy: Policy | None, environment: str) -> None:
        self.environment = environment
        self.replace(policy)

    @property
    def version(self) -> str:
        """The first 12 digits of the SHA-256 of the policy's file, or `none`."""
        return self._rules.version

    def replace(self, policy: Policy | None) -> None:
        """Replace the whole policy atomically."""
        self._rules = _Rules(policy, self.environment)
        self._counts: Counter[str] = Counter()
        self._shadow_counts: Counter[str] = Counter()

    def decide(self, facts: CallFacts) -> Decision:
        """Decide one call."""
        rules = self._rules
        if not rules.all:
            return rules.default[facts.tool.dangerous]
        about = rules.about(facts.tool)
        decision = _enforced(about, facts, rules)
        return decision if not about.shadow else _with_shadow(decision, about.shadow, facts)

    def decide_request(self, facts: CallFacts) -> Decision:
        """Decide one network request of a program, and count the decision.

        A decision to ask is not counted here, because the request then becomes a call.
        """
        decision = self.decide(facts)
        if decision.verdict is not Verdict.ASK:
            self.count(decision)
        return decision

    def count(self, decision: Decision) -> None:
        """Count the deciding rule and the shadow decisions of a call that is made, not only
        explained.
        """
        self._counts[decision.rule] += 1
        if decision.shadow:
            self._shadow_counts.update(told.partition(" ")[0] for told in decision.shadow)

    def explain(self, facts: CallFacts) -> Explanation:
        """Return the decision on a call, and how each rule applies to it."""
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
            rules=tuple(one.explained(facts) for one in self._rules.all),
        )

    def rules(self) -> tuple[RuleStatus, ...]:
        """Return every rule with its counts of decisions and shadow decisions."""
        return tuple(self._status(one) for one in self._rules.all)

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


def _saying(verdict: Verdict, rules: Iterable[CompiledRule]) -> tuple[CompiledRule, ...]:
    return tuple(one for one in rules if one.rule.decision is verdict)


def _enforced(about: _About, facts: CallFacts, rules: _Rules) -> Decision:
    """Return the strictest decision of the matching rules."""
    denies = next((one for one in about.deny if one.matches(facts)), None)
    if denies is not None:
        return Decision(
            Verdict.DENY,
            denies.rule.id,
            reason=_reason(denies, facts),
            policy_version=rules.version,
        )
    asking = [one for one in about.ask if one.matches(facts)]
    if asking:
        return _asked(asking, facts, rules.version)
    allows = next((one.rule for one in about.allow if one.matches(facts)), None)
    if allows is not None:
        return Decision(
            Verdict.ALLOW, allows.id, reason=allows.reason, policy_version=rules.version
        )
    return rules.default[facts.tool.dangerous]


def _reason(rule: CompiledRule, facts: CallFacts) -> str | None:
    """Return the rule's reason. If a condition is in doubt, the result also explains the doubt."""
    doubt = rule.doubt(facts)
    if doubt is None:
        return rule.rule.reason
    own = f" The rule's reason: {rule.rule.reason}" if rule.rule.reason else ""
    return f"In doubt: {doubt}.{own}"


def _asked(asking: Sequence[CompiledRule], facts: CallFacts, version: str) -> Decision:
    """Return the combined decision of the rules that ask: the largest quorum of these rules, and
    the approvers whom all of them accept.
    """
    first = asking[0].rule
    named = [one.rule.approvers for one in asking if one.rule.approvers is not None]
    approvers = (
        tuple(name for name in named[0] if all(name in them for them in named)) if named else ()
    )
    quorum = max(one.rule.quorum or 1 for one in asking)
    if named and len(approvers) < quorum:
        ids = ", ".join(one.rule.id for one in asking)
        return Decision(
            Verdict.DENY,
            first.id,
            reason=f"Too few approvers are named by all of the rules that ask: {ids}",
            policy_version=version,
        )
    return Decision(
        Verdict.ASK,
        first.id,
        reason=_reason(asking[0], facts),
        approvers=approvers,
        quorum=quorum,
        policy_version=version,
        asked_by=tuple(one.rule.id for one in asking),
        may_exceed=tuple(sorted({key for one in asking for key in one.rule.exceeds})),
        may_run_first=all(one.rule.preview for one in asking),
    )


def _with_shadow(decision: Decision, shadow: Sequence[CompiledRule], facts: CallFacts) -> Decision:
    told = [f"{one.rule.id} would {one.rule.decision}" for one in shadow if one.matches(facts)]
    return replace(decision, shadow=tuple(told)) if told else decision
