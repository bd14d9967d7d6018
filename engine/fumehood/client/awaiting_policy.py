"""The policy, to be awaited: `AsyncControlClient.policy`."""

from __future__ import annotations

from fumehood.client.requests import control
from fumehood.client.transport import AwaitingTransport
from fumehood.core.json_types import JsonObject
from fumehood.policy.model import Explanation, PolicyStatus


class AsyncControlledPolicy:
    """The rules of the engine. A part of `AsyncControlClient`."""

    def __init__(self, transport: AwaitingTransport) -> None:
        self._transport = transport

    async def show(self) -> PolicyStatus:
        """The rules that decide now, and how often those in shadow mode would have."""
        return await self._transport.send(control.show_policy())

    async def explain(
        self,
        tool: str,
        arguments: JsonObject | None = None,
        *,
        principal_id: str | None = None,
        agent_id: str | None = None,
        session_id: str | None = None,
    ) -> Explanation:
        """What the rules say of a call that is not made, and what each has to do with it."""
        request = control.explain(
            tool, arguments, principal_id=principal_id, agent_id=agent_id, session_id=session_id
        )
        return await self._transport.send(request)

    async def reload(self) -> PolicyStatus:
        """Let the engine read the file now; a faulty one is refused and the old rules stay."""
        return await self._transport.send(control.reload_policy())
