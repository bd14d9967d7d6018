"""Answers of the HTTP interface that combine values of several features, or belong to no feature.

The daemon creates its answers from these classes, its OpenAPI document describes the classes, and
the clients parse answers with them, so daemon, document and clients cannot differ. An answer with
only one field is declared with its operation (`As` in `http/endpoint.py`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import AwareDatetime, RootModel

from fumehood.approvals.model import Approval, ApprovalPage
from fumehood.core.call_log import CallPage, CallRecord
from fumehood.core.envelope import Envelope
from fumehood.core.identity import Scope
from fumehood.core.json_types import JsonObject
from fumehood.core.session import WorkspaceEntry
from fumehood.core.status import CircuitStatus
from fumehood.core.tool import Finding, ToolDefinition
from fumehood.core.value import Value
from fumehood.identity.model import Agent, Binding


class Done(Value):
    """An answer with no data except what the request itself contained, such as an id. The clients'
    methods return None instead of such an answer.
    """


class Pagination(Value):
    """Whether a list has more items after this page, and the cursor of the next page.

    `total_count` is null if the items were not counted.
    """

    has_more: bool
    next_cursor: str | None
    total_count: int | None

    @classmethod
    def of(cls, page: CallPage | ApprovalPage) -> Pagination:
        """Return the pagination of a page of calls or approvals."""
        return cls(**page.model_dump(exclude={"items"}))


class ToolList(Value):
    """One page of a list of tool definitions. `sources` maps each tool's name to the tool's source.

    `unavailable` names the tools that cannot run now, because their sandbox or image is missing.
    """

    items: tuple[ToolDefinition, ...]
    sources: dict[str, str]
    unavailable: tuple[str, ...] = ()
    pagination: Pagination


class LeftOutTool(Value):
    """A tool that was left out of an agent's list, and the first reason why it was left out."""

    name: str
    reason: str


class AgentTools(Value):
    """An agent's tools, in the agent's order and as the agent sees them, and the tools left out."""

    items: tuple[ToolDefinition, ...]
    left_out: tuple[LeftOutTool, ...]
    pagination: Pagination


class AnyToolList(RootModel[ToolList | AgentTools]):
    """A page of tools or, if the request names an `agent_id`, all tools of that agent."""


class ToolDetails(Value):
    """One version of a tool, its source, and the tool's versions, newest first."""

    tool: ToolDefinition
    versions: tuple[str, ...]
    source: str
    circuit: CircuitStatus | None = None
    """The circuit of the service that a REST tool calls: whether requests to the service are
    suspended."""
    findings: tuple[Finding, ...] = ()
    """The rules that protect models and that this tool breaks."""


class ToolWithSource(ToolDefinition):
    """A tool definition and its source.

    `findings` lists the lint rules that the tool breaks. It includes only those rules that protect
    models.
    """

    source: str
    findings: tuple[Finding, ...] = ()


class CallList(Value):
    """A page of calls, newest first."""

    items: tuple[CallRecord, ...]
    pagination: Pagination

    @property
    def page(self) -> CallPage:
        """The same page as a `CallPage`, the type that an embedded engine's methods return."""
        return CallPage(items=self.items, **self.pagination.model_dump())


class CallAnswer(Value):
    """One call with everything that is kept of it, and its approval if it needed one.

    The operator's configuration determines whether `arguments` and `envelope` are kept. The
    envelope of a call that needed approval is always kept. While a call waits for approval, the
    `code` in `call` is REQUIRES_HUMAN_APPROVAL.
    """

    call: CallRecord
    arguments: JsonObject | None = None
    approval: Approval | None = None
    envelope: Envelope | None = None


class CallDetails(Value):
    """One call of any principal, with everything that is kept of the call. Only approvers and
    administrators receive these details.

    `stages_ms` has the duration of each stage, in order. `audit_seq` is the number of the call's
    row in the audit chain (the engine's tamper-evident log). `children` are the calls that the
    call's program made, directly or through the programs of other calls.
    """

    call: CallRecord
    stages_ms: dict[str, float]
    audit_seq: int | None
    approval: Approval | None
    arguments: JsonObject | None
    envelope: Envelope | None
    answer: Literal["shown", "not_kept", "needs_admin"]
    """Whether the envelope is shown, or why not. Answers of calls that needed approval or had an
    idempotency key are always kept, others according to the setting `record.calls`."""
    children: tuple[CallRecord, ...]
    can_repeat: bool
    """Whether the call's arguments are kept, so that it can be repeated as a dry run."""


class ProjectFile(Value):
    """One changed file of a session's project."""

    path: str
    change: Literal["added", "modified", "deleted", "renamed", "mode"]
    bytes: int
    old_path: str | None = None
    """The earlier path of a renamed file."""
    conflict: str | None = None
    """Why the change cannot be applied: the host's file has changed."""


class ProjectDiff(Value):
    """The changes in a session's project since the project was copied into the session.

    `diff` is in git's format, and `truncated` is true if `diff` is incomplete. `unseen` lists the
    paths that are missing from `diff` and are never applied: special files, and links that point
    out of the project.
    """

    diff: str
    files: tuple[ProjectFile, ...]
    truncated: bool
    unseen: tuple[str, ...]


class SessionProcess(Value):
    """A background process of a session, with all processes that it has started.

    `state` is `running` until all of them have ended. `exit_code` and `signal` are those of the
    first process. `lost` is true if the process was killed because memory ran out.
    """

    name: str
    state: Literal["running", "ended"]
    exit_code: int | None
    signal: int | None
    lost: bool
    started_at: AwareDatetime

    @property
    def ended_by(self) -> str:
        """How the first process ended, such as `exit 1`, or an empty string while it runs."""
        if self.lost:
            return "lost"
        if self.signal is not None:
            return f"signal {self.signal}"
        return "" if self.exit_code is None else f"exit {self.exit_code}"


class ProcessOutput(Value):
    """A piece of a process's output.

    `offset` is the position at which the next piece begins. `skipped` is the number of bytes before
    `text` that are no longer kept.
    """

    text: str
    offset: int
    skipped: int
    ended: bool


class SessionFileList(Value):
    """A page of the entries in a session's workspace, sorted by path."""

    items: tuple[WorkspaceEntry, ...]
    pagination: Pagination


class WrittenFile(Value):
    """A file in the workspace, after it was written."""

    path: str
    size: int


class UnpackedArchive(Value):
    """The directory of a workspace into which an archive was unpacked, and the unpacked files."""

    path: str
    files: int
    size: int
    """Bytes of all files."""


class CancelledCall(Done):
    """A call that was cancelled. Nothing of the call is running any more."""

    call_id: str
    cancelled: bool


class AgentDetails(Value):
    """An agent and its tools, in the agent's order."""

    agent: Agent
    tools: tuple[Binding, ...]


class Deleted(Done):
    """The name or id of what was deleted."""

    deleted: str


class Whoami(Value):
    """The principal of a credential, and its scopes."""

    principal_id: str
    scopes: tuple[Scope, ...]


class ApprovalList(Value):
    """A page of approvals, newest first."""

    items: tuple[Approval, ...]
    pagination: Pagination

    @property
    def page(self) -> ApprovalPage:
        """The same page as an `ApprovalPage`, the type that an embedded engine's methods return."""
        return ApprovalPage(items=self.items, **self.pagination.model_dump())


class ApprovalChanges(Value):
    """Counters of approvals. A client compares `changes` with an earlier value to detect changes.

    `changes` is the number of changes of approvals since the engine started. `pending` is the
    number of approvals that wait for a decision now.
    """

    changes: int
    pending: int


class AuditRecord(Value):
    """One row of the audit chain, the engine's tamper-evident log.

    `mac` authenticates the exact bytes of `body`, which is JSON. `before` is the `mac` of the
    previous row.
    """

    seq: int
    key_id: str
    before: str | None
    mac: str
    body: str


class AuditFinding(Value):
    """A place at which the audit chain is not intact."""

    seq: int
    problem: str
    message: str


class AuditVerdict(Value):
    """The result of verifying the whole audit chain.

    `anchored_to` is the number of the newest row that an anchor confirms. An anchor is a copy of a
    row's `mac` that is kept outside the database. Only the first findings are listed; `problems` is
    the number of all findings.
    """

    intact: bool
    rows: int
    first_seq: int | None
    last_seq: int | None
    head: str | None
    key_ids: tuple[str, ...]
    anchors: int
    anchored_to: int | None
    problems: int
    findings: tuple[AuditFinding, ...]


class AuditRotation(Value):
    """A change of the key that authenticates the audit chain. The row that records this change is
    the last row with the previous key.
    """

    seq: int
    key_id: str
    previous_key_id: str


class AuditPage(Value):
    """A page of rows of the audit chain, oldest first. To get the next page, send
    `pagination.next_cursor` as the query's `after`.
    """

    items: tuple[AuditRecord, ...]
    pagination: Pagination
