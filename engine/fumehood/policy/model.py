"""The policy: rules that say allow, ask or deny of a call. Values only.

What a rule means is in `policy/rules`, what decides in `policy/service`, and what is wrong
with a whole document is found in `policy/loader`. Here stands what one rule may say by itself.

Invariant: absent means that it does not matter; empty would mean "never", and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    field_validator,
    model_validator,
)

from fumehood.core.errors import FumehoodError
from fumehood.core.hosts import host_pattern_fault
from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ToolDefinition
from fumehood.core.workspace_path import absolute_path


class Verdict(StrEnum):
    """What a rule says of a call, the strictest last."""

    ALLOW = "allow"
    ASK = "ask"
    DENY = "deny"


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class CallFacts:
    """Everything that rules may look at.

    `arguments` are the effective ones: after coercion, defaults and the agent's fixed ones.
    """

    tool: ToolDefinition
    arguments: JsonObject
    principal_id: str
    agent_id: str | None
    session_id: str | None
    is_over_budget: Callable[[], bool] = _never
    """Whether a budget has too little left for it; asked only where a rule wants to know."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What the policy says of one call."""

    verdict: Verdict
    rule: str
    """The id of the rule that decided, or a sentence beginning with `default:`."""
    reason: str | None = None
    """For the caller and the approver."""
    approvers: tuple[str, ...] = ()
    """Names of those who may say yes; none means any approver."""
    quorum: int = 1
    """How many different approvers have to say yes."""
    policy_version: str = "none"
    shadow: tuple[str, ...] = ()
    """What rules in shadow mode would have said, as warnings for the log."""
    remembered: str | None = None
    """The remembered rule that allows it and has a limited number of uses, to be counted when
    the call starts."""
    asked_by: tuple[str, ...] = ()
    """The ids of all rules that ask; none where a default does."""
    may_exceed_budget: bool = False
    """A rule looks at the budget, so that a yes lets the call exceed it."""


MAX_RULES = 5_000
MAX_NAMES = 1_000
"""Of one list of one rule."""

MAX_CONDITIONS = 50
MAX_TEXT = 4_096

ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
TOOL_PATTERN = re.compile(r"[A-Za-z0-9_*-]{1,64}(@[0-9A-Za-z.+*-]{1,100})?", re.ASCII)
NAME_PATTERN = re.compile(r"[!-~]{1,200}", re.ASCII)
POINTER = re.compile(r"(?:/(?:[^~/]|~[01])*)+", re.DOTALL)

Mode = Literal["enforce", "shadow"]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class _Written(_Value):
    """What stands in a file. A key without a value is a mistake there, and no absent key."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_null(cls, document: Any) -> Any:
        for name, value in document.items() if isinstance(document, dict) else ():
            if value is None and name != "equals":
                raise ValueError(f"{str(name)[:40]} has no value; leave the key out instead")
        return document


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a number is needed")  # noqa: TRY004  # pydantic's
    return value


def _as_money(value: Any) -> Any:
    if isinstance(value, bool | float):
        raise ValueError('write money as a string, such as "0.10"')  # noqa: TRY004
    return value


Number = Annotated[int | float, BeforeValidator(_no_bool)]
Money = Annotated[
    Decimal,
    BeforeValidator(_as_money),
    Field(ge=0, max_digits=18, decimal_places=9, allow_inf_nan=False),
]
Text = Annotated[str, Field(strict=True, max_length=MAX_TEXT)]
Flag = Annotated[bool, Field(strict=True)]
Names = Annotated[tuple[Text, ...], Field(min_length=1, max_length=MAX_NAMES)]
"""A list that is written must hold something: an empty one would never match."""

PREDICATES = ("prefix", "equals", "in", "glob", "min", "max", "path_inside", "host_in", "missing")


class Predicate(_Written):
    """What is asked of one argument: exactly one question (`min` and `max` make one)."""

    prefix: Text | None = Field(default=None, min_length=1)
    equals: JsonValue = None
    one_of: Annotated[tuple[JsonValue, ...], Field(min_length=1, max_length=MAX_NAMES)] | None = (
        Field(default=None, alias="in")
    )
    glob: Text | None = Field(default=None, min_length=1)
    """`*` stands for any text, also none, also with slashes; everything else for itself."""
    min: Number | None = None
    max: Number | None = None
    path_inside: Text | None = None
    host_in: Names | None = None
    missing: Literal[True] | None = None
    not_: Predicate | None = Field(default=None, alias="not")

    @field_validator("path_inside")
    @classmethod
    def _check_path(cls, value: str | None) -> str | None:
        if value is not None and absolute_path(value) is None:
            raise ValueError("can be no path")
        return value

    @field_validator("host_in")
    @classmethod
    def _check_hosts(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for pattern in value or ():
            if fault := host_pattern_fault(pattern):
                raise ValueError(f"{pattern[:80]!a} {fault}")
        return value

    @model_validator(mode="after")
    def _ask_one_question(self) -> Self:
        given = self.question
        if len(given) != 1:
            known = ", ".join((*PREDICATES, "not"))
            raise ValueError(f"one of these is needed, and only one: {known}")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError("min is over max, so it can never hold")
        if self.not_ is not None and self.not_.not_ is not None:
            raise ValueError("'not' of 'not' is written without both")
        return self

    @property
    def question(self) -> frozenset[str]:
        """Which one is asked, by its name."""
        names = {"one_of": "in", "not_": "not", "min": "range", "max": "range"}
        asked = self.model_fields_set - {"argument"}
        given = (name for name in asked if name == "equals" or getattr(self, name) is not None)
        return frozenset(names.get(name, name) for name in given)


class Condition(Predicate):
    """A question about the argument at a JSON pointer.

    A segment that is `*` alone stands for every element there.
    *Source*: RFC 6901; the `*` is ours.
    """

    argument: Text

    @field_validator("argument")
    @classmethod
    def _check_pointer(cls, value: str) -> str:
        if not POINTER.fullmatch(value):
            raise ValueError(
                "is no JSON pointer: it begins with '/'; write '~' as '~0', '/' in a name as '~1'"
            )
        return value

    @property
    def segments(self) -> tuple[str, ...]:
        """The pointer's parts, unescaped."""
        parts = self.argument.split("/")[1:]
        return tuple(part.replace("~1", "/").replace("~0", "~") for part in parts)


class Rule(_Written):
    """One rule. It is about the calls for which everything that it says holds."""

    id: str = Field(pattern=ID_PATTERN)
    decision: Verdict
    tools: Names | None = None
    agents: Names | None = None
    principals: Names | None = None
    environments: Names | None = None
    dangerous: Flag | None = None
    read_only: Flag | None = None
    sandboxed: Flag | None = None
    categories: Names | None = None
    tags: Names | None = None
    """One of them is enough."""
    cost_over: Money | None = None
    over_budget: Literal[True] | None = None
    reason: Annotated[str, Field(strict=True, min_length=1, max_length=1000)] | None = None
    approvers: Names | None = None
    quorum: Annotated[int, Field(strict=True, ge=1, le=20)] | None = None
    mode: Mode = "enforce"
    when: Annotated[tuple[Condition, ...], Field(max_length=MAX_CONDITIONS)] = ()

    @field_validator("tools")
    @classmethod
    def _check_tools(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for pattern in value or ():
            if not TOOL_PATTERN.fullmatch(pattern):
                raise ValueError(
                    f"{pattern[:80]!a} is neither a tool's name nor name@version; '*' is the only "
                    "sign that stands for others"
                )
        return value

    @field_validator("agents", "principals", "environments", "approvers")
    @classmethod
    def _check_names(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for name in value or ():
            if not NAME_PATTERN.fullmatch(name):
                raise ValueError(f"{name[:80]!a} can be no name")
        return value

    @field_validator(
        "tools", "agents", "principals", "environments", "categories", "tags", "approvers"
    )
    @classmethod
    def _refuse_doubles(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for position, name in enumerate(value or ()):
            if name in (value or ())[:position]:
                raise ValueError(f"{name[:80]!a} is given twice")
        return value

    @field_validator("environments", "approvers")
    @classmethod
    def _refuse_patterns(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for name in value or ():
            if "*" in name:
                raise ValueError(f"{name[:80]!a} must be written out")
        return value

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.decision is not Verdict.ASK and (self.approvers or self.quorum):
            raise ValueError("approvers and quorum go with the decision 'ask' only")
        if self.approvers is not None and (self.quorum or 1) > len(self.approvers):
            raise ValueError("its quorum is larger than the number of its approvers")
        if self.decision is Verdict.ALLOW and self.over_budget:
            raise ValueError("over_budget goes with 'ask' or 'deny'; 'allow' gives no budget")
        if self.decision is Verdict.ALLOW and self.dangerous and not self.names_a_tool:
            raise ValueError(
                "it can never match: a dangerous tool is allowed only by a rule that writes out "
                "its name in 'tools'"
            )
        return self

    @property
    def names_a_tool(self) -> bool:
        """Whether `tools` holds a name without `*`."""
        return any("*" not in pattern.partition("@")[0] for pattern in self.tools or ())

    @property
    def is_enforced(self) -> bool:
        """Whether it decides, and not only reports."""
        return self.mode == "enforce"

    @property
    def is_unconditional(self) -> bool:
        """Whether it looks at the tool and the caller only."""
        return not self.when and not self.over_budget


class Policy(_Value):
    """All rules of one document, in the order in which they are written."""

    version: str
    """The first 12 hexadecimal digits of the SHA-256 of the file's bytes."""
    file: str
    """Its name, without the directory."""
    rules: tuple[Rule, ...]
    lines: tuple[int | None, ...]
    """Where each rule begins in a YAML file; None in TOML."""

    def enforced(self) -> Policy:
        """The same with nothing in shadow mode: what it would decide."""
        rules = tuple(rule.model_copy(update={"mode": "enforce"}) for rule in self.rules)
        return self.model_copy(update={"rules": rules})


class PolicyFault(_Value):
    """One thing that is wrong with a document."""

    line: int | None
    message: str


class PolicyError(FumehoodError):
    """A policy that cannot be used, with every fault. The message is for its operator."""

    def __init__(self, file: str, faults: tuple[PolicyFault, ...]) -> None:
        self.file = file
        self.faults = faults
        super().__init__("\n".join(self.shown))

    @property
    def shown(self) -> tuple[str, ...]:
        """Each fault as `file: what is wrong`, or `file:line: …` where the line is known."""
        return tuple(
            f"{self.file}:{fault.line}: {fault.message}"
            if fault.line is not None
            else f"{self.file}: {fault.message}"
            for fault in self.faults
        )


class CheckedPart(_Value):
    """One thing that a rule asks for, and whether this call has it.

    None is in doubt: the argument is not there, or cannot be compared. A rule that denies or
    asks takes that for yes, one that allows for no.
    """

    says: str
    holds: bool | None
    compared: str | None = None
    """Of a condition, what it looked at: the effective argument as JSON, shortened."""


class ExplainedRule(_Value):
    """What one rule has to do with a call."""

    id: str
    decision: Verdict
    mode: Mode
    line: int | None
    matches: bool
    parts: tuple[CheckedPart, ...]


class Explanation(_Value):
    """What the policy decides of one call, and why."""

    tool: str
    environment: str
    verdict: Verdict
    rule: str
    reason: str | None
    approvers: tuple[str, ...]
    quorum: int
    policy_version: str
    shadow: tuple[str, ...]
    rules: tuple[ExplainedRule, ...]


class ExplainWish(_Value):
    """A call to be explained. Without `principal_id` it is nobody's that a rule names."""

    tool: str = Field(max_length=200)
    arguments: dict[str, Any] = Field(default_factory=dict)
    principal_id: str | None = Field(default=None, max_length=200)
    agent_id: str | None = Field(default=None, max_length=128)
    session_id: str | None = Field(default=None, max_length=128)


class RuleStatus(_Value):
    """A rule as its operator sees it in the running engine."""

    id: str
    decision: Verdict
    mode: Mode
    line: int | None
    is_of_this_environment: bool
    reason: str | None
    would_have_decided: int
    """How many calls it matched in shadow mode since this engine has the policy."""


class PolicyStatus(_Value):
    """The policy of the running engine."""

    version: str
    file: str | None
    environment: str
    rules: tuple[RuleStatus, ...]
    refused: tuple[str, ...]
    """What is wrong with the file as it stands now, where the rules above are older ones."""
