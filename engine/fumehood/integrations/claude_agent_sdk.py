"""Claude Agent SDK: a permission callback that lets the engine decide on an agent's tool calls.

Needs the extra `claude-agent-sdk`. Invariant: a call runs only if the engine allows it. The
exceptions are tools in `allowed_tools` and the mode `bypassPermissions`, for which the SDK does not
use the callback.
"""

from __future__ import annotations

from typing import Any

from claude_agent_sdk import (
    CanUseTool,
    PermissionResult,
    PermissionResultAllow,
    PermissionResultDeny,
    ToolPermissionContext,
)

from fumehood.client.async_client import AsyncClient
from fumehood.core.json_types import JsonObject
from fumehood.integrations._gate import denial


def fumehood_permissions(
    client: AsyncClient | None = None, *, context: JsonObject | None = None, **options: Any
) -> CanUseTool:
    """Return a permission callback, for use as
    `ClaudeAgentOptions(can_use_tool=fumehood_permissions())`.

    The effect of a tool call can depend on more than its arguments, for example on the working
    directory. `context` contains all such values. `options` are passed to `AsyncClient.decide`.
    """
    told = {"client": "claude-agent-sdk", **(context or {})}

    async def can_use_tool(
        tool_name: str, tool_input: JsonObject, _: ToolPermissionContext
    ) -> PermissionResult:
        reason = await denial(client, tool_name, tool_input, told, options)
        if reason is not None:
            return PermissionResultDeny(message=reason)
        return PermissionResultAllow(updated_input=tool_input)

    return can_use_tool
