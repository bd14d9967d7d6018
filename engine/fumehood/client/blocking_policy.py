"""The policy: `ControlClient.policy`."""

from __future__ import annotations

from fumehood.client.requests import control
from fumehood.client.transport import BlockingTransport
from fumehood.core.json_types import JsonObject
from fumehood.policy.model import Explanation, PolicyStatus


class ControlledPolicy:
    """The rules of the engine. A part of `ControlClient`."""

    def __init__(self, transport: BlockingTransport) -> None:
        self._transport = transport

    def show(self) -> PolicyStatus:
        """The rules that decide now, and how often those in shadow mode would have."""
        return self._transport.send(control.show_policy())

    def explain(
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
        return self._transport.send(request)

    def reload(self) -> PolicyStatus:
        """Let the engine read the file now; a faulty one is refused and the old rules stay."""
        return self._transport.send(control.reload_policy())
