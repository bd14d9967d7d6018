"""Data classes for the policy: rules that allow calls, deny them, or require approval (ask).

`policy/rules` evaluates rules, and `policy/service` combines the results to a decision. This module
validates each rule by itself; `policy/loader` finds the other faults of a document.

Invariants: deny wins over ask, and ask wins over allow; if several matching rules have the same
verdict, the decision names the first of them. In a rule, an absent key matches any value. An empty
list would never match, so it is a fault.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import (
    BeforeValidator,
    Field,
    JsonValue,
    field_validator,
    model_validator,
)

from fumehood.core.call import ID_PATTERN as CALL_ID_PATTERN
from fumehood.core.errors import FumehoodError
from fumehood.core.hosts import host_pattern_fault
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Grade
from fumehood.core.tool import ToolDefinition
from fumehood.core.value import Value, table_of
from fumehood.core.workspace_path import absolute_path

Answer = bool | None
"""The result of a test: True, False, or None if in doubt."""


class Verdict(StrEnum):
    """The decision of a rule, from the most permissive to the strictest."""

    ALLOW = "allow"
    ASK = "ask"
    DENY = "deny"


def _never(key: str) -> bool:
    return False


def _in_no_container(least: Grade) -> Answer:
    return False


def _ignore(least: Grade) -> None:
    pass


class CallFacts(NamedTuple):
    """Everything about a call that a rule can test. This is a named tuple, because named tuples are
    fast to create.

    `arguments` are the effective arguments: they were coerced, and include defaults and the
    arguments that the agent's configuration fixes.
    """

    tool: ToolDefinition
    arguments: JsonObject
    principal_id: str
    agent_id: str | None
    session_id: str | None
    exceeds: Callable[[str], bool] = _never
    """Returns whether the gate with the given key would refuse the call now (`pipeline/gate.py`).
    Called only if a rule tests this gate."""
    is_weaker: Callable[[Grade], Answer] = _in_no_container
    """Returns whether the call would run in a container of a weaker grade than the given one, or
    None if that is not known. The result is False if the call runs in no container."""
    bind: Callable[[Grade], None] = _ignore
    """Called with the grade of each enforced rule that this grade alone keeps from matching. The
    call must then run in no weaker container."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The policy's decision on one call."""

    verdict: Verdict
    rule: str
    """The id of the deciding rule, or a sentence that begins with `default:`."""
    reason: str | None = None
    """The deciding rule's reason. It is shown to the caller and the approver."""
    approvers: tuple[str, ...] = ()
    """Names of the approvers who may approve. Empty means every approver."""
    quorum: int = 1
    """Number of different approvers who must approve the call."""
    policy_version: str = "none"
    shadow: tuple[str, ...] = ()
    """What matching rules in shadow mode would have decided, as texts for the log."""
    asked_by: tuple[str, ...] = ()
    """Ids of all rules that require approval (ask). Empty if a default requires it."""
    may_exceed: tuple[str, ...] = ()
    """Keys of gates that the call may pass after approval although they would refuse it. These are
    the keys that the rules which require approval test."""
    may_run_first: bool = False
    """Whether the call may run before a human decides, if a part can hold back the call's effect
    until then."""


MAX_RULES = 5_000
"""Maximum number of rules in one file."""

MAX_NAMES = 1_000
"""Maximum number of entries of one list in a rule."""

MAX_CONDITIONS = 50
"""Maximum number of conditions in a rule's `when`, and also in its `any`."""

MAX_POLICY_CHARACTERS = 1_000_000
"""Maximum number of characters of a policy file that is replaced through the engine."""

MAX_TEXT = 4_096
"""Maximum number of characters of one text in a rule."""


ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
TOOL_PATTERN = re.compile(
    r"([A-Za-z0-9_*-]{1,64}|external:[A-Za-z0-9_.*-]{1,128})(@[0-9A-Za-z.+*-]{1,100})?", re.ASCII
)
NAME_PATTERN = re.compile(r"[!-~]{1,200}", re.ASCII)
POINTER = re.compile(r"(?:/(?:[^~/]|~[01])*)+", re.DOTALL)

Mode = Literal["enforce", "shadow"]


class _Written(Value):
    """The base class of tables in a policy file. A key with the value null is an error (except
    `equals`), because null does not mean that the key is absent.
    """

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
"""A list of texts. The list must not be empty, because an empty list would never match."""

PREDICATES = ("prefix", "equals", "in", "glob", "min", "max", "path_inside", "host_in", "missing")


class Predicate(_Written):
    """A test of one argument. Exactly one kind of test must be given, such as `prefix` or `equals`.
    `min` and `max` can be given together and count as one kind.
    """

    prefix: Text | None = Field(default=None, min_length=1)
    equals: JsonValue = None
    one_of: Annotated[tuple[JsonValue, ...], Field(min_length=1, max_length=MAX_NAMES)] | None = (
        Field(default=None, alias="in")
    )
    glob: Text | None = Field(default=None, min_length=1)
    """`*` matches any text, including none and slashes; other characters match themselves."""
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
            raise ValueError("is not a valid path")
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
            raise ValueError(f"exactly one of these is needed: {known}")
        return self

    @property
    def question(self) -> frozenset[str]:
        """The names of the kinds of test that this predicate contains, such as `equals`. The name
        of `min` and `max` is `range`. A valid predicate has exactly one.
        """
        names = {"one_of": "in", "not_": "not", "min": "range", "max": "range"}
        asked = self.model_fields_set - {"argument"}
        given = (name for name in asked if name == "equals" or getattr(self, name) is not None)
        return frozenset(names.get(name, name) for name in given)


class PartCondition(ABC):
    """A test of a call's arguments. In the policy file, it is the value of a key that a part adds
    to conditions.

    The test examines items that the part parses from the arguments, such as the programs in a shell
    command. The arguments are untrusted. A subclass is also a pydantic model, which validates the
    key's value.
    """

    subject: ClassVar[str]
    """What the condition tests, as a noun for messages."""
    arguments: ClassVar[tuple[str, ...]]
    """The names of the arguments that the test reads. At least one of the rule's tools must accept
    at least one of them."""

    @abstractmethod
    def compiled(self, *, for_every: bool) -> Callable[[JsonObject], Answer]:
        """Return the test as a function of a call's arguments.

        The function returns True if at least one item meets the condition. With `for_every`, it
        returns True only if all items do. It returns None (in doubt) if no item can be parsed, or
        if the arguments are ambiguous.
        """

    @abstractmethod
    def why_in_doubt(self, arguments: JsonObject) -> str:
        """Return a clause that explains why the test of these arguments is in doubt."""


class Condition(Predicate):
    """A test of the argument at a JSON pointer, or a test that a part defines.

    In the pointer, the segment `*` matches every element of a list or object. *Source*: RFC 6901;
    `*` is our extension.
    """

    argument: Text = ""

    @field_validator("argument")
    @classmethod
    def _check_pointer(cls, value: str) -> str:
        if not POINTER.fullmatch(value):
            raise ValueError(
                "is not a JSON pointer: it must begin with '/'; "
                "write '~' as '~0', '/' in a name as '~1'"
            )
        return value

    @model_validator(mode="after")
    def _tests_one_thing(self) -> Self:
        if (self.of_part is None) == (not self.argument):
            others = "".join(f", or {key} without it" for key in self.keys_of_parts())
            raise ValueError(f"argument is needed{others}")
        return self

    @classmethod
    def keys_of_parts(cls) -> list[str]:
        """Return the keys that parts add to conditions, sorted."""
        return sorted(cls.model_fields.keys() - Condition.model_fields.keys())

    @property
    def of_part(self) -> PartCondition | None:
        """The test that a part defines, if this condition has a part's key. None if the condition
        tests `argument` instead.
        """
        values = (getattr(self, key) for key in self.keys_of_parts())
        return next((value for value in values if value is not None), None)

    @property
    def name(self) -> str:
        """What the condition tests, as a noun for messages: an argument, or the `subject` of a
        part's test.
        """
        return f"argument {self.argument}" if self.of_part is None else self.of_part.subject

    @property
    def places(self) -> tuple[tuple[str, ...], ...]:
        """The path of each tested argument, as unescaped segments."""
        if self.of_part is not None:
            return tuple((name,) for name in self.of_part.arguments)
        parts = self.argument.split("/")[1:]
        return (tuple(part.replace("~1", "/").replace("~0", "~") for part in parts),)

    @property
    def segments(self) -> tuple[str, ...]:
        """The path of the first tested argument, as unescaped segments."""
        return self.places[0]


class Rule(_Written):
    """One rule. It matches a call if all of its keys match and all of its conditions hold."""

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
    """The tool must have at least one matching tag."""
    cost_over: Money | None = None
    grade_below: Grade | None = None
    """Matches calls that run in a container of a weaker grade."""
    reason: Annotated[str, Field(strict=True, min_length=1, max_length=1000)] | None = None
    approvers: Names | None = None
    quorum: Annotated[int, Field(strict=True, ge=1, le=20)] | None = None
    preview: Literal[True] | None = None
    """Whether to run a program in a durable session as a trial first, and show the effect of the
    trial to the approver."""
    mode: Mode = "enforce"
    when: Annotated[tuple[Condition, ...], Field(max_length=MAX_CONDITIONS)] = ()
    any: Annotated[tuple[Condition, ...], Field(min_length=1, max_length=MAX_CONDITIONS)] | None = (
        None
    )
    """Conditions of which at least one must hold."""

    @model_validator(mode="before")
    @classmethod
    def _move_conditions(cls, document: Any) -> Any:
        """Move the keys of a rule that are shorthand for a condition into the rule's `when`."""
        if not isinstance(document, dict):
            return document
        short = {key: document[key] for key in cls.short_keys() if document.get(key) is not None}
        when = document.get("when", [])
        moved = {key: value for key, value in document.items() if key not in short}
        if short and isinstance(when, list | tuple):
            moved["when"] = [*when, *({key: value} for key, value in short.items())]
        return moved

    @field_validator("grade_below")
    @classmethod
    def _check_grade(cls, value: Grade | None) -> Grade | None:
        if value is not None and all(grade.is_at_least(value) for grade in Grade):
            raise ValueError(f"no grade is below {value}")
        return value

    @field_validator("tools")
    @classmethod
    def _check_tools(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for pattern in value or ():
            if not TOOL_PATTERN.fullmatch(pattern):
                raise ValueError(
                    f"{pattern[:80]!a} is neither a tool's name nor name@version; '*' is the "
                    "only wildcard"
                )
        return value

    @field_validator("agents", "principals", "environments", "approvers")
    @classmethod
    def _check_names(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for name in value or ():
            if not NAME_PATTERN.fullmatch(name):
                raise ValueError(f"{name[:80]!a} is not a valid name")
        return value

    @field_validator("environments", "approvers")
    @classmethod
    def _refuse_patterns(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for name in value or ():
            if "*" in name:
                raise ValueError(f"{name[:80]!a} must be an exact name")
        return value

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.decision is not Verdict.ASK and (self.approvers or self.quorum or self.preview):
            raise ValueError("approvers, quorum and preview need the decision 'ask'")
        if self.decision is Verdict.ALLOW and self.exceeds:
            key = self.exceeds[0]
            raise ValueError(f"{key} needs 'ask' or 'deny'; 'allow' lets no call exceed a limit")
        if self.grade_below is not None and self.decision is Verdict.ALLOW:
            raise ValueError("grade_below needs 'ask' or 'deny'")
        return self

    @classmethod
    def short_keys(cls) -> list[str]:
        """Return the keys that a rule accepts as shorthand for a condition in `when`. These are the
        keys that parts add to conditions.
        """
        condition: Any = table_of(cls.model_fields["when"].annotation)
        keys: list[str] = condition.keys_of_parts()
        return keys

    @property
    def exceeds(self) -> tuple[str, ...]:
        """The keys in this rule that stand for gates, sorted by name. A gate is a check that a part
        makes before a call. The rule matches a call only if the gate of each such key would refuse
        the call.
        """
        added = type(self).model_fields.keys() - Rule.model_fields.keys()
        return tuple(sorted(key for key in added if getattr(self, key)))

    @property
    def is_enforced(self) -> bool:
        """Whether the rule decides calls. A rule in shadow mode only reports what it would
        decide.
        """
        return self.mode == "enforce"

    @property
    def is_unconditional(self) -> bool:
        """Whether the rule has no conditions, and no keys that name gates of parts (`exceeds`) or a
        grade.
        """
        return not self.when and not self.any and not self.exceeds and self.grade_below is None


class Policy(Value):
    """The parsed policy file: its rules in order, and the values of the keys that parts add."""

    version: str
    """The first 12 hexadecimal digits of the SHA-256 of the file's bytes."""
    file: str
    """The name of the policy file, without its directory."""
    rules: tuple[Rule, ...]
    lines: tuple[int | None, ...]
    """For each rule, the rule's first line if the policy file is YAML, and None if it is TOML."""
    of_parts: dict[str, Any] = Field(default_factory=dict)
    """The values of the top-level keys that parts add to the policy file (`Part.policy`)."""

    def enforced(self) -> Policy:
        """Return a copy of the policy in which rules in shadow mode are enforced."""
        rules = tuple(rule.model_copy(update={"mode": "enforce"}) for rule in self.rules)
        return self.model_copy(update={"rules": rules})


class PolicyFault(Value):
    """One fault in a policy file. `line` is None if the line is unknown."""

    line: int | None
    message: str


class PolicyError(FumehoodError):
    """The policy cannot be used. `faults` contains every fault. The message is for the operator."""

    def __init__(self, file: str, faults: tuple[PolicyFault, ...]) -> None:
        self.file = file
        self.faults = faults
        super().__init__("\n".join(self.shown))

    @property
    def shown(self) -> tuple[str, ...]:
        """Each fault as `file: fault`, or `file:line: fault` if the line is known."""
        return tuple(
            f"{self.file}:{fault.line}: {fault.message}"
            if fault.line is not None
            else f"{self.file}: {fault.message}"
            for fault in self.faults
        )


class CheckedPart(Value):
    """One test of a rule (`says`), and whether the call meets it (`holds`).

    `holds` is null (in doubt) if the argument is missing or cannot be compared. The test then
    counts as met in rules that deny or ask, and as not met in rules that allow.
    """

    says: str
    holds: bool | None
    compared: str | None = None
    """The arguments that the test compared, as shortened JSON."""


class ExplainedRule(Value):
    """How one rule applies to a call: whether it matches, and the result of each of its tests
    (`parts`).
    """

    id: str
    decision: Verdict
    mode: Mode
    line: int | None
    matches: bool
    parts: tuple[CheckedPart, ...]


class Explanation(Value):
    """The policy's decision on one call, and how each rule applies to the call."""

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


_ID: JsonObject = {"pattern": CALL_ID_PATTERN}


class ExplainWish(Value):
    """A request to explain the policy's decision on a call.

    If `principal_id` is None, rules that name `principals` do not match.
    """

    tool: str = Field(max_length=200)
    arguments: dict[str, Any] = Field(default_factory=dict)
    principal_id: str | None = Field(default=None, max_length=200)
    agent_id: str | None = Field(default=None, max_length=128, json_schema_extra=_ID)
    session_id: str | None = Field(default=None, max_length=128, json_schema_extra=_ID)


class RuleStatus(Value):
    """A rule of the running engine, and the number of calls that the rule has decided."""

    id: str
    decision: Verdict
    mode: Mode
    line: int | None
    is_of_this_environment: bool
    reason: str | None
    decided: int
    """Number of calls that the rule has decided since this policy was loaded."""
    would_have_decided: int
    """Number of calls that the rule has matched in shadow mode since this policy was loaded."""


class PolicyText(Value):
    """The text of the policy file, and the version of this text."""

    text: str
    version: str


class NewPolicy(Value):
    """A request to replace the text of the policy file."""

    text: str = Field(min_length=1, max_length=MAX_POLICY_CHARACTERS)
    version: str = Field(min_length=1, max_length=64)
    """The version of the text that the new text replaces. If the file has another version, the
    request fails."""


class PolicyStatus(Value):
    """The status of the policy that the running engine uses."""

    version: str
    file: str | None
    environment: str
    rules: tuple[RuleStatus, ...]
    refused: tuple[str, ...]
    """The faults of the current policy file. If there are any, the engine still uses an older
    version of the file."""
