"""Sandboxed functions: what to ask of the jail, and what its ending means to the caller.

Host side, between `pipeline/execute` and the jail's lease. How a run ended was decided outside
the child; result, error and traceback are a stranger's words, validated in `claims`, and
paths of this host are taken out of them.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from fumehood.core.call import FunctionAddress, ToolResult
from fumehood.core.errors import (
    ENDING_ERRORS,
    EndedBy,
    EngineError,
    ExecutionError,
    SandboxUnavailable,
)
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.tool import ToolDefinition
from fumehood.executors.claims import Unreadable, read_error, read_raised, read_result
from fumehood.executors.live import CallHandle
from fumehood.executors.outcome import Outcome
from fumehood.sandbox.wall import Lease, RunEnding

MAX_MESSAGE_CHARACTERS = 500


async def run_jailed(
    tool: ToolDefinition,
    address: FunctionAddress,
    arguments: JsonObject,
    limits: Limits,
    lease: Lease,
    live: CallHandle,
) -> Outcome:
    """Call one function in the jail, telling `live` how far it is."""
    call: JsonObject = {
        "module": address.module,
        "name": address.name,
        "import_path": address.import_path,
        "source": list(address.source),
        "arguments": arguments,
    }
    ending = await lease.run("function", call, limits, live.sinks())
    result: ToolResult | None = None
    if ending.ended_by is EndedBy.OK:
        try:
            result = read_result(ending.result)
        except Unreadable:
            ending = replace(ending, ended_by=EndedBy.SANDBOX_LOST)
    outcome = Outcome(
        ended_by=ending.ended_by,
        isolation=ending.isolation,
        cpu_ms=ending.cpu_ms,
        peak_memory_bytes=ending.peak_memory_bytes,
        output_bytes=ending.output_bytes,
    )
    if result is None:
        return replace(outcome, error=_error(ending, limits, tool, address))
    return replace(outcome, data=result.data, tokens_used=result.tokens_used, cost=result.cost)


def _error(
    ending: RunEnding, limits: Limits, tool: ToolDefinition, address: FunctionAddress
) -> EngineError:
    details: JsonObject = {"ended_by": ending.ended_by.value}
    match ending.ended_by:
        case EndedBy.SANDBOX_LOST:
            return _lost(tool, details)
        case EndedBy.EXCEPTION:
            return _raised(ending, details, address)
        case EndedBy.WALL_TIME:
            details["limit"] = {"timeout_seconds": limits.wall_s}
            message = (
                f"The function was stopped after {limits.wall_s:g} s. It would take as long "
                "again: ask for less, or allow more with timeout_seconds."
            )
        case EndedBy.CPU_TIME:
            details["limit"] = {"cpu_seconds": limits.cpu_s}
            message = (
                f"The function was stopped after {limits.cpu_s:g} s of CPU time, the most that "
                "this engine allows. Ask for less."
            )
        case EndedBy.MEMORY:
            details["limit"] = {"memory_mb": limits.memory_mb}
            message = (
                f"The function needed more than its {limits.memory_mb} MB of memory. Ask for "
                "less, or allow more with memory_limit_mb."
            )
        case EndedBy.OUTPUT:
            details["limit"] = {"output_bytes": limits.output_bytes}
            message = f"The result is over {limits.output_bytes} bytes. Ask for less."
        case EndedBy.POLICY:
            message = (
                "The function tried what its sandbox does not allow (a connection, a process, a "
                "thread, a signal), and was stopped. Do not retry it as it is."
            )
        case EndedBy.CANCELLED:
            message = "The call was cancelled."
        case _:
            details |= {"exit_code": ending.exit_code, "signal": ending.signal}
            message = "The function ended its process before it answered."
    return (ENDING_ERRORS[ending.ended_by] or ExecutionError)(message, details=details)


def _raised(ending: RunEnding, details: JsonObject, address: FunctionAddress) -> EngineError:
    claim = ending.claimed_error or {}
    chosen = read_error(claim)
    if chosen is not None:
        return chosen
    raised = read_raised(claim)
    if raised is None:
        return ExecutionError("The function failed and gave no reason.", details=details)
    message = without_paths(raised.message, address)
    details |= {
        "type": raised.type,
        "message": message,
        "traceback": [without_paths(frame, address) for frame in raised.traceback],
    }
    words = f"{raised.type}: {message}" if message else raised.type
    return ExecutionError(
        f"The function failed with {words[:MAX_MESSAGE_CHARACTERS]}", details=details
    )


def without_paths(text: str, address: FunctionAddress) -> str:
    """The text without the directories of this host that a message can quote by accident."""
    engine = Path(__file__).parents[2]
    known = {address.import_path, sys.prefix, sys.base_prefix, str(engine), str(Path.home())}
    for path in sorted(known - {"/", ""}, key=len, reverse=True):
        text = text.replace(path + "/", "").replace(path, "")
    return text


def _lost(tool: ToolDefinition, details: JsonObject) -> SandboxUnavailable:
    return SandboxUnavailable(
        "The sandbox was lost while it worked; a new one is being made. "
        + ("Repeat the call." if tool.idempotent else "It may or may not have acted."),
        details=details,
        retryable=tool.idempotent,
        retry_after_ms=100,
    )
