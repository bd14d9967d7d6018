"""Data classes for agents, bindings, tokens, approvers and administrative changes.

An agent without bindings has no tools. An agent without principals cannot be used by any caller. A
secret appears only once, in the answer to the request that creates it. It never appears in a
`repr`, because a `repr` could be logged.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    AwareDatetime,
    Field,
    model_validator,
)

from fumehood.core.call import Id, PrincipalId
from fumehood.core.call_log import Moment
from fumehood.core.identity import Scope
from fumehood.core.json_types import JsonObject
from fumehood.core.names import TOOL_REFERENCE_PATTERN
from fumehood.core.session import PresetName
from fumehood.core.tool import NetworkPatterns
from fumehood.core.value import StrictValue, Value

MAX_CONFIGURED = 100
"""Maximum number of fixed arguments in one binding, and maximum number of its defaults."""

Arguments = Annotated[dict[str, Any], Field(max_length=MAX_CONFIGURED)]


Description = Annotated[str, Field(max_length=2000)]
Principals = Annotated[tuple[PrincipalId, ...], Field(max_length=100, strict=False)]
SortOrder = Annotated[int, Field(ge=-1_000_000, le=1_000_000)]
Presets = Annotated[
    tuple[PresetName, ...],
    Field(
        max_length=100,
        strict=False,
        description="The presets that the agent's sessions may have; the first one is the default. "
        "An empty list means no restriction.",
    ),
]
ToolReference = Annotated[str, Field(pattern=TOOL_REFERENCE_PATTERN)]


class AgentFields(StrictValue):
    """The changeable fields of an agent. If `id` is given, it must equal the agent's id in the
    URL.
    """

    id: Id | None = None
    description: Description = ""
    principals: Principals = ()
    is_enabled: bool = True
    network: NetworkPatterns = ()
    presets: Presets = ()


class Agent(AgentFields):
    """One agent. `principals` contains the ids of the principals that may make calls for the
    agent.
    """

    id: Id


class BindingFields(StrictValue):
    """The changeable fields of a binding. If `tool` is given, it must equal the tool in the URL."""

    tool: ToolReference | None = None
    sort_order: SortOrder = 0
    fixed: Arguments = Field(default_factory=dict)
    defaults: Arguments = Field(default_factory=dict)
    is_enabled: bool = True


class Binding(BindingFields):
    """A binding of one tool to one agent. `tool` is `name` or `name@version`. An agent's tools are
    sorted by `sort_order`, then by name.

    The arguments in `fixed` are set in every call, and the agent neither sees nor sends them. If a
    call omits an argument that `defaults` has, the default value is used.
    """

    tool: ToolReference

    @model_validator(mode="after")
    def _no_argument_is_both(self) -> Binding:
        both = sorted(self.fixed.keys() & self.defaults.keys())
        if both:
            raise ValueError(f"{both[0][:80]!r} is fixed and has a default; choose one")
        return self

    @property
    def tool_name(self) -> str:
        """The tool's name without a version."""
        return self.tool.partition("@")[0]


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}$")]


class NewToken(Value):
    """The data of a token to create. `principal_id` defaults to `token:<name>`."""

    name: Name
    principal_id: PrincipalId | None = None
    scopes: tuple[Scope, ...] = Field(default=(Scope.CALL,), json_schema_extra={"minItems": 1})
    agents: tuple[Id, ...] = Field(default=(), max_length=100)
    expires_at: Moment | None = None


class TokenInfo(Value):
    """A token without its secret. `is_valid` is true if the token is neither revoked nor
    expired.
    """

    id: str
    name: str
    principal_id: str
    scopes: tuple[Scope, ...]
    agents: tuple[str, ...]
    created_at: AwareDatetime
    created_by: str
    expires_at: AwareDatetime | None
    revoked_at: AwareDatetime | None
    is_valid: bool


class MadeToken(Value):
    """A new token with its secret. No other answer contains the secret."""

    token: TokenInfo
    secret: str = Field(repr=False)


class NewApprover(Value):
    """The data of an approver to create. `scopes` contains `approve`, `admin`, or both."""

    name: Name
    scopes: tuple[Scope, ...] = Field(
        default=(Scope.APPROVE,),
        json_schema_extra={"minItems": 1, "items": {"enum": [Scope.APPROVE, Scope.ADMIN]}},
    )


class ApproverInfo(Value):
    """An approver, without the approver's credential."""

    name: str
    scopes: tuple[Scope, ...]
    created_at: AwareDatetime
    created_by: str
    removed_at: AwareDatetime | None


class MadeApprover(Value):
    """A new approver with the approver's credential. No other answer contains the credential."""

    approver: ApproverInfo
    secret: str = Field(repr=False)


_DONE = {
    "agent.bind": "gave agent {subject} the tool {tool}",
    "agent.create": "made agent {subject}",
    "agent.delete": "deleted agent {subject}",
    "agent.unbind": "took the tool {tool} from agent {subject}",
    "agent.update": "changed agent {subject}",
    "approver.add": "added approver {subject}",
    "approver.init": "made the first approver, {subject}",
    "approver.remove": "removed approver {subject}",
    "call.cancel": "cancelled call {subject} of {principal_id}",
    "policy.load": "loaded the policy {subject}",
    "process.stop": "stopped process {process} in session {subject} of {principal_id}",
    "remembered.remove": "removed the remembered rule {subject}",
    "session.end": "ended session {subject} of {principal_id}",
    "token.new": "made token {name} for {principal_id}",
    "token.revoke": "revoked token {subject}",
    "tool.activate": "switched tool {subject} on",
    "tool.deactivate": "switched tool {subject} off",
    "tool.delete": "deleted tool {subject}",
    "tool.register": "registered tool {subject}",
    "tool.replace": "replaced tool {subject}",
}
"""Maps each action to a description of the change, with placeholders for the change's details."""


class Change(Value):
    """One administrative change: who changed what, and when."""

    seq: int
    at: AwareDatetime
    principal_id: str
    action: str
    subject: str
    details: JsonObject

    @property
    def in_words(self) -> str:
        """A description of what was done, such as `gave agent clerk the tool calculator`. The text
        must be regarded as untrusted, because it contains names that callers chose.
        """
        try:
            return _DONE[self.action].format_map({**self.details, "subject": self.subject})
        except KeyError:  # an action of another engine version
            return f"{self.action} {self.subject}"


# -- the operator's settings of principals -------------------------------------------------

Uid = Annotated[int, Field(ge=0, lt=2**32)]


class PrincipalSettings(Value):
    """The principal id of one or more Unix users, given by their uids."""

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,127}$")
    uids: tuple[Uid, ...] = Field(min_length=1)


def _require_unique_uids(value: tuple[PrincipalSettings, ...]) -> tuple[PrincipalSettings, ...]:
    uids = [uid for principal in value for uid in principal.uids]
    twice = next((uid for uid in uids if uids.count(uid) > 1), None)
    if twice is not None:
        raise ValueError(f"the uid {twice} is given to more than one principal")
    return value


AllPrincipals = Annotated[tuple[PrincipalSettings, ...], AfterValidator(_require_unique_uids)]
