"""Code in other languages than Python, and in sessions: what its ending becomes."""

from __future__ import annotations

from typing import Any

import pytest

from fumehood.core.errors import EndedBy
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.tool import CODE_OUTPUT, SHELL_OUTPUT, ToolDefinition
from fumehood.executors.handle import CallHandle
from fumehood.executors.outcome import Outcome
from fumehood.executors.program import run_code
from fumehood.sandbox.wall import NO_SINKS, RunEnding, RunSinks
from fumehood.storage.blobs import BlobStore

pytestmark = [pytest.mark.anyio, pytest.mark.row("S7")]

LIMITS = Limits(30, 30, 256, 1 << 20)


class Says:
    """A lease that gives one answer, and keeps what it was asked."""

    queue_ms = 0.0

    def __init__(self, ended_by: EndedBy, **fields: Any) -> None:
        self.ending = RunEnding(ended_by, "session", **fields)
        self.asked: list[tuple[str, JsonObject]] = []

    async def run(
        self, program: str, arguments: JsonObject, limits: Limits, sinks: RunSinks = NO_SINKS
    ) -> RunEnding:
        self.asked.append((program, arguments))
        return self.ending


async def run(
    language: str, lease: Says, arguments: JsonObject, session_id: str | None = None
) -> Outcome:
    tool = ToolDefinition(name="t", description="d", type="BUILTIN", executor=f"code:{language}")  # type: ignore[arg-type]
    blobs: BlobStore = None  # type: ignore[assignment]  # no file comes back
    return await run_code(tool, arguments, LIMITS, lease, blobs, "ann", CallHandle(), session_id)


async def shell(ended_by: EndedBy, *, session_id: str | None = None, **fields: Any) -> Any:
    outcome = await run("shell", Says(ended_by, **fields), {"command": "x"}, session_id)
    return outcome.error


async def test_command_has_no_value_and_no_figures() -> None:
    lease = Says(EndedBy.OK, exit_code=0, stdout="a\n")
    outcome = await run("shell", lease, {"command": "echo a", "stdin": "i"})
    assert outcome.data == {
        "stdout": "a\n", "stderr": "", "exit_code": 0, "files": [], "ended_by": "ok",
    }  # fmt: skip
    assert outcome.data.keys() == set(SHELL_OUTPUT["required"])
    assert lease.asked == [("shell", {"command": "echo a", "stdin": "i", "files": []})]


async def test_failed_command_shows_what_it_said() -> None:
    error = await shell(EndedBy.EXIT, exit_code=2, stderr="grep: no such file\n")
    assert (error.code, error.details["exit_code"]) == ("EXECUTION_ERROR", 2)
    assert error.message.startswith("The command exited with status 2.")
    assert "terminal" not in error.message
    assert error.details.keys() == set(SHELL_OUTPUT["required"])


@pytest.mark.parametrize(
    "stderr",
    [
        "bash: line 1: /dev/tty: No such device or address",
        "the input device is not a TTY",
        "stty: 'standard input': Inappropriate ioctl for device",
        "TERM environment variable not set.",
        "Vim: Warning: Output is not to a terminal\nError: not a terminal",
    ],
)
async def test_command_that_looks_for_a_terminal_hears_that_there_is_none(stderr: str) -> None:
    error = await shell(EndedBy.EXIT, exit_code=1, stderr=stderr)
    assert "no terminal is available" in error.message


async def test_command_that_waits_ends_with_a_time_out_that_names_the_cause() -> None:
    waited = await shell(EndedBy.WALL_TIME, cpu_ms=40.0)
    assert waited.code == "TIMEOUT"
    assert "waiting, not computing" in waited.message
    assert "no terminal is available" in waited.details["limit"]["hint"]
    for cpu_ms in (29_000.0, None):  # it computed, or nobody knows
        busy = await shell(EndedBy.WALL_TIME, cpu_ms=cpu_ms)
        assert "terminal" not in busy.message


async def test_javascript_that_never_yields_is_a_plain_time_out() -> None:
    lease = Says(EndedBy.WALL_TIME, cpu_ms=30_000.0)
    error = (await run("javascript", lease, {"code": "for(;;);"})).error
    assert error is not None
    assert error.code == "TIMEOUT"
    assert error.message.startswith("The program was stopped after 30 s. Try this: look for an")


async def test_javascript_answers_as_python_does() -> None:
    value = {"value": [1], "has_value": True, "value_repr": "[ 1 ]"}
    outcome = await run("javascript", Says(EndedBy.OK, result=value), {"code": "[1]"})
    assert outcome.data.keys() == set(CODE_OUTPUT["required"])
    assert (outcome.data["value"], outcome.data["value_repr"]) == ([1], "[ 1 ]")
    thrown = {"type": "TypeError", "message": "no", "line": 2, "traceback": "TypeError: no\n at …"}
    failure = {"kind": "exception", "message": "no", "exception": thrown}
    error = (
        await run("javascript", Says(EndedBy.EXCEPTION, claimed_error=failure), {"code": "x"})
    ).error
    assert error is not None
    assert error.message == "The program failed: TypeError: no (line 2)."
    assert error.details is not None
    assert error.details["exception"] == thrown


@pytest.mark.row("S6")
@pytest.mark.parametrize(
    ("state", "words"),
    [("kept", None), ("rolled_back", "variables restored"), ("reset", "are lost"), (None, None)],
)
async def test_what_became_of_a_sessions_variables_is_said(state: Any, words: str | None) -> None:
    lease = Says(EndedBy.OK, state=state, variables_bytes=7)
    outcome = await run("python", lease, {"code": "1"}, "sess_1")
    assert outcome.data["session"] == {"id": "sess_1", "state": state, "variables_bytes": 7}
    said = [warning for warning in outcome.warnings if warning.startswith("session:")]
    assert len(said) == (words is not None)
    assert all(words in warning and "files are not rolled back" in warning for warning in said)  # type: ignore[operator]


@pytest.mark.row("S6")
async def test_failed_call_of_a_session_says_it_too() -> None:
    lease = Says(EndedBy.WALL_TIME, state="rolled_back", variables_bytes=9)
    outcome = await run("python", lease, {"code": "1"}, "sess_1")
    assert outcome.error is not None
    assert outcome.error.details is not None
    assert outcome.error.details["session"]["state"] == "rolled_back"
    assert any("rolled" in warning or "before this call" in warning for warning in outcome.warnings)
    stateless = await run("python", Says(EndedBy.WALL_TIME, state="reset"), {"code": "1"})
    assert stateless.error is not None
    assert "session" not in (stateless.error.details or {})
    assert stateless.warnings == ()


@pytest.mark.row("S6")
async def test_lost_container_of_a_session_takes_everything_with_it() -> None:
    error = await shell(EndedBy.SANDBOX_LOST, session_id="sess_1")
    assert (error.code, error.may_retry) == ("SANDBOX_UNAVAILABLE", False)
    assert "with its files and variables" in error.message
    assert "files and variables" not in (await shell(EndedBy.SANDBOX_LOST)).message


@pytest.mark.row("S6")
async def test_memory_of_a_session_is_no_matter_of_one_call() -> None:
    error = await shell(EndedBy.MEMORY, session_id="sess_1")
    assert "start a session with more" in error.message
    assert "memory_limit_mb" not in error.message
    assert "memory_limit_mb" in (await shell(EndedBy.MEMORY)).message


@pytest.mark.row("S4", "S6")
async def test_variables_that_leave_no_room_are_named() -> None:
    async def python(held_mb: int) -> str:
        ending = Says(EndedBy.MEMORY, state="rolled_back", variables_bytes=held_mb << 20)
        outcome = await run("python", ending, {"code": "x"}, "sess_1")
        assert outcome.error is not None
        return outcome.error.message

    assert "variables alone take 200 MB" in await python(200)
    assert "variables" not in await python(50)


async def test_commands_arguments_are_checked_under_their_own_name() -> None:
    from fumehood.executors.kinds import argument_faults

    assert dict(argument_faults("code:shell", {"command": " "})).keys() == {"command"}
    assert dict(argument_faults("code:shell", {"code": "1"})).keys() == {"command"}
    assert dict(argument_faults("code:shell", {"command": "ls"})) == {}
    assert dict(argument_faults("code:javascript", {"code": "a\0"})).keys() == {"code"}
    assert dict(argument_faults("expression", {})) == {}
