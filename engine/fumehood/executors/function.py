"""Executor of Python functions: trusted ones run on the host, sandboxed ones in the jail.

Host side. A trusted function has no wall. An asynchronous one runs in the engine's process, and is
cancelled at the time limit. A synchronous one runs in a worker process, which is killed at the time
limit. If a trusted function raises a `ToolError`, the caller receives it. Any other exception is
logged and hidden from the caller.

In the jail, a child process without rights runs the function. A process outside the child decides
how the run ended. The result, error and traceback that the child reports are untrusted. Paths of
this host are removed from messages and tracebacks.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

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
from fumehood.executors.base import A_PROCESS_A_CALL, Executor, Placement, ToolRun
from fumehood.executors.claims import (
    Raised,
    Unreadable,
    read_claim,
    read_error,
    read_result,
    unfit,
)
from fumehood.executors.endings import (
    MAX_MESSAGE_CHARACTERS,
    Messages,
    error_of,
    sandbox_lost,
)
from fumehood.executors.outcome import Outcome
from fumehood.executors.parts import Parts, TooManyParts, Unfit, reports_to
from fumehood.protocol.framing import whole_words
from fumehood.redaction.redactor import Redactor
from fumehood.sandbox.wall import OnOutput, RunEnding

_ON_THE_HOST = Placement(
    "host",
    "host",
    "the executor 'function' with sandboxed=false runs trusted code in the engine's process or, "
    "if the function is synchronous, in a separate worker process",
)
_IN_THE_JAIL = Placement(
    "jail",
    "jail",
    "the executor 'function' with sandboxed=true always runs in the jail: a separate, limited "
    "process behind a system-call filter, which sees its own import path and no other file",
    isolations=A_PROCESS_A_CALL,
)


class FunctionExecutor(Executor):
    """Runs Python functions, sandboxed or trusted."""

    def placement(self, tool: ToolDefinition, *, in_session: bool) -> Placement:
        return _IN_THE_JAIL if tool.sandboxed else _ON_THE_HOST

    def run(self, run: ToolRun) -> Coroutine[Any, Any, Outcome]:
        return _run_followed(run) if run.tool.definition.streaming else _run(run, None)


def _run(run: ToolRun, parts: FollowedParts | None) -> Coroutine[Any, Any, Outcome]:
    tool = run.tool
    if tool.address is not None:
        where = _run_jailed if tool.definition.sandboxed else _run_in_worker
        return where(run, tool.address, parts)
    assert tool.function is not None
    return _run_here(run, tool.function, parts)


# -- parts of a result ---------------------------------------------------------------------


class FollowedParts:
    """Passes the parts of a streamed result to the call's listener. The parts are redacted, and
    characters beyond `most_characters` are dropped.

    The call's final result does not depend on these parts. Parts from a sandboxed function are
    untrusted.
    """

    def __init__(self, output: OnOutput | None, redactor: Redactor, most_characters: int) -> None:
        self.is_followed = output is not None
        self._output = output
        self._redactor = redactor.stream()
        self._left = most_characters

    def hear(self, stream: str, text: str) -> None:
        """Redact the next part of the result and pass it on. Characters beyond the limit are
        dropped.
        """
        text, self._left = text[: self._left], max(0, self._left - len(text))
        self._pass_on(self._redactor.feed(text) if text else "")

    def finish(self) -> None:
        """Pass on the text that was held back because it might be the start of a secret."""
        self._pass_on(self._redactor.finish())

    def _pass_on(self, text: str) -> None:
        if text and self._output is not None:
            self._output("stdout", text)


async def _run_followed(run: ToolRun) -> Outcome:
    parts = FollowedParts(run.handle.output, run.redactor, run.limits.output_bytes)
    try:
        return await _run(run, parts)
    finally:
        parts.finish()


async def _ending_of(
    run: ToolRun, address: FunctionAddress, where: JsonObject, parts: FollowedParts | None
) -> RunEnding:
    """Call the function at `address` in another process, and return how the run ended.

    `where` contains additional fields of the request to the process, such as the path from which it
    imports the function. If `parts` is given, it receives the parts of the result as they arrive.
    """
    call: JsonObject = {
        "module": address.module,
        "name": address.name,
        **where,
        "pickled": address.pickled,
        "arguments": run.arguments,
    }
    if parts is not None:
        call["stream"] = {"max_bytes": run.limits.output_bytes, "is_followed": parts.is_followed}
    sinks = run.handle.sinks(output=parts.hear if parts is not None else None)
    return await run.lease.run("function", call, run.limits, sinks)


# -- functions of the host -----------------------------------------------------------------


class HostFunctionFailed(ExecutionError):
    """A host function raised an exception that the caller must not see. `cause` is for the log."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(
            "The tool failed internally. Its owner can find the reason in the log under this trace "
            "id."
        )
        self.cause = cause


async def _run_here(run: ToolRun, function: HostFunction, parts: FollowedParts | None) -> Outcome:
    """Run an asynchronous trusted function in this process, and return the outcome. At the time
    limit, the function is cancelled.

    If `parts` is given, the function may be an asynchronous generator. Its items are then the parts
    of the result.
    """
    limits = run.limits
    returned = None
    try:
        with anyio.move_on_after(limits.wall_s) as deadline, reports_to(run.handle.report):
            returned = await function(run.arguments)
            if parts is not None and isinstance(returned, AsyncGenerator):
                returned = await _collected(parts, limits).collect_async(returned)
    except TooManyParts:
        return _failed(EndedBy.OUTPUT, _too_much(limits))
    except Unfit:
        return _failed(EndedBy.EXCEPTION, unfit(is_result=True))
    except (ToolError, ArgumentsRefused) as error:
        return _failed(EndedBy.EXCEPTION, error)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise  # the call itself is cancelled
        return _failed(EndedBy.EXCEPTION, HostFunctionFailed(error))
    except (KeyboardInterrupt, GeneratorExit):
        raise  # the program or this coroutine is ending
    except BaseException as error:
        return _failed(EndedBy.EXCEPTION, HostFunctionFailed(error))
    if deadline.cancel_called:  # even if the function ignored the cancellation
        return _failed(EndedBy.WALL_TIME, _timeout("cancelled", limits))
    return _succeeded(ToolResult.of(returned))


class WorkerFault(Exception):
    """An exception that a function raised in its worker process.

    `kind` (the exception's type) and `where` (its traceback) are for the log.
    """

    def __init__(self, claim: JsonObject) -> None:
        raised = read_claim(Raised, claim)
        super().__init__(raised.message if raised is not None else "the worker gave no reason")
        self.kind = raised.type if raised is not None else type(self).__name__
        self.where = raised.traceback if raised is not None else []


async def _run_in_worker(
    run: ToolRun, address: FunctionAddress, parts: FollowedParts | None
) -> Outcome:
    """Call a trusted synchronous function in a worker process, which is killed at the time
    limit.
    """
    limits = run.limits
    ending = await _ending_of(run, address, {}, parts)
    match ending.ended_by:
        case EndedBy.OK:
            try:
                return _succeeded(read_result(ending.result))
            except Unreadable as error:
                return _failed(EndedBy.EXCEPTION, HostFunctionFailed(error))
        case EndedBy.WALL_TIME:
            return _failed(EndedBy.WALL_TIME, _timeout("stopped", limits))
        case EndedBy.OUTPUT:
            return _failed(EndedBy.OUTPUT, _too_much(limits))
        case EndedBy.EXCEPTION | EndedBy.MEMORY | EndedBy.POLICY:
            claim = ending.claimed_error or {}
            raised = read_error(claim) or HostFunctionFailed(WorkerFault(claim))
            return _failed(EndedBy.EXCEPTION, raised)
        case _:
            return _failed(ending.ended_by, _worker_died(run.tool.definition, ending))


def _collected(parts: FollowedParts, limits: Limits) -> Parts:
    hear = (lambda text: parts.hear("stdout", text)) if parts.is_followed else None
    return Parts(limits.output_bytes, hear)


def _too_much(limits: Limits) -> OutputLimitExceeded:
    return OutputLimitExceeded(f"The result is over {limits.output_bytes} bytes. Ask for less.")


def _worker_died(tool: ToolDefinition, ending: RunEnding) -> EngineError:
    retry = "Repeat the call." if tool.idempotent else "It may or may not have taken effect."
    return ExecutionError(
        f"The tool's process ended before it returned a result. {retry}",
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


# -- sandboxed functions -------------------------------------------------------------------


async def _run_jailed(
    run: ToolRun, address: FunctionAddress, parts: FollowedParts | None
) -> Outcome:
    """Call a sandboxed function in its own process with restricted rights, the jail."""
    where: JsonObject = {"import_path": address.import_path}
    ending = await _ending_of(run, address, where, parts)
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
        return replace(outcome, error=_jail_error(ending, run.limits, run.tool.definition, address))
    return replace(outcome, data=result.data, tokens_used=result.tokens_used, cost=result.cost)


_MESSAGES: Messages = MappingProxyType(
    {
        EndedBy.WALL_TIME: "The function was stopped after {limit:g} s. A retry would take as "
        "long: ask for less, or allow more with timeout_seconds.",
        EndedBy.CPU_TIME: "The function was stopped after {limit:g} s of CPU time, the most that "
        "this engine allows. Ask for less.",
        EndedBy.MEMORY: "The function needed more than its {limit} MB of memory. Ask for less, or "
        "allow more with memory_limit_mb.",
        EndedBy.OUTPUT: "The result is over {limit} bytes. Ask for less.",
        EndedBy.POLICY: "The function was stopped because it tried a forbidden operation (a "
        "connection, a process, a thread or a signal). Do not retry it as it is.",
        EndedBy.CANCELLED: "The call was cancelled.",
        EndedBy.EXIT: "The function exited before it returned a result.",
        EndedBy.SIGNAL: "The function exited before it returned a result.",
    }
)


def _jail_error(
    ending: RunEnding, limits: Limits, tool: ToolDefinition, address: FunctionAddress
) -> EngineError | None:
    details: JsonObject = {"ended_by": ending.ended_by.value}
    match ending.ended_by:
        case EndedBy.SANDBOX_LOST:
            return sandbox_lost(tool, details)
        case EndedBy.EXCEPTION:
            return _raised(ending, details, address)
        case EndedBy.EXIT | EndedBy.SIGNAL:
            details |= {"exit_code": ending.exit_code, "signal": ending.signal}
    return error_of(ending, limits, _MESSAGES, details=details)


def _raised(ending: RunEnding, details: JsonObject, address: FunctionAddress) -> EngineError:
    claim = ending.claimed_error or {}
    chosen = read_error(claim)
    if chosen is not None:
        return chosen
    raised = read_claim(Raised, claim)
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
        f"The function failed with {whole_words(words, MAX_MESSAGE_CHARACTERS)}", details=details
    )


def without_paths(text: str, address: FunctionAddress) -> str:
    """Return a text, such as an error message, without the paths of directories on this host.

    One of these directories is the one from which the function at `address` was imported.
    """
    engine = Path(__file__).parents[2]
    known = {address.import_path, sys.prefix, sys.base_prefix, str(engine), str(Path.home())}
    for path in sorted(known - {"/", ""}, key=len, reverse=True):
        text = text.replace(path + "/", "").replace(path, "")
    return text
