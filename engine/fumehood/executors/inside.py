"""Inside: how a tool's function is imported and called in the process where it runs.

Loaded by the jail's child and by the worker process, never by the engine. Takes names and
JSON, gives one reply as JSON: `{"result": {data, tokens_used, cost}}` or `{"error": {kind,
…}}`. Invariant: whatever the function returns or raises, the reply is plain JSON that every
reader of this engine understands. What it says is a claim; the host's side validates it.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import pickle
from collections.abc import AsyncGenerator, Generator
from functools import cache
from types import TracebackType
from typing import Any, Protocol

from fumehood.core.call import ToolResult
from fumehood.core.errors import ArgumentsRefused, ToolError
from fumehood.core.json_types import JsonObject
from fumehood.executors.parts import Parts, Report, TooManyParts, Unfit, plain, reports_to

MAX_MESSAGE_CHARACTERS = 2000
MAX_FRAMES = 20


class BindableTool(Protocol):
    """What `@tool` makes."""

    def bind(self, arguments: JsonObject) -> dict[str, Any]: ...

    def function(self, **arguments: Any) -> Any: ...


def answer(
    module: str,
    name: str,
    arguments: JsonObject,
    *,
    pickled: str = "",
    max_depth: int,
    report: Report | None = None,
    parts: Parts | None = None,
) -> JsonObject:
    """Import `module:name`, call it with checked types, and describe how that went.

    `pickled` is the function itself, by the host, in base64: it is unpickled once in a process.
    With `parts` it yields its result.

    Raises:
        MemoryError: unchanged; the caller can report it without memory.
    """
    try:
        found = _unpickled(pickled) if pickled else getattr(importlib.import_module(module), name)
        with reports_to(report):
            returned = _call(found, arguments, parts)
        return {"result": _result(returned, max_depth)}
    except MemoryError:
        raise
    except Unfit:
        return _error("unfit")
    except TooManyParts:
        return _error("output", message="the parts are over the output limit")
    except ArgumentsRefused as error:
        return _error("arguments", message=error.message, fields=list(error.fields))
    except ToolError as error:
        return _refusal(error, max_depth)
    except BaseException as error:  # its own exit and interrupt, too, are its failure
        return _failure(error, module)


@cache
def _unpickled(pickled: str) -> BindableTool:
    """The function that the host has pickled; its globals live as long as this process."""
    found: BindableTool = pickle.loads(base64.b64decode(pickled))  # noqa: S301  # the host's own
    return found


def _call(found: BindableTool, arguments: JsonObject, parts: Parts | None) -> Any:
    returned = found.function(**found.bind(arguments))
    if parts is not None and isinstance(returned, Generator):
        return parts.collect(returned)
    if parts is not None and isinstance(returned, AsyncGenerator):
        returned = parts.collect_async(returned)
    # By its type: nothing of the value's own runs, which may lie about its class.
    return asyncio.run(_wait_for(returned)) if hasattr(type(returned), "__await__") else returned


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


def _result(returned: Any, max_depth: int) -> JsonObject:
    result = ToolResult.of(returned)
    return {
        "data": plain(result.data, max_depth),
        "tokens_used": result.tokens_used,
        "cost": str(result.cost),
    }


def _refusal(error: ToolError, max_depth: int) -> JsonObject:
    try:
        details = plain(error.details, max_depth)
    except Unfit:
        return _error("unfit_details")
    return _error(
        "tool_error",
        code=error.tool_code,
        message=_text(error.message),
        details=details if details is None or isinstance(details, dict) else {"value": details},
        retryable=error.may_retry,
        retry_after_ms=error.retry_after_ms,
    )


def _failure(error: BaseException, module: str) -> JsonObject:
    try:
        message = str(error)
    except BaseException:  # its own `__str__` is its author's, too, with its own exit
        message = ""
    return _error(
        "exception",
        type=type(error).__name__[:100],
        message=_text(message),
        traceback=_frames(error.__traceback__, module.split(".")[0]),
    )


def _frames(traceback: TracebackType | None, package: str) -> list[str]:
    """The way through the tool's own modules, innermost last: `module:line in function`."""
    frames: list[str] = []
    while traceback is not None:
        frame = traceback.tb_frame
        module = str(frame.f_globals.get("__name__", "?"))
        if module.split(".")[0] == package:
            frames.append(_text(f"{module}:{traceback.tb_lineno} in {frame.f_code.co_name}")[:200])
        traceback = traceback.tb_next
    return frames[-MAX_FRAMES:]


def _error(kind: str, **words: Any) -> JsonObject:
    return {"error": {"kind": kind, **words}}


def _text(words: Any) -> str:
    return str(words)[:MAX_MESSAGE_CHARACTERS].encode("utf-8", "replace").decode()
