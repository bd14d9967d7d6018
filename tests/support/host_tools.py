"""Synchronous host functions, imported by the tests and again by the worker process."""

from __future__ import annotations

import os
import subprocess
import time

from fumehood import ToolError, ToolResult, tool


@tool(sandboxed=False)
def who() -> dict:
    """Say which process this is."""
    print("this must not reach the engine's stdout")
    return {"pid": os.getpid(), "parent": os.getppid(), "home": os.environ.get("HOME")}


@tool(sandboxed=False)
def block(note: str, seconds: float = 60) -> None:
    """Start a process in a session of its own, say which, and block."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with open(note, "w") as file:
        file.write(f"{os.getpid()} {child.pid}\n")
    time.sleep(seconds)


@tool(sandboxed=False)
def end(code: int) -> None:
    """End the process."""
    os._exit(code)


@tool(sandboxed=False, idempotent=True)
def end_harmlessly() -> None:
    """End the process, from a tool that may be repeated."""
    os._exit(1)


@tool(sandboxed=False)
def fail(secret: str) -> None:
    """Raise something that is not for the caller."""
    raise ValueError(secret)


@tool(sandboxed=False)
def refuse() -> None:
    """Refuse under a code of its own."""
    raise ToolError("NOT_TODAY", "Come back tomorrow.", retryable=True, details={"day": 1})


@tool(sandboxed=False)
def give() -> ToolResult:
    """Return a result that says what it took."""
    return ToolResult({"a": 1}, tokens_used=7)
