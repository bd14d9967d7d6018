"""Tools for the jail. Imported by the tests on the host, and again inside the jail's child."""

from __future__ import annotations

import asyncio
import os
from decimal import Decimal
from typing import Annotated, Any

from pydantic import Field

from fumehood import ToolError, ToolResult, progress, tool


@tool
def run_code(code: str) -> Any:
    """Run code as a function of a stranger would contain it; answer what it calls `out`."""
    space: dict[str, Any] = {"__name__": __name__}
    exec(code, space)
    return space.get("out")


@tool(memory_limit_mb=64)
def run_in_little_memory(code: str) -> Any:
    """Run code in 64 MB."""
    space: dict[str, Any] = {"__name__": __name__}
    exec(code, space)
    return space.get("out")


@tool(name="add_up")
def add(first: int, second: Annotated[int, Field(le=100)] = 1) -> dict:
    """Add two numbers."""
    return {"sum": first + second, "pid": os.getpid()}


@tool
async def wait_and_double(number: int) -> int:
    """Give way once, then double."""
    await asyncio.sleep(0)
    return 2 * number


@tool
def find_city(name: str) -> dict:
    """Find no city."""
    raise ToolError("CITY_NOT_FOUND", f"No city is called {name}.", details={"name": name})


@tool
def costly() -> ToolResult:
    """Report what was spent."""
    return ToolResult({"done": True}, tokens_used=42, cost=Decimal("0.002"))


@tool
def report(times: int = 2) -> str:
    """Report progress."""
    for number in range(times):
        progress(100 * number / times, f"step {number}")
    return "done"


@tool
def fail_below() -> None:
    """Fail two frames deep, with a path of the host in the message."""
    _fail()


def _fail() -> None:
    raise LookupError(f"nothing in {os.path.dirname(__file__)}/data")


print("a module that writes to stdout when it is imported")
