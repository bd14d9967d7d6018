"""Claude Agent SDK: a permission callback, so that the engine decides about its agent's tools.

Needs the extra `claude-agent-sdk`. Invariant: a call is allowed by an answer of the engine only.
The SDK does not call it for `allowed_tools` or with `bypassPermissions`.
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
    """Make a callback: `ClaudeAgentOptions(can_use_tool=fumehood_permissions())`.

    `context` is everything else that determines the effect of the tools, such as the directory.
    `options` are those of `AsyncClient.decide`.
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
