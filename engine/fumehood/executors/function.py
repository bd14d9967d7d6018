"""Host functions: trusted code of the embedding program or the operator.

Host side, and no wall: what keeps such a function is a timeout that cancels it, or kills the
worker process that a synchronous one runs in. Its own errors are its answer (`ToolError`);
anything else it raises is hidden from the caller and goes to the log.
"""

from __future__ import annotations

import asyncio

import anyio

from fumehood.core.call import FunctionAddress, HostFunction, ToolResult
from fumehood.core.errors import (
    ArgumentsRefused,
    EndedBy,
    EngineError,
    ExecutionError,
    OutputLimitExceeded,
    Timeout,
    ToolError,
)
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.tool import ToolDefinition
from fumehood.executors.claims import Unreadable, read_error, read_raised, read_result
from fumehood.executors.live import CallHandle
from fumehood.executors.outcome import Outcome
from fumehood.executors.progress import reports_to
from fumehood.sandbox.wall import Lease, RunEnding


class HostFunctionFailed(ExecutionError):
    """A host function raised something that is not for the caller. `cause` is for the log."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(
            "The tool failed inside. Its owner finds the reason in the log under this trace id."
        )
        self.cause = cause


async def run_function(
    function: HostFunction, arguments: JsonObject, limits: Limits, live: CallHandle
) -> Outcome:
    """Await the function, at most as long as its limit, telling `live` how far it is."""
    returned = None
    try:
        with anyio.move_on_after(limits.wall_s) as deadline, reports_to(live.report):
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
        return _failed(EndedBy.WALL_TIME, _timeout("cancelled", limits))
    return _succeeded(returned if isinstance(returned, ToolResult) else ToolResult(returned))


class WorkerFault(Exception):
    """What a function raised in its worker. `kind` and `where` are for the log."""

    def __init__(self, claim: JsonObject) -> None:
        raised = read_raised(claim)
        super().__init__(raised.message if raised is not None else "the worker gave no reason")
        self.kind = raised.type if raised is not None else type(self).__name__
        self.where = raised.traceback if raised is not None else []


async def run_in_worker(
    tool: ToolDefinition,
    address: FunctionAddress,
    arguments: JsonObject,
    limits: Limits,
    lease: Lease,
    live: CallHandle,
) -> Outcome:
    """Have a worker call the function, and kill it at its limit."""
    call: JsonObject = {
        "module": address.module,
        "name": address.name,
        "source": list(address.source),
        "arguments": arguments,
    }
    ending = await lease.run("function", call, limits, live.sinks())
    match ending.ended_by:
        case EndedBy.OK:
            try:
                return _succeeded(read_result(ending.result))
            except Unreadable as error:
                return _failed(EndedBy.EXCEPTION, HostFunctionFailed(error))
        case EndedBy.WALL_TIME:
            return _failed(EndedBy.WALL_TIME, _timeout("stopped", limits))
        case EndedBy.OUTPUT:
            message = f"The result is over {limits.output_bytes} bytes. Ask for less."
            return _failed(EndedBy.OUTPUT, OutputLimitExceeded(message))
        case EndedBy.EXCEPTION | EndedBy.MEMORY | EndedBy.POLICY:
            return _failed(EndedBy.EXCEPTION, _raised_in_worker(ending))
        case _:
            return _failed(ending.ended_by, _worker_died(tool, ending))


def _raised_in_worker(ending: RunEnding) -> EngineError:
    claim = ending.claimed_error or {}
    error = read_error(claim)
    if error is not None:
        return error
    return HostFunctionFailed(WorkerFault(claim))


def _worker_died(tool: ToolDefinition, ending: RunEnding) -> EngineError:
    retry = "Repeat the call." if tool.idempotent else "It may or may not have acted."
    return ExecutionError(
        f"The process that the tool ran in ended before it answered. {retry}",
        retryable=tool.idempotent,
        details={
            "ended_by": ending.ended_by.value,
            "exit_code": ending.exit_code,
            "signal": ending.signal,
        },
    )


def _timeout(verb: str, limits: Limits) -> Timeout:
    return Timeout(
        f"The tool was {verb} after {limits.wall_s:g} s.",
        details={"ended_by": "wall_time", "limit": {"timeout_seconds": limits.wall_s}},
    )


def _succeeded(result: ToolResult) -> Outcome:
    return Outcome(
        ended_by=EndedBy.OK,
        isolation="none",
        data=result.data,
        tokens_used=result.tokens_used,
        cost=result.cost,
    )


def _failed(ended_by: EndedBy, error: EngineError) -> Outcome:
    return Outcome(ended_by=ended_by, isolation="none", error=error)
