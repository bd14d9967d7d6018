"""Data classes for approvals and their settings. An approval is the record of a call that needs a
human's approval.

`approvals/store.py` stores approvals and defines each change. An approval changes its state in
these ways:

    pending → approved | denied | expired | cancelled
    approved → started | failed (a gate refused the call) | expired | cancelled
    started → done | failed | cancelled | interrupted | expired (the workspace had changed)
    interrupted → done | failed (by a human)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Literal

from pydantic import AwareDatetime, Field, model_validator

from fumehood.core.call import Need
from fumehood.core.json_types import JsonObject
from fumehood.core.value import Value

MAX_REASON_CHARACTERS = 1000
LONGEST_POLL_S = 25.0
"""Maximum number of seconds that one request waits for a change of an approval."""

SESSION = "session"
PROGRAM: Need = "program"
TRIAL: Need = "trial"
OUTLIVED: Mapping[str, str] = MappingProxyType(
    {
        SESSION: "Its session ended before anybody decided",
        PROGRAM: "The engine was restarted, and the program that wanted to send it has ended",
        TRIAL: "The engine was restarted, and the effect of this trial is not kept",
    }
)
"""Something that a waiting call needs → the message that explains why the call can no longer run
after this has ended. It is the call's session, the program that made the request, or the effect of
the call's trial. The key is stored in `Approval.changed`."""


class ApprovalState(StrEnum):
    """The state of an approval and of the call that needs it."""

    PENDING = "pending"
    APPROVED = "approved"
    """The call was approved, and has not started yet."""
    DENIED = "denied"
    EXPIRED = "expired"
    """The call was not decided or not started in time, its action changed, or something that the
    call needs ended."""
    CANCELLED = "cancelled"
    STARTED = "started"
    """The call has used up the approval, and is running."""
    DONE = "done"
    FAILED = "failed"
    """The call's answer is an error, because the call ran and failed, or because a gate refused the
    call after the approval."""
    INTERRUPTED = "interrupted"
    """The engine ended while the call ran, so the call may have had an effect. Only a human can
    resolve the approval."""


OPEN_STATES = frozenset({ApprovalState.PENDING, ApprovalState.APPROVED, ApprovalState.STARTED})
"""The states in which the call has not ended."""


class DecisionRecord(Value):
    """One approver's decision on one approval."""

    at: AwareDatetime
    approver: str
    """The id of the approver's principal, such as `approver:alice`."""
    channel: str
    """The interface through which the decision was sent, such as `control` or `webhook`."""
    decision: Literal["approve", "deny"]
    action_digest: str
    """Digest of the action on which the approver decided. If the approver edited the call, it is
    the digest of the edited action."""
    reason: str | None = None
    edited: bool = False
    is_self_approval: bool = False


class Approval(Value):
    """The approval of one call: its state, what the call would do, and the approvers' decisions.

    `version` grows with every visible change, and is used as the `ETag`. The caller of the call
    receives a shortened approval. It omits `approvers`, `decisions`, `sends`, `binding`, and the
    arguments that the agent's configuration fixes.
    """

    id: str
    version: int
    state: ApprovalState
    call_id: str
    trace_id: str
    tool: str
    tool_version: str
    principal_id: str
    agent_id: str | None
    session_id: str | None
    arguments: JsonObject
    """All effective arguments of the call. After an edit, these are the edited arguments."""
    asked_arguments: JsonObject | None = None
    """The effective arguments of the original call if an approver has edited them, otherwise
    null."""
    sends: JsonObject | None = None
    """What the call sends to another service. It is the request of a REST tool, or the server of an
    MCP tool. Secrets appear as `${secret:NAME}`."""
    preview: JsonObject | None
    """For a tool with a preview, the changes that the call would make to the workspace. For an
    `external:` tool, the call's context."""
    previewed_at: AwareDatetime | None = None
    """The time at which the preview was computed."""
    rule: str
    asked_by: tuple[str, ...] = ()
    """The ids of all policy rules that require the approval. Empty if a default requires it."""
    reason: str | None
    """Text for approvers. It contains the policy rule's reason, the limit that the call would
    exceed, and the names of secrets without a usable value."""
    budget: JsonObject | None = None
    """The budget that the call may exceed if it is approved, in its state at the time of the
    request for approval."""
    dangerous: bool
    approvers: tuple[str, ...]
    quorum: int
    decisions: tuple[DecisionRecord, ...]
    policy_version: str
    action_digest: str
    binding: JsonObject | None
    """Everything that determines what the call will do. `action_digest` is the hash of this
    document."""
    created_at: AwareDatetime
    expires_at: AwareDatetime
    decided_at: AwareDatetime | None = None
    started_at: AwareDatetime | None = None
    ended_at: AwareDatetime | None = None
    code: str | None = None
    """The error code of the call's answer, or `OK` if the call succeeded. Null if there is no
    answer."""
    changed: tuple[str, ...] = ()
    """Names of the fields of `binding` that changed before the call started. If something that the
    call needs ended before the call started, this is instead `session`, `program` or `trial`."""
    counted: tuple[str, ...] = ()
    """Ids of the principals whose approval of the current action counts. While the approval is
    pending, only principals who may still approve are included."""
    stuck: str | None = None
    """Why the quorum cannot be reached now, or None if the quorum can be reached."""
    has_answer: bool = False
    """Whether the call's envelope is stored."""

    @property
    def outlived(self) -> str | None:
        """The thing that the waiting call needed and that has ended: `session`, `program` or
        `trial`. None if nothing that the call needs has ended.
        """
        return next((one for one in self.changed if one in OUTLIVED), None)

    @property
    def outlived_in_words(self) -> str:
        """A message that explains why the waiting call can no longer run. Empty if everything that
        the call needs still exists.
        """
        return OUTLIVED[self.outlived] if self.outlived is not None else ""

    @property
    def yes_votes(self) -> frozenset[str]:
        """The ids of the principals who approved the call's action in its present form."""
        return yes_votes(self.decisions, self.action_digest)


def yes_votes(decisions: Iterable[DecisionRecord], action_digest: str) -> frozenset[str]:
    """Return the ids of the approvers whose newest decision approves exactly the action with this
    digest.
    """
    newest = {one.approver: one for one in decisions}
    return frozenset(
        one.approver
        for one in newest.values()
        if one.decision == "approve" and one.action_digest == action_digest
    )


class RememberWish(Value):
    """An approver's request to allow matching calls without approval from now on. The request is
    stored as a rule that administrators can review.

    With the scope `session`, the rule holds only in the call's session, so the call must have a
    session. With the scope `until`, it holds until the time `until`. `uses` is the number of calls
    that the rule allows; None means any number.

    `arguments` names the arguments that must have the approved values in a matching call. If it is
    None or names all arguments, a matching call has no further arguments. If it names only some,
    all other arguments may have any value. For a dangerous tool, it must be None or name all
    arguments. For a program's network request, `method`, `host`, `port` and `path` are enough.
    """

    scope: Literal["session", "until"] = "session"
    until: AwareDatetime | None = None
    uses: int | None = Field(default=None, ge=1, le=1_000_000, strict=True)
    arguments: tuple[str, ...] | None = Field(default=None, max_length=100)

    @model_validator(mode="after")
    def _has_an_end(self) -> RememberWish:
        if (self.scope == "until") != (self.until is not None):
            raise ValueError("`until` is needed for the scope `until`, and for no other")
        return self


class NewDecision(Value):
    """An approver's decision on a call.

    If `arguments` are given, they replace the call's arguments, and are validated like those of a
    new call. `reason` is shown to the model if the call is denied. `action_digest` is the digest of
    the action that the approver saw. If the call's action now has another digest, the decision is
    refused.
    """

    decision: Literal["approve", "deny"]
    reason: str | None = Field(default=None, max_length=MAX_REASON_CHARACTERS)
    arguments: dict[str, Any] | None = None
    remember: RememberWish | None = None
    action_digest: str | None = Field(default=None, max_length=100)

    @model_validator(mode="after")
    def _only_a_yes_changes(self) -> NewDecision:
        if self.decision == "deny" and (self.arguments is not None or self.remember is not None):
            raise ValueError("a denial takes no `arguments` and no `remember`")
        return self


class NewEdit(Value):
    """A request to preview an edit. `arguments` replace all arguments of the call, as in
    `NewDecision`.
    """

    arguments: dict[str, Any]


class OneOfSeveral(Value):
    """One decision in a batch of decisions. If one of them is refused, none takes effect."""

    approval_id: str = Field(max_length=100)
    version: int | None = Field(default=None, strict=True)
    """The version of the approval that the approver saw, as in `If-Match`. None accepts any
    version."""
    decision: NewDecision


class SeveralDecisions(Value):
    """The body of `POST /v1/approvals/decisions`."""

    items: tuple[OneOfSeveral, ...] = Field(min_length=1, max_length=100)


class Resolution(Value):
    """A human's finding that an interrupted call succeeded (`done`) or failed (`failed`). An
    interrupted call was running when its engine ended, so the engine does not know its outcome.
    """

    outcome: Literal["done", "failed"]
    note: str | None = Field(default=None, max_length=MAX_REASON_CHARACTERS)


class ApprovalQuery(Value):
    """A request to list approvals, newest first. `cursor` is the id of the last approval on the
    previous page.
    """

    state: ApprovalState | None = None
    tool: str | None = Field(default=None, max_length=160)
    agent: str | None = Field(default=None, max_length=128)
    call_id: str | None = Field(default=None, max_length=128)
    limit: int = Field(default=50, ge=1, le=100)
    cursor: str | None = Field(default=None, max_length=100)


class ApprovalPage(Value):
    """One page of a list of approvals. In each listed approval, the field `binding` (the document
    with everything that determines what the call will do) is null.
    """

    items: tuple[Approval, ...]
    has_more: bool
    next_cursor: str | None
    total_count: int | None
    """The number of approvals on all pages together. None if there is more than one page."""


class RememberedRule(Value):
    """A remembered rule: it allows matching calls without approval."""

    id: str
    tool: str
    principal_id: str
    agent_id: str | None
    session_id: str | None
    arguments: JsonObject
    """Argument → the value that this argument must have in a matching call."""
    any_others: bool = False
    """Whether a matching call may have arguments that are not in `arguments`."""
    rule: str
    """The ids of the policy rules that the remembered rule satisfies, separated by `, `. The
    remembered rule does not satisfy any other rules."""
    definition: str
    """Hash of the tool's definition, the call's context, and the options that affect how the call
    runs. If any of these changes, calls need approval again."""
    approval_id: str
    created_by: str
    created_at: AwareDatetime
    expires_at: AwareDatetime | None
    uses_left: int | None
    used: int
    removed_at: AwareDatetime | None


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """The request of a stored call. The call is run later from this request."""

    arguments: JsonObject
    """The arguments that the caller sent, without the agent's defaults and fixed arguments."""
    options: JsonObject
    token_id: str | None
    expected: str | None = None
    """The state of the workspace (`Effect.base`) for which the call's effect was previewed."""
    may_exceed: tuple[str, ...] = ()
    """The value of `Decision.may_exceed` in the policy's decision that required approval."""
    hidden: tuple[str, ...] = ()
    """Names of the arguments that the agent's configuration fixes and hides from the caller."""
    is_program: bool = False
    """Whether the program that embeds the engine made the call."""
    parent_id: str | None = None
    """If a program in the sandbox made this call, the id of the call that runs the program.
    Otherwise None."""
    context: JsonObject | None = None
    """The context of a call of an `external:` tool."""
    traceparent: str | None = None
    """The caller's trace span to which the call belongs, as the text of a `traceparent`."""
    needs: Need | None = None
    """Set if the call has a held action, which runs after approval instead of the tool. The value
    says what the held action needs (a program or a trial). The held action exists only in the
    memory of the engine, so it is lost if the engine ends."""

    @property
    def document(self) -> JsonObject:
        """The request as JSON, in the form that the database stores."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(frozen=True, slots=True)
class StoredApproval:
    """An approval, together with further fields that only the engine uses."""

    approval: Approval
    request: StoredRequest
    idempotency_key: str | None = None
    answer: str | None = None
    """The call's envelope as JSON, or None if there is none."""
    repeat_key: str | None = None
    """A key of the call. A later call with the same key counts as a repeat of this call. None if no
    later call can be a repeat."""


def own_view(stored: StoredApproval) -> Approval:
    """Return an approval in the form that its caller may see.

    This form omits the binding, the approvers, their decisions, what the call sends, and the
    arguments that the agent's configuration fixes.
    """
    approval = stored.approval

    def shown(arguments: JsonObject) -> JsonObject:
        hidden = stored.request.hidden
        return {name: value for name, value in arguments.items() if name not in hidden}

    asked = approval.asked_arguments
    return approval.model_copy(
        update={
            "arguments": shown(approval.arguments),
            "asked_arguments": None if asked is None else shown(asked),
            "sends": None,
            "binding": None,
            "approvers": (),
            "decisions": (),
        }
    )


# -- settings ------------------------------------------------------------------------------


class ApprovalSettings(Value):
    """The operator's settings of approvals: time limits, quotas of waiting calls, and
    self-approval.
    """

    expire_seconds: float = Field(default=3600, ge=1, le=30 * 86_400)
    """A call expires if nobody decides on it within this many seconds."""
    start_within_seconds: float = Field(default=300, ge=1, le=86_400)
    """An approved call expires if it does not start within this many seconds."""
    warn_seconds: float = Field(default=300, ge=0, le=86_400)
    """A warning is sent this many seconds before an approval expires."""
    max_wait_seconds: float = Field(default=600, ge=1, le=3600)
    """Maximum number of seconds for which a call with `wait_for_approval` keeps its connection
    open."""
    max_pending: int = Field(default=10_000, ge=1, le=1_000_000)
    max_pending_per_principal: int = Field(default=1000, ge=1, le=1_000_000)
    max_pending_mb_per_principal: int = Field(default=64, ge=1, le=100_000)
    """Maximum disk space in MiB for the records of one principal's waiting calls."""
    kept_days: int = Field(default=90, ge=1, le=3650)
    repeat_seconds: float = Field(default=86_400, ge=0, le=30 * 86_400)
    """For this many seconds after a call's end, repeats of the call get its answer, unless the
    answer was already fetched."""
    allow_self_approval: bool = False
    """Whether a principal may approve its own call. The decision is then recorded as a
    self-approval."""
    url: str | None = Field(default=None, max_length=500)
    """Address of the web page for one approval, with `{id}` in place of the approval's id. Callers
    receive it as `approval_url`."""
