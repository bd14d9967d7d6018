"""A real MCP server, made with the SDK: over stdio, or `http PORT`.

Run by tests as a program.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import anyio
from mcp.server.mcpserver import Context, Image, MCPServer

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360000002000001e221bc330000000049454e44ae426082"
)
server = MCPServer("tester")


def note(marker: str, text: str) -> None:
    Path(marker).write_text(text)


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def say(text: str) -> str:
    """Say a text."""
    return text


@server.tool()
def variable(name: str) -> str:
    """Show a variable of the server's environment."""
    return os.environ.get(name, "")


@server.tool()
def whoami() -> str:
    """Show the server's process and what it can reach."""
    return f"{os.getpid()} {Path('/etc/hostname').read_text().strip()}"


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("the drawer is empty")


@server.tool()
def draw() -> Image:
    """Draw a pixel."""
    return Image(data=PIXEL, format="png")


@server.tool()
async def count(to: int, ctx: Context[Any]) -> str:
    """Count, and say how far it is."""
    for number in range(1, to + 1):
        await ctx.report_progress(number, to, f"at {number}")
    return f"counted to {to}"


@server.tool()
async def wait(marker: str) -> str:
    """Wait for ever; note in a file that it began, and that it was cancelled."""
    note(marker, "began")
    try:
        await anyio.sleep_forever()
    except anyio.get_cancelled_exc_class():
        note(marker, "cancelled")
        raise
    return ""


@server.tool()
def big(size: int) -> str:
    """Answer with a long text."""
    return "x" * size


@server.tool()
def die() -> str:
    """End the server in the middle of a call."""
    os._exit(3)


@server.tool()
async def grow(ctx: Context[Any]) -> str:
    """Get another tool."""

    def grown() -> str:
        """A tool that was not there before."""
        return "grown"

    server.add_tool(grown)
    await ctx.notify_tools_changed()
    return "done"


if __name__ == "__main__":
    if "http" in sys.argv:
        server.run("streamable-http", port=int(sys.argv[-1]))
    else:
        server.run()
