"""CrewAI: a hook that requests the engine's decision before each call of a crew's tools.

Needs the extra `crewai`. Invariant: a tool runs only after the decision `allow`. CrewAI would run a
tool even if the hook raised an error, so the hook turns every error into a refusal.
"""

from __future__ import annotations

from typing import Any, Self

from crewai.hooks import (
    ToolCallHookContext,
    register_after_tool_call_hook,
    register_before_tool_call_hook,
    unregister_after_tool_call_hook,
    unregister_before_tool_call_hook,
)

from fumehood.client.sync.client import Client
from fumehood.integrations._gate import refusal, undecided


class FumehoodApprover:
    """Lets the engine decide on the tool calls of all crews in this process: `with
    FumehoodApprover(): …`.

    Register all other hooks first, because a hook that is registered later could change a call
    after the decision.
    """

    def __init__(self, client: Client | None = None, **options: Any) -> None:
        """`options` are passed to `Client.decide`."""
        self._client = client or Client()
        self._options = options
        self._reasons: dict[int, str] = {}
        """Maps the `id()` of a blocked call's arguments to the reason why the call was blocked.
        `after` removes the reason and returns it to the model."""

    def __enter__(self) -> Self:
        register_before_tool_call_hook(self.before)
        register_after_tool_call_hook(self.after)
        return self

    def __exit__(self, *exc: object) -> None:
        unregister_before_tool_call_hook(self.before)
        unregister_after_tool_call_hook(self.after)

    def before(self, context: ToolCallHookContext) -> bool | None:
        """Return None if the engine allows the call. Otherwise, return False, which makes CrewAI
        block the call.
        """
        self._reasons.pop(id(context.tool_input), None)
        try:
            decision = self._client.decide(
                context.tool_name, dict(context.tool_input), **self._options
            )
            reason = refusal(decision)
        except Exception as fault:
            reason = undecided(fault)
        if reason is None:
            return None
        self._reasons[id(context.tool_input)] = reason
        return False

    def after(self, context: ToolCallHookContext) -> str | None:
        """Return the reason, as a text for the model, if `before` has blocked the call. Otherwise,
        return None.
        """
        return self._reasons.pop(id(context.tool_input), None)
