"""Host functions: trusted asynchronous code of the embedding program or the operator.

Host side, and no wall: what keeps such a function is a timeout that cancels it. Its own
errors are its answer (`ToolError`); anything else it raises is hidden from the caller and
goes to the log.
"""

from __future__ import annotations

import asyncio

import anyio

from fumehood.executors.outcome import Outcome
from fumehood.model.call import HostFunction, ToolResult
from fumehood.model.errors import (
    ArgumentsRefused,
    EndedBy,
    EngineError,
    ExecutionError,
    Timeout,
    ToolError,
)
from fumehood.model.json_types import JsonObject
from fumehood.model.limits import Limits


class HostFunctionFailed(ExecutionError):
    """A host function raised something that is not for the caller. `cause` is for the log."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(
            "The tool failed inside. Its owner finds the reason in the log under this trace id."
        )
        self.cause = cause


async def run_function(function: HostFunction, arguments: JsonObject, limits: Limits) -> Outcome:
    """Await the function, at most as long as its limit."""
    returned = None
    try:
        with anyio.move_on_after(limits.wall_s) as deadline:
            returned = await function(arguments)
    except (ToolError, ArgumentsRefused) as error:
        return _failed(EndedBy.EXCEPTION, error)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise  # somebody cancels this call
        return _failed(EndedBy.EXCEPTION, HostFunctionFailed(error))
    except (Exception, SystemExit) as error:
        return _failed(EndedBy.EXCEPTION, HostFunctionFailed(error))
    if deadline.cancel_called:  # also where the function swallowed it and went on
        return _failed(
            EndedBy.WALL_TIME,
            Timeout(
                f"The tool was cancelled after {limits.wall_s:g} s.",
                details={"ended_by": "wall_time", "limit": {"timeout_seconds": limits.wall_s}},
            ),
        )
    result = returned if isinstance(returned, ToolResult) else ToolResult(returned)
    return Outcome(
        ended_by=EndedBy.OK,
        isolation="none",
        data=result.data,
        tokens_used=result.tokens_used,
        cost=result.cost,
    )


def _failed(ended_by: EndedBy, error: EngineError) -> Outcome:
    return Outcome(ended_by=ended_by, isolation="none", error=error)
