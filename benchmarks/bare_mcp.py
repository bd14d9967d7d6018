"""The official library's server over stdio, with one tool that does nothing.

It has the schemas of the calculator, because the library's client checks results against them.
"""

from __future__ import annotations

from typing import Any

import anyio
import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from fumehood.interpreter.schemas import EXPRESSION_OUTPUT

TOOL = types.Tool(
    name="calculator", input_schema={"type": "object"}, output_schema=EXPRESSION_OUTPUT
)
ANSWER = {"value": 1144, "text": "1144"}


async def list_tools(*_: Any) -> types.ListToolsResult:
    return types.ListToolsResult(tools=[TOOL])


async def call_tool(*_: Any) -> types.CallToolResult:
    text = types.TextContent(type="text", text='{"value": 1144, "text": "1144"}')
    return types.CallToolResult(content=[text], structured_content=ANSWER)


async def main() -> None:
    server = Server("bare", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


if __name__ == "__main__":
    anyio.run(main)
