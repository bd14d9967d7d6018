"""Programs behind a wall: what to run there, and what its ending means to the caller.

Host side, between `pipeline/execute` and a wall's lease. Everything that comes back is the
guest's word: the ending was decided outside the child, the rest is data of a stranger.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fumehood.core.errors import (
    ENDING_ERRORS,
    EndedBy,
    EngineError,
    InvalidParams,
    SandboxUnavailable,
)
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.tool import ToolDefinition
from fumehood.executors.outcome import Outcome
from fumehood.sandbox.wall import Lease, RunEnding

MAX_MESSAGE_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class _Words:
    """How messages speak of what ran."""

    what: str
    took_long: str
    failed: str
    shorter: str


_EXPRESSION = _Words(
    what="expression",
    took_long="It would take as long again: simplify it",
    failed="The expression has no value",
    shorter="The result is over {} bytes. Ask for less.",
)
_PROGRAM = _Words(
    what="program",
    took_long="It would run as long again: look for an endless loop, do less in one call",
    failed="The program failed",
    shorter="The program printed or returned more than {} bytes. Print less.",
)


async def run_expression(
    tool: ToolDefinition, arguments: JsonObject, limits: Limits, lease: Lease
) -> Outcome:
    """Evaluate one expression in the interpreter."""
    ending = await lease.run("calculator", arguments, limits)
    if ending.ended_by is EndedBy.OK and not _is_expression_result(ending.result):
        ending = replace(ending, ended_by=EndedBy.SANDBOX_LOST, result=None)
    return _outcome(ending, _error(ending, limits, tool, _EXPRESSION, {}))


async def run_program(
    tool: ToolDefinition, arguments: JsonObject, limits: Limits, lease: Lease
) -> Outcome:
    """Run one restricted program in the interpreter.

    Where it fails, `details` hold the same fields as `data` would, and `exception`; all of
    them are null where the program was ended from outside and could not say.
    """
    ending = await lease.run("restricted_python", arguments, limits)
    if ending.ended_by is EndedBy.OK and not is_program_result(ending.result):
        ending = replace(ending, ended_by=EndedBy.SANDBOX_LOST, result=None)
    said = program_details((ending.claimed_error or {}).get("details"))
    return _outcome(ending, _error(ending, limits, tool, _PROGRAM, said))


def _outcome(ending: RunEnding, error: EngineError | None) -> Outcome:
    return Outcome(
        ended_by=ending.ended_by,
        isolation=ending.isolation,
        data=ending.result,
        error=error,
        cpu_ms=ending.cpu_ms,
        peak_memory_bytes=ending.peak_memory_bytes,
        output_bytes=ending.output_bytes,
    )


def _error(
    ending: RunEnding, limits: Limits, tool: ToolDefinition, words: _Words, said: JsonObject
) -> EngineError | None:
    error_class = ENDING_ERRORS[ending.ended_by]
    if error_class is None:
        return None
    details: JsonObject = {"ended_by": ending.ended_by.value}
    if ending.ended_by is EndedBy.SANDBOX_LOST:
        return _lost(tool, details)
    if (
        words is _EXPRESSION
        and ending.claimed_kind == "invalid"
        and ending.ended_by is EndedBy.EXCEPTION
    ):
        message = _sentence(_claimed_message(ending))
        return InvalidParams(message, fields=["expression"], details=details)
    details |= said
    reached = _limit_reached(ending.ended_by, limits, words)
    if reached is not None:
        details["limit"], message = reached
        return error_class(message, details=details)
    if ending.ended_by in (EndedBy.EXIT, EndedBy.SIGNAL):
        details |= {"exit_code": ending.exit_code, "signal": ending.signal}
    return error_class(_message(ending, words), details=details)


def _limit_reached(
    ended_by: EndedBy, limits: Limits, words: _Words
) -> tuple[JsonObject, str] | None:
    """The limit that ended a run, and what to try; None where no limit did."""
    match ended_by:
        case EndedBy.WALL_TIME:
            return {"timeout_seconds": limits.wall_s}, (
                f"The {words.what} was stopped after {limits.wall_s:g} s. {words.took_long}, or "
                "allow more with timeout_seconds."
            )
        case EndedBy.CPU_TIME:
            return {"cpu_seconds": limits.cpu_s}, (
                f"The {words.what} was stopped after {limits.cpu_s:g} s of CPU time, the most "
                "that this engine allows. Simplify it."
            )
        case EndedBy.MEMORY:
            return {"memory_mb": limits.memory_mb}, (
                f"The {words.what} needed more than its {limits.memory_mb} MB of memory. "
                "Compute it in smaller parts."
            )
        case EndedBy.OUTPUT:
            return {"output_bytes": limits.output_bytes}, words.shorter.format(limits.output_bytes)
        case _:
            return None


def _message(ending: RunEnding, words: _Words) -> str:
    match ending.ended_by:
        case EndedBy.EXCEPTION:
            return f"{words.failed}: {_sentence(_claimed_message(ending), capital=False)}"
        case EndedBy.POLICY:
            return f"{_sentence(_claimed_message(ending))} Do not retry it as it is."
        case EndedBy.CANCELLED:
            return "The call was cancelled."
        case _:
            return f"The interpreter ended while it worked on this {words.what}."


def _lost(tool: ToolDefinition, details: JsonObject) -> SandboxUnavailable:
    return SandboxUnavailable(
        "The sandbox was lost while it worked; a new one is being made. "
        + ("Repeat the call." if tool.idempotent else "It may or may not have acted."),
        details=details,
        retryable=tool.idempotent,
        retry_after_ms=100,
    )


def _is_expression_result(result: JsonObject | None) -> bool:
    """Whether the program's words have the form of `EXPRESSION_OUTPUT`."""
    if result is None or result.keys() != {"value", "text"} or not isinstance(result["text"], str):
        return False
    value = result["value"]
    return value is None or isinstance(value, bool | int | float | list)


def is_program_result(result: JsonObject | None) -> bool:
    """Whether the program's words have the form of `PROGRAM_OUTPUT`."""
    return (
        result is not None
        and result.keys() == NOTHING_SAID.keys() - {"exception"}
        and isinstance(result["stdout"], str)
        and isinstance(result["value_repr"], str | None)
    )


NOTHING_SAID: JsonObject = {"value": None, "value_repr": None, "stdout": None, "exception": None}


def program_details(claimed: Any) -> JsonObject:
    """What a failed program says of itself; nulls where it is not in the agreed form."""
    if not isinstance(claimed, dict) or not isinstance(claimed.get("stdout"), str):
        return dict(NOTHING_SAID)
    exception = claimed.get("exception")
    said: JsonObject = {
        **NOTHING_SAID,
        "stdout": claimed["stdout"],
        "exception": exception if _is_exception(exception) else None,
    }
    return {**said, "truncated": True} if claimed.get("truncated") is True else said


def _is_exception(claimed: object) -> bool:
    return (
        isinstance(claimed, dict)
        and claimed.keys() == {"type", "message", "line", "traceback"}
        and all(isinstance(claimed[key], str) for key in ("type", "message", "traceback"))
        and isinstance(claimed["line"], int | None)
    )


def _claimed_message(ending: RunEnding) -> str:
    reason = "the program gave no reason"
    if ending.claimed_kind is None and ending.ended_by is EndedBy.POLICY:
        reason = "the sandbox stopped a forbidden system call"
    claim = ending.claimed_message or reason
    return claim[:MAX_MESSAGE_CHARACTERS]


def _sentence(text: str, *, capital: bool = True) -> str:
    """The program's clause as a sentence; a name or sign at its start stays as it is."""
    if capital and text.startswith(("the ", "only ", "a ", "names ", "attributes ")):
        text = text[0].upper() + text[1:]
    return text if text.endswith((".", "?", "!")) else text + "."
