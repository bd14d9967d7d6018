"""Imports and calls a tool's function, in the process in which the function runs.

The jail's child process and the worker process load this module. The engine never does. The input
is a module, a name and JSON arguments. The reply is JSON: `{"result": {data, tokens_used, cost}}`
or `{"error": {kind, …}}`. Invariant: whatever the function returns or raises, the reply is plain
JSON that the host can parse. The host treats the content of the reply as a claim and validates it.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import pickle
from collections.abc import AsyncGenerator, Generator
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fumehood.core.call import ToolResult
from fumehood.core.errors import MAX_MESSAGE_CHARACTERS, ArgumentsRefused, ToolError
from fumehood.core.json_types import JsonObject
from fumehood.executors.parts import Parts, Report, TooManyParts, Unfit, plain, reports_to
from fumehood.protocol.framing import whole_words

if TYPE_CHECKING:
    from fumehood.registry.declare import FunctionTool

MAX_FRAMES = 20
"""Maximum number of frames in a reply's traceback. If there are more, the innermost frames are
kept."""


def answer(
    module: str,
    name: str,
    arguments: JsonObject,
    *,
    pickled: str = "",
    report: Report | None = None,
    parts: Parts | None = None,
) -> JsonObject:
    """Call the function `name` of the module `module` with type-checked arguments, and return the
    reply.

    If `pickled` is not empty, it is the function itself, as a base64 pickle from the host. Then no
    module is imported. `report` receives progress reports. If the function is a generator, `parts`
    collects its items.

    Raises:
        MemoryError: memory ran out. The caller must report this without using more memory.
    """
    try:
        found = _unpickled(pickled) if pickled else getattr(importlib.import_module(module), name)
        with reports_to(report):
            returned = _call(found, arguments, parts)
        return {"result": _result(returned)}
    except MemoryError:
        raise
    except Unfit:
        return _error("unfit")
    except TooManyParts:
        return _error("output", message="the parts are over the output limit")
    except ArgumentsRefused as error:
        return _error("arguments", message=error.message, fields=list(error.fields))
    except ToolError as error:
        return _refusal(error)
    except BaseException as error:  # also the function's own SystemExit or KeyboardInterrupt
        return _failure(error, module)


@cache  # so that the function's globals live as long as the process
def _unpickled(pickled: str) -> FunctionTool:
    """Unpickle and return a function. The result is cached."""
    found: FunctionTool = pickle.loads(base64.b64decode(pickled))  # noqa: S301  # pickled by the host
    return found


def _call(found: FunctionTool, arguments: JsonObject, parts: Parts | None) -> Any:
    returned = found.function(**found.bind(arguments))
    if parts is not None and isinstance(returned, Generator):
        return parts.collect(returned)
    if parts is not None and isinstance(returned, AsyncGenerator):
        returned = parts.collect_async(returned)
    # Check the type, not the value: no code of the value must run, and it must not fake its class.
    return asyncio.run(_wait_for(returned)) if hasattr(type(returned), "__await__") else returned


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


def _result(returned: Any) -> JsonObject:
    result = ToolResult.of(returned)
    return {
        "data": plain(result.data),
        "tokens_used": result.tokens_used,
        "cost": str(result.cost),
    }


def _refusal(error: ToolError) -> JsonObject:
    try:
        details = plain(error.details)
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
    except BaseException:  # the exception's own `__str__` may raise anything, even SystemExit
        message = ""
    return _error(
        "exception",
        type=type(error).__name__[:100],
        message=_text(message),
        traceback=_frames(error.__traceback__, module.split(".")[0]),
    )


def _frames(traceback: TracebackType | None, package: str) -> list[str]:
    """Return the frames of a traceback that belong to the tool's package, each as `module:line in
    function`. The innermost frame is last.
    """
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
    return whole_words(str(words), MAX_MESSAGE_CHARACTERS).encode("utf-8", "replace").decode()
