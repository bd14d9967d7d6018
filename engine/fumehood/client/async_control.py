"""`AsyncControlClient`: the methods of the control socket that do more than send one request.

All other methods are generated, in `async_control_operations.py`.
"""

from __future__ import annotations

from pathlib import Path

from fumehood.answers import ApprovalChanges
from fumehood.approvals.model import LONGEST_POLL_S, Approval, NewDecision, RememberWish
from fumehood.client.api_request import (
    ANSWER_GRACE_S,
    CONNECT_TIMEOUT_S,
    ApiRequest,
    Refused,
    address,
    ask,
    ask_for_bytes,
    data_of,
    field_of,
    json_of,
    query_text,
)
from fumehood.client.async_client import AsyncBaseClient
from fumehood.client.async_control_operations import (
    AsyncControlAgents,
    AsyncControlApprovals,
    AsyncControlCalls,
    AsyncControlOperations,
    AsyncControlSessions,
)
from fumehood.client.exchange import Write
from fumehood.core.envelope import Envelope
from fumehood.core.json_types import JsonObject
from fumehood.core.returned_file import parse_blob_url
from fumehood.core.session import TURN_S
from fumehood.identity.model import Agent


class AsyncControlClient(AsyncBaseClient, AsyncControlOperations):
    """A client of the control socket, for approvals, agents, tools, tokens, approvers, audit and
    cache.

    Raises:
        DaemonUnavailable: from every method, if no server answers in time.
        Refused: from every method, if the engine refuses the request, for example because the
            credential lacks `admin`.
        ValueError: from every method, if a name or id is invalid; nothing was sent.
    """

    _is_control = True

    def __init__(
        self,
        socket_path: Path | str | None = None,
        *,
        credential: str,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        grace_s: float = ANSWER_GRACE_S,
    ) -> None:
        """Create a client, without connecting to the engine.

        The parameters have the same meaning as in `AsyncClient`, but `credential` is required.
        """
        super().__init__(
            socket_path,
            credential=credential,
            connect_timeout_s=connect_timeout_s,
            grace_s=grace_s,
        )

    @property
    def agents(self) -> AsyncControlledAgents:
        """The methods for agents and their tools."""
        return AsyncControlledAgents(self._transport)

    @property
    def approvals(self) -> AsyncControlledApprovals:
        """The methods for the approvals of all principals, and for decisions on approvals."""
        return AsyncControlledApprovals(self._transport)

    @property
    def calls(self) -> AsyncControlledCalls:
        """The methods for the calls of all principals."""
        return AsyncControlledCalls(self._transport)

    @property
    def sessions(self) -> AsyncControlledSessions:
        """The methods for the sessions of all principals."""
        return AsyncControlledSessions(self._transport)


class AsyncControlledAgents(AsyncControlAgents):
    """The methods of `AsyncControlClient.agents`, which act on agents and their tools."""

    async def enable(self, agent_id: str) -> Agent:
        """Allow calls on behalf of an agent again, after `disable`."""
        return await self.update(agent_id, is_enabled=True)

    async def disable(self, agent_id: str) -> Agent:
        """Refuse every call on behalf of an agent."""
        return await self.update(agent_id, is_enabled=False)


class AsyncControlledApprovals(AsyncControlApprovals):
    """The methods of `AsyncControlClient.approvals`, which act on the approvals of all principals.

    `version` is the version of the approval that the approver has seen. If the approval has changed
    since then, the engine refuses the decision, and the method raises Refused with the code
    IDEMPOTENCY_CONFLICT. If `version` is None, the decision applies to any version.
    """

    async def approve(
        self,
        approval_id: str,
        *,
        version: int | None,
        reason: str | None = None,
        arguments: JsonObject | None = None,
        remember: RememberWish | None = None,
        action_digest: str | None = None,
    ) -> Approval:
        """Approve a call. If `arguments` are given, the call runs with them instead of its own
        arguments.

        `remember` is a request to allow matching calls without approval from now on.
        `action_digest` is the digest that `preview_edit` returned for `arguments`. If the action
        has changed since that preview, the engine refuses the decision.
        """
        decision = NewDecision(
            decision="approve", reason=reason, arguments=arguments, remember=remember,
            action_digest=action_digest,
        )  # fmt: skip
        return await self._decide(approval_id, decision, version)

    async def deny(
        self, approval_id: str, *, version: int | None, reason: str | None = None
    ) -> Approval:
        """Deny a call. The model receives the reason."""
        decision = NewDecision(decision="deny", reason=reason)
        return await self._decide(approval_id, decision, version)

    async def next_change(self, after: int = -1, *, wait_s: float = LONGEST_POLL_S) -> int:
        """Wait until approvals have changed, and return how many changes there have been so far.

        `after` is the number that an earlier call of this method returned. The method returns when
        the number differs from `after`, or after `wait_s` seconds (25 at most). With the default of
        `after`, it returns immediately.
        """
        return (await self.changes(after, wait_s=wait_s)).changes

    async def changes(self, after: int = -1, *, wait_s: float = LONGEST_POLL_S) -> ApprovalChanges:
        """Wait until approvals have changed. Return how many changes there have been so far, and
        how many approvals are pending.

        `after` is the number of changes that an earlier call returned. The method returns when the
        number differs from `after`, or after `wait_s` seconds (25 at most). With the default of
        `after`, it returns immediately.
        """
        query = {"after": after, "wait": wait_s}
        request = ask(
            "GET", data_of(ApprovalChanges), "approvals", "changes", query=query, work_s=wait_s
        )
        return await self._transport.send(request)

    async def _decide(
        self, approval_id: str, decision: NewDecision, version: int | None
    ) -> Approval:
        read, body = field_of("approval", Approval), json_of(decision)
        headers = {"if-match": "*" if version is None else f'"{version}"'}
        parts = "approvals", approval_id, "decision"
        return await self._transport.send(ask("POST", read, *parts, body=body, headers=headers))


class AsyncControlledCalls(AsyncControlCalls):
    """The methods of `AsyncControlClient.calls`, which act on the calls of all principals."""

    async def dry_run(self, call_id: str) -> Envelope:
        """Make a dry run of an earlier call that needed approval, and return the answer. The dry
        run has the rights of that call's caller.
        """
        path = address("calls", call_id, "dry-run")
        return await self._transport.send(ApiRequest("POST", path, _dry_run_answer))

    async def blob(self, call_id: str, url: str) -> bytes:
        """Fetch a whole blob of the answer to a call. `url` is the blob's `url` in that answer.

        Raises:
            ValueError: `url` is not the address of a blob; nothing was sent.
        """
        blob = parse_blob_url(url)
        given = {"expires": blob.expires, "signature": blob.signature}
        path = address("calls", call_id, "blobs", blob.blob_id) + query_text(given)
        return await self._transport.fetch(ask_for_bytes(path))


class AsyncControlledSessions(AsyncControlSessions):
    """The methods of `AsyncControlClient.sessions`, which act on the sessions of all principals."""

    async def download_file(self, session_id: str, path: str, write: Write) -> None:
        """Pass the content of a session's file to `write`, piece by piece."""
        parts = address("sessions", session_id, "files", *path.split("/"))
        await self._transport.download(ask_for_bytes(parts, TURN_S), write)


def _dry_run_answer(raw: bytes) -> Envelope:
    """Parse the envelope of a dry run. Raises Refused if the engine refused the dry run."""
    from fumehood.protocol.messages import decode_envelope

    envelope = decode_envelope(raw)
    if envelope.metadata.call_id is None:
        raise Refused(envelope)
    return envelope
