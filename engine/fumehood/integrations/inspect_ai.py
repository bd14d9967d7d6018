"""Inspect: a sandbox provider, `sandbox="fumehood"`, and an approver of the same name.

Needs the extra `inspect-ai`. Each sample has its own session. Files are read and written by shell
commands in the session. `exec_remote` starts a process of the session, which runs in parallel to
the commands. For other providers, Inspect installs a server in the sandbox, which is not used here.
"""

from __future__ import annotations

import base64
import errno
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import anyio
from inspect_ai.approval import Approval, Approver, approver
from inspect_ai.model import ChatMessage
from inspect_ai.tool import ToolCall, ToolCallView
from inspect_ai.util import (
    ExecCompleted,
    ExecRemoteProcess,
    ExecResult,
    ExecStdout,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from inspect_ai.util._sandbox.events import SandboxEnvironmentProxy
from inspect_ai.util._sandbox.exec_remote import ExecRemoteCommonOptions
from pydantic import BaseModel

from fumehood.client.api_request import DaemonUnavailable, Refused
from fumehood.client.async_session import AsyncSession
from fumehood.client.finished import BY_SIGNAL, Finished, program_arguments
from fumehood.core.decision import DENIALS
from fumehood.core.envelope import CallFailed
from fumehood.integrations._gate import denial

WORKSPACE = "/workspace"

INLINE_BYTES = 512 * 1024
"""Maximum number of bytes of input or of a file's content that are passed through a program's
standard streams. Larger data is passed in a temporary file in the workspace."""

STDIN_BYTES = 64 * 1024
"""Maximum number of bytes that one call writes to a process's standard input: the capacity of a
pipe."""

LOOK_S = 1.0
"""Seconds between two checks whether a process has ended. A process's output does not end while its
children hold it open."""

DRAIN_S = 0.5
"""Seconds to wait for the rest of the output of a process that has ended. Its children may hold the
output open for longer."""

KILLED = 9
"""The signal that is reported if a process was killed because it exceeded its memory."""

_EXEC = """
[ -z "$1" ] || exec < "$1"
[ ! -f "$1" ] || rm -f -- "$1"
cd -- "$2" && shift 2 && exec "$@"
"""
_WRITE = '[ ! -d "$1" ] || exec cat -- "$1"; mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
_READ = f"""
[ ! -d "$1" ] || exec cat -- "$1"
exec < "$1"
[ "$(stat -Lc %s -- "$1")" -le "$2" ] || exit 99
[ "$(stat -Lc %s -- "$1")" -gt {INLINE_BYTES} ] || exec base64
cat > "$3" && exit 98
"""
_TOO_LARGE, _IN_FILE, _NOT_EXECUTABLE = 99, 98, 126
"""Exit codes. `_READ` exits with 99 if the file is too large, and with 98 if it has copied the
content to another file. A shell exits with 126 if it cannot execute a program."""

_ONE_USER = "The sandbox has one user; {!r} is none of it."

_ERRORS = (
    ("Is a directory", errno.EISDIR),
    ("No such file", errno.ENOENT),
    ("Not a directory", errno.ENOTDIR),
    ("denied", errno.EACCES),
    ("Read-only", errno.EACCES),
)
"""Maps a part of a shell's error message to the corresponding errno."""


class FumehoodSandboxConfig(BaseModel, frozen=True, extra="forbid"):
    """The configuration of a sandbox. Inspect also accepts a plain text instead, which is the
    image's name.
    """

    image: str | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    idle_seconds: float | None = None
    lifetime_seconds: float | None = None
    agent_id: str | None = None
    wait_for_approval: bool | float | None = None


@sandboxenv(name="fumehood")
class FumehoodSandbox(SandboxEnvironment):
    """A session as Inspect's sandbox. Relative paths are below `/workspace`."""

    def __init__(self, session: AsyncSession) -> None:
        super().__init__()
        self.session = session
        self._numbers = count(1)

    @classmethod
    async def sample_init(cls, task_name: str, config: Any, metadata: Any) -> dict[str, Any]:
        """Create the session of a sample. Return a dict from the name `default` to the sandbox.

        Raises DaemonUnavailable or Refused if the session cannot be created.
        """
        if not isinstance(config, FumehoodSandboxConfig):  # Inspect turns a text into a path
            config = FumehoodSandboxConfig(image=Path(config).name if config else None)
        session = AsyncSession(**config.model_dump())
        await session.start()
        return {"default": cls(session)}

    @classmethod
    async def sample_cleanup(
        cls, task_name: str, config: Any, environments: dict[str, Any], interrupted: bool
    ) -> None:
        """End the sessions of a sample."""
        for environment in environments.values():
            await environment.as_type(cls).session.close()

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """Return the configuration object for values that were read from a log or a file."""
        return FumehoodSandboxConfig(**config)

    async def exec(
        self, cmd: list[str],
        input: str | bytes | None = None, cwd: str | None = None,  # noqa: A002
        env: dict[str, str] | None = None, user: str | None = None,
        timeout: int | None = None, timeout_retry: bool = True,  # noqa: ASYNC109
        concurrency: bool = True,
    ) -> ExecResult[str]:  # fmt: skip
        """Run a program in the session. It is never repeated after a timeout, even if
        `timeout_retry` is True.
        """
        if user is not None:
            raise SandboxUserUnsupportedError(_ONE_USER.format(user))
        ran = await self._run(cmd, input, cwd, env, timeout)
        if ran.exit_code == _NOT_EXECUTABLE and "denied" in ran.stderr:
            raise PermissionError(errno.EACCES, ran.stderr.strip(), cmd[0])
        return ExecResult(not ran.exit_code, ran.exit_code, ran.stdout, ran.stderr)

    async def exec_remote(self, cmd: list[str], options: Any = None, *, stream: bool = True) -> Any:
        """Start a program that runs in parallel to the session's commands.

        Return the process if `stream` is True. Otherwise, wait until the process ends, and return
        its result.
        """
        process = FumehoodProcess(
            self, cmd, options or ExecRemoteCommonOptions(), next(self._numbers)
        )
        await process._start()
        if stream:
            return process
        output, exit_code = bytearray(), -1
        with anyio.fail_after(getattr(options, "timeout", None)):
            async for event in process:
                if isinstance(event, ExecStdout):
                    output += event.data.encode()
                    del output[: -SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE]
                else:
                    exit_code = event.exit_code
        return ExecResult(not exit_code, exit_code, output.decode(errors="replace"), "")

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file, and create its missing parent directories."""
        await self._script(_WRITE, file, given=contents)

    async def read_file(self, file: str, text: bool = True) -> Any:
        """Read a file. Return its content as text, which must be UTF-8, or as bytes if `text` is
        False.
        """
        copy, limits = f".read-{uuid.uuid4().hex}", SandboxEnvironmentLimits
        ran = await self._script(_READ, file, str(limits.MAX_READ_FILE_SIZE), f"{WORKSPACE}/{copy}")
        if ran.exit_code == _TOO_LARGE:
            raise OutputLimitExceededError(limits.MAX_READ_FILE_SIZE_STR, None)
        if ran.exit_code == _IN_FILE:
            content = await self.session.get(copy)
            await self.session.delete(copy)
        else:
            content = base64.b64decode(ran.stdout)
        return content.decode() if text else content

    async def _script(
        self, script: str, file: str, *more: str, given: str | bytes | None = None
    ) -> Finished:
        ran = await self._run(["/bin/sh", "-c", script, "sh", file, *more], given)
        if ran.exit_code not in (0, _TOO_LARGE, _IN_FILE):
            found = (number for part, number in _ERRORS if part in ran.stderr)
            raise OSError(next(found, errno.EIO), ran.output.strip()[:300], file)
        return ran

    async def _run(
        self,
        program: list[str],
        given: str | bytes | None = None,
        directory: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Finished:
        """Run a program and return its result. `given` is the program's standard input. Errors are
        raised as the exceptions that Inspect expects.
        """
        stdin = given.encode() if isinstance(given, str) else given
        path = ""
        with _as_inspect_expects():
            if stdin and len(stdin) > INLINE_BYTES:
                path, stdin = await self._put_input(stdin), None
            if path or directory:
                program = _program(program, path, directory)
            ran = await self.session.run(program, env=env, stdin=stdin, timeout_s=timeout_s)
        if ran.is_timeout:
            raise TimeoutError(ran.message)
        if ran.code == "OUTPUT_LIMIT_EXCEEDED":
            raise OutputLimitExceededError("the engine", ran.output)
        return ran

    async def _put_input(self, given: bytes) -> str:
        """Write data for a program's standard input to a file, and return the file's path. The
        shell script `_EXEC` opens the file for the program, and deletes it.
        """
        name = f".input-{uuid.uuid4().hex}"
        await self.session.put(name, given)
        return f"{WORKSPACE}/{name}"


class FumehoodProcess(ExecRemoteProcess):
    """A process of the session that runs in parallel to the session's commands.

    The process's standard error is part of its standard output. `pid` is only a sequence number
    within the sandbox. Like other processes in Inspect, this object can be iterated over only once.
    """

    def __init__(self, sandbox: FumehoodSandbox, cmd: list[str], options: Any, pid: int) -> None:
        super().__init__(sandbox, cmd, options, sandbox.default_polling_interval())
        self.name = f"inspect-{uuid.uuid4().hex}"
        self._inspect = sandbox
        self._session = sandbox.session
        self._session_id = ""
        self._number = pid
        self._pid: int | None = None
        self._offset = 0
        self._is_killed = False
        self._is_over = False

    async def _start(self) -> None:
        options, given = self._options, self._options.input or b""
        if options.user is not None:
            raise SandboxUserUnsupportedError(_ONE_USER.format(options.user))
        data = given.encode() if isinstance(given, str) else given
        is_open = getattr(options, "stdin_open", False)
        with _as_inspect_expects():
            self._session_id = await self._session.start()
        self._pid = self._number
        async with self._ended_if_cancelled():
            with _as_inspect_expects():
                path = "" if is_open else "/dev/null"
                if data and not is_open:
                    path = await self._inspect._put_input(data)
                program = _program(self._cmd, path, options.cwd)
                arguments = {"name": self.name, **program_arguments(program, options.env, None)}
                del arguments["return_files"]
                await self._session.call_beside("start_process", arguments)
            if is_open:
                await self._write(data)

    async def __anext__(self) -> Any:
        """Return the next event: one for each piece of output, then one for the end of the process.
        If `kill` has ended the process, there is no event for the end.

        If the caller's task is cancelled, the process is ended.

        Raises StopAsyncIteration if there are no more events.
        """
        if self._is_over:
            raise StopAsyncIteration
        async with self._ended_if_cancelled():
            with _as_inspect_expects():
                text, exit_code = await self._next()
        if text:
            return ExecStdout(data=text)
        self._is_over = True
        if self._is_killed:
            raise StopAsyncIteration
        return ExecCompleted(exit_code=exit_code)

    async def _next(self) -> tuple[str, int]:
        """Wait for output, and return it with the exit code 0. After the last output, return an
        empty text and the process's exit code.
        """
        client, session_id = await self._session.client(), self._session_id
        has_ended = self._is_killed
        while True:
            wait_s = DRAIN_S if has_ended else LOOK_S
            piece = await client.process_output(
                session_id, self.name, self._offset, wait_seconds=wait_s
            )
            self._offset = piece.offset
            if piece.text:
                return piece.text, 0
            shown = await client.process(session_id, self.name)
            if has_ended or piece.ended:
                if shown.exit_code is not None:
                    return "", shown.exit_code
                return "", BY_SIGNAL + (shown.signal or KILLED)
            has_ended = self._is_killed or shown.exit_code is not None or shown.signal is not None

    async def write_stdin(self, data: str | bytes) -> None:
        """Write to the process's standard input. Raises RuntimeError if the standard input is not
        open.
        """
        self._require_open("write_stdin")
        if self._is_over or self._is_killed:
            raise RuntimeError("Cannot write to stdin: process has terminated")
        await self._write(data.encode() if isinstance(data, str) else data)

    async def close_stdin(self) -> None:
        """Close the process's standard input, unless the process has ended."""
        self._require_open("close_stdin")
        if not (self._is_over or self._is_killed):
            await self._send({"close": True})

    async def kill(self) -> None:
        """End the process and all processes that it has started. The output so far can still be
        read.
        """
        if self._pid is None or self._is_over or self._is_killed:
            return
        self._is_killed = True
        with suppress(Refused, DaemonUnavailable):  # the session has ended, or no engine answers
            client = await self._session.client()
            await client.stop_process(self._session_id, self.name)

    @asynccontextmanager
    async def _ended_if_cancelled(self) -> AsyncIterator[None]:
        try:
            yield
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await self.kill()
            raise

    def _require_open(self, method: str) -> None:
        if not getattr(self._options, "stdin_open", False):
            raise RuntimeError(f"{method}() requires stdin_open=True in ExecRemoteStreamingOptions")

    async def _write(self, data: bytes) -> None:
        for start in range(0, len(data), STDIN_BYTES):
            piece = base64.b64encode(data[start : start + STDIN_BYTES]).decode("ascii")
            await self._send({"text_base64": piece})

    async def _send(self, arguments: dict[str, Any]) -> None:
        with _as_inspect_expects():
            await self._session.call_beside("write_process", {"name": self.name, **arguments})


_inspects_own = SandboxEnvironmentProxy.exec_remote


async def _exec_remote(
    self: Any, cmd: list[str], options: Any = None, *, stream: bool = True
) -> Any:
    """Start a program in the sandbox of the proxy `self`. This function is used in place of the
    method `exec_remote` of Inspect's class for sandbox proxies.

    If the proxy's sandbox is a `FumehoodSandbox`, call the sandbox's method `exec_remote`.
    Otherwise, call the original method of the proxy.
    """
    if isinstance(self._sandbox, FumehoodSandbox):
        return await self._sandbox.exec_remote(cmd, options, stream=stream)
    return await _inspects_own(self, cmd, options, stream=stream)


# The proxy that `sandbox()` returns forwards every method to a provider except this one.
SandboxEnvironmentProxy.exec_remote = _exec_remote


def _program(program: list[str], path: str, directory: str | None) -> list[str]:
    """Return a command that runs `program` in a directory, with its standard input from the file
    `path`.

    If `path` is empty, the standard input is not redirected.
    """
    return ["/bin/sh", "-c", _EXEC, "sh", path, directory or ".", *program]


@contextmanager
def _as_inspect_expects() -> Iterator[None]:
    """Convert the exceptions that a client raises in the block to the exceptions that Inspect
    expects.
    """
    try:
        yield
    except CallFailed as failed:
        if failed.code in DENIALS:
            raise PermissionError(f"{failed.code}: {failed.message}") from failed
        if failed.code == "INVALID_PARAMS":
            raise RuntimeError(str(failed)) from failed
        raise SandboxUnavailableError(str(failed)) from failed
    except (DaemonUnavailable, Refused) as failed:
        raise SandboxUnavailableError(str(failed)) from failed


@approver(name="fumehood")  # type: ignore[untyped-decorator]  # the library is not here
def fumehood_approver(
    agent_id: str | None = None, wait_for_approval: bool | float | None = None
) -> Approver:
    """Return an approver for Inspect that asks the engine to decide on each call. If the engine
    makes no decision, the call is rejected.

    `agent_id` is the agent for which the calls are made. `wait_for_approval` is passed to
    `AsyncClient.decide`.
    """
    options = {"agent_id": agent_id, "wait_for_approval": wait_for_approval}

    async def approve(
        message: str, call: ToolCall, view: ToolCallView, history: list[ChatMessage]
    ) -> Approval:
        context = {"client": "inspect-ai"}
        reason = await denial(None, call.function, call.arguments, context, options)
        return Approval(decision="approve" if reason is None else "reject", explanation=reason)

    return approve
