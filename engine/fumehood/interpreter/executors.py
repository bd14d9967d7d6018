"""Executors for expressions and restricted programs, which run in the interpreter wall.

Host side, between `pipeline/execute` and a wall's lease. How a run ended is decided outside the
child process; all other data in the ending is untrusted.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from fumehood.core.errors import EndedBy, EngineError, InvalidParams
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.tool import ToolDefinition
from fumehood.executors.base import A_PROCESS_A_CALL, Executor, Placement, ToolRun
from fumehood.executors.claims import ExceptionClaim, read_claim
from fumehood.executors.endings import (
    MAX_MESSAGE_CHARACTERS,
    Messages,
    error_of,
    sandbox_lost,
    sentence,
)
from fumehood.executors.outcome import Outcome
from fumehood.protocol.framing import whole_words
from fumehood.sandbox.wall import RunEnding


def _messages(what: str, **own: str) -> Messages:
    ended = f"The interpreter ended while it ran this {what}."
    return MappingProxyType(
        {
            EndedBy.WALL_TIME: f"The {what} was stopped after {{limit:g}} s. {own['took_long']}, "
            "or allow more with timeout_seconds.",
            EndedBy.CPU_TIME: f"The {what} was stopped after {{limit:g}} s of CPU time, the most "
            "that this engine allows. Simplify it.",
            EndedBy.MEMORY: f"The {what} needed more than its {{limit}} MB of memory. Compute it "
            "in smaller parts.",
            EndedBy.OUTPUT: own["output"],
            EndedBy.EXCEPTION: f"{own['failed']}: {{claim}}",
            EndedBy.POLICY: f"The sandbox stopped the {what}: {{claim}} Do not retry it as it is.",
            EndedBy.CANCELLED: "The call was cancelled.",
            EndedBy.EXIT: ended,
            EndedBy.SIGNAL: ended,
        }
    )


_EXPRESSION = _messages(
    "expression",
    took_long="It would take as long again: simplify it",
    output="The result is over {limit} bytes. Ask for less.",
    failed="The expression has no value",
)
_PROGRAM = _messages(
    "program",
    took_long="It would run as long again: look for an endless loop, do less in one call",
    output="The program printed or returned more than {limit} bytes. Print less.",
    failed="The program failed",
)


class ExpressionExecutor(Executor):
    """Evaluates expressions. Calls of the same trust domain may share one process."""

    place = Placement(
        "interpreter",
        "interpreter",
        "the executor 'expression' always runs in the interpreter: a separate, limited process "
        "behind a system-call filter",
        isolations=A_PROCESS_A_CALL,
    )

    async def run(self, run: ToolRun) -> Outcome:
        """Evaluate one expression in the interpreter."""
        ending = await run.lease.run("calculator", run.arguments, run.limits)
        if ending.ended_by is EndedBy.OK and not _is_expression_result(ending.result):
            ending = replace(ending, ended_by=EndedBy.SANDBOX_LOST, result=None)
        return _outcome(run, ending, _EXPRESSION, {})


class RestrictedPythonExecutor(Executor):
    """Runs restricted programs, each in a separate process."""

    place = Placement(
        "interpreter",
        "interpreter",
        "the executor 'restricted_python' always runs in the interpreter: a separate, limited "
        "process behind a system-call filter, made for this call and ended with it",
        fresh=True,
        isolations=A_PROCESS_A_CALL,
    )

    async def run(self, run: ToolRun) -> Outcome:
        """Run one restricted program in the interpreter.

        If the program fails, the error's `details` contain the field `exception` and the same
        fields as the `data` of a program that succeeds. All of these fields are null if the program
        reported nothing, for example because it was killed.
        """
        ending = await run.lease.run("restricted_python", run.arguments, run.limits)
        if ending.ended_by is EndedBy.OK and not is_program_result(ending.result):
            ending = replace(ending, ended_by=EndedBy.SANDBOX_LOST, result=None)
        said = program_details((ending.claimed_error or {}).get("details"))
        return _outcome(run, ending, _PROGRAM, said)


def _outcome(run: ToolRun, ending: RunEnding, messages: Messages, said: JsonObject) -> Outcome:
    return Outcome(
        ended_by=ending.ended_by,
        isolation=ending.isolation,
        data=ending.result,
        error=_error(ending, run.limits, run.tool.definition, messages, said),
        cpu_ms=ending.cpu_ms,
        peak_memory_bytes=ending.peak_memory_bytes,
        output_bytes=ending.output_bytes,
    )


def _error(
    ending: RunEnding, limits: Limits, tool: ToolDefinition, messages: Messages, said: JsonObject
) -> EngineError | None:
    details: JsonObject = {"ended_by": ending.ended_by.value}
    match ending.ended_by:
        case EndedBy.OK:
            return None
        case EndedBy.SANDBOX_LOST:
            return sandbox_lost(tool, details)
        case EndedBy.EXCEPTION if messages is _EXPRESSION and ending.claimed_kind == "invalid":
            message = f"The expression is not valid: {_claim(ending)}"
            return InvalidParams(message, fields=["expression"], details=details)
    details |= said
    if ending.ended_by in (EndedBy.EXIT, EndedBy.SIGNAL):
        details |= {"exit_code": ending.exit_code, "signal": ending.signal}
    values = {"claim": _claim(ending)}
    return error_of(ending, limits, messages, details=details, values=values)


def _is_expression_result(result: JsonObject | None) -> bool:
    """Return whether the claimed result has the form of `EXPRESSION_OUTPUT`."""
    if result is None or result.keys() != {"value", "text"} or not isinstance(result["text"], str):
        return False
    value = result["value"]
    return value is None or isinstance(value, bool | int | float | list)


def is_program_result(result: JsonObject | None) -> bool:
    """Return whether the claimed result has the form of `PROGRAM_OUTPUT`."""
    return (
        result is not None
        and result.keys() == NOTHING_SAID.keys() - {"exception"}
        and isinstance(result["stdout"], str)
        and isinstance(result["value_repr"], str | None)
    )


NOTHING_SAID: JsonObject = {"value": None, "value_repr": None, "stdout": None, "exception": None}
"""The error's details if a failed program reported nothing."""


def program_details(claimed: Any) -> JsonObject:
    """Return the details that the guest claims for a failed program. If they are invalid, return
    details in which all fields are null.
    """
    if not isinstance(claimed, dict) or not isinstance(claimed.get("stdout"), str):
        return dict(NOTHING_SAID)
    exception = claimed.get("exception")
    said: JsonObject = {
        **NOTHING_SAID,
        "stdout": claimed["stdout"],
        "exception": exception if read_claim(ExceptionClaim, exception) is not None else None,
    }
    return {**said, "truncated": True} if claimed.get("truncated") is True else said


def _claim(ending: RunEnding) -> str:
    """Return the guest's claimed reason for the failure, or a default reason, as a sentence."""
    reason = "the program gave no reason"
    if ending.claimed_kind is None and ending.ended_by is EndedBy.POLICY:
        reason = "the sandbox stopped a forbidden system call"
    claim = ending.claimed_message or reason
    return sentence(whole_words(claim, MAX_MESSAGE_CHARACTERS))
