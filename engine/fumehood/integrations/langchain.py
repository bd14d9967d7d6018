"""LangChain: a middleware that requests the engine's decision before each call of an agent's tools.

Needs the extra `langchain`. Invariant: a tool runs only after the decision `allow`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias

import anyio.to_thread
from langchain.agents.middleware import AgentMiddleware, ToolCallRequest
from langchain_core.messages import ToolMessage
from langgraph.types import Command, interrupt

from fumehood.client.sync.client import Client
from fumehood.core.decision import Decision
from fumehood.integrations._gate import refusal, undecided

Answer: TypeAlias = ToolMessage | Command[Any]


class FumehoodApprover(AgentMiddleware):
    """Lets the engine decide on an agent's tool calls: `create_agent(…,
    middleware=[FumehoodApprover()])`.

    This middleware must be the last in the list, because a later middleware could change a call
    after the decision.
    """

    def __init__(
        self, client: Client | None = None, *, interrupts: bool = False, **options: Any
    ) -> None:
        """`options` are passed to `Client.decide`.

        `interrupts` says what happens to a call that waits for approval. If True, the call
        interrupts the graph, which must have a checkpointer. If False, the model receives the
        reason, and can repeat the call.
        """
        super().__init__()
        self._client = client or Client()
        self._interrupts = interrupts
        self._options = options

    def wrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Answer]
    ) -> Answer:
        """Run the tool if the engine allows the call. Otherwise, return the reason as the tool's
        answer.
        """
        while (decision := self._decide(request)).decision == "pending" and self._interrupts:
            interrupt(decision.model_dump(mode="json"))
        reason = refusal(decision)
        return handler(request) if reason is None else _denied(request, reason)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[Answer]]
    ) -> Answer:
        """Do the same as `wrap_tool_call`, without blocking the event loop."""
        ask = partial(anyio.to_thread.run_sync, self._decide, request, abandon_on_cancel=True)
        while (decision := await ask()).decision == "pending" and self._interrupts:
            interrupt(decision.model_dump(mode="json"))
        reason = refusal(decision)
        return await handler(request) if reason is None else _denied(request, reason)

    def _decide(self, request: ToolCallRequest) -> Decision:
        call = request.tool_call
        try:
            return self._client.decide(call["name"], call["args"], **self._options)
        except Exception as fault:
            return Decision(decision="deny", tool=call["name"], reason=undecided(fault))


def _denied(request: ToolCallRequest, reason: str) -> ToolMessage:
    call = request.tool_call
    return ToolMessage(content=reason, name=call["name"], tool_call_id=call["id"], status="error")
