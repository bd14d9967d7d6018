"""Inspect: a sandbox provider, `sandbox="fumehood"`, and an approver of the same name.

Needs the extra `inspect-ai`. Each sample has its own session. Files are read and written by shell
commands in the session.
"""

from __future__ import annotations

import base64
import errno
import uuid
from pathlib import Path
from typing import Any

from inspect_ai.approval import Approval, Approver, approver
from inspect_ai.model import ChatMessage
from inspect_ai.tool import ToolCall, ToolCallView
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from pydantic import BaseModel

from fumehood.client.api_request import DaemonUnavailable, Refused
from fumehood.client.async_session import AsyncSession
from fumehood.client.finished import Finished
from fumehood.core.decision import DENIALS
from fumehood.core.envelope import CallFailed
from fumehood.integrations._gate import denial

WORKSPACE = "/workspace"

INLINE_BYTES = 512 * 1024
"""Maximum number of bytes that are passed through a program's streams. Larger data is passed in a
temporary file in the workspace."""

_EXEC = '[ -z "$1" ] || exec < "$1"; cd -- "$2" && shift 2 && exec "$@"'
_WRITE = '[ ! -d "$1" ] || exec cat -- "$1"; mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
_READ = f"""
[ ! -d "$1" ] || exec cat -- "$1"
exec < "$1"
[ "$(stat -Lc %s -- "$1")" -le "$2" ] || exit 99
[ "$(stat -Lc %s -- "$1")" -gt {INLINE_BYTES} ] || exec base64
cat > "$3" && exit 98
"""
_TOO_LARGE, _IN_FILE, _NOT_EXECUTABLE = 99, 98, 126
"""Exit codes: of `_READ` for a file over the limit, and for a file that it copied; and a
shell's."""

_ERRORS = (
    ("Is a directory", errno.EISDIR),
    ("No such file", errno.ENOENT),
    ("Not a directory", errno.ENOTDIR),
    ("denied", errno.EACCES),
    ("Read-only", errno.EACCES),
)
"""Part of a shell's message → errno."""


class FumehoodSandboxConfig(BaseModel, frozen=True, extra="forbid"):
    """The configuration of a sandbox. Inspect also accepts a plain text, which names the image."""

    image: str | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    idle_seconds: float | None = None
    lifetime_seconds: float | None = None
    agent_id: str | None = None
    wait_for_approval: bool | float | None = None


@sandboxenv(name="fumehood")
class FumehoodSandbox(SandboxEnvironment):
    """One session as a sandbox. Relative paths are below `/workspace`."""

    def __init__(self, session: AsyncSession) -> None:
        super().__init__()
        self.session = session

    @classmethod
    async def sample_init(cls, task_name: str, config: Any, metadata: Any) -> dict[str, Any]:
        """Create a session. Raises DaemonUnavailable or Refused if that fails."""
        if not isinstance(config, FumehoodSandboxConfig):  # Inspect turns a text into a path
            config = FumehoodSandboxConfig(image=Path(config).name if config else None)
        session = AsyncSession(**config.model_dump())
        await session.start()
        return {"default": cls(session)}

    @classmethod
    async def sample_cleanup(
        cls, task_name: str, config: Any, environments: dict[str, Any], interrupted: bool
    ) -> None:
        """End the sessions."""
        for environment in environments.values():
            await environment.as_type(cls).session.close()

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """Return the configuration that was read from a log or a file."""
        return FumehoodSandboxConfig(**config)

    async def exec(
        self, cmd: list[str],
        input: str | bytes | None = None, cwd: str | None = None,  # noqa: A002
        env: dict[str, str] | None = None, user: str | None = None,
        timeout: int | None = None, timeout_retry: bool = True,  # noqa: ASYNC109
        concurrency: bool = True,
    ) -> ExecResult[str]:  # fmt: skip
        """Run a program, only once: it is not repeated if it reaches its time limit."""
        if user is not None:
            raise SandboxUserUnsupportedError(f"The sandbox has one user; {user!r} is none of it.")
        ran = await self._run(cmd, input, cwd, env, timeout)
        if ran.exit_code == _NOT_EXECUTABLE and "denied" in ran.stderr:
            raise PermissionError(errno.EACCES, ran.stderr.strip(), cmd[0])
        return ExecResult(not ran.exit_code, ran.exit_code, ran.stdout, ran.stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file, and create its missing parent directories."""
        await self._script(_WRITE, file, given=contents)

    async def read_file(self, file: str, text: bool = True) -> Any:
        """Read a file, as UTF-8 text or as bytes."""
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
        """Run a program. Raises the exceptions that Inspect expects."""
        stdin = given.encode() if isinstance(given, str) else given
        name = f".input-{uuid.uuid4().hex}" if stdin and len(stdin) > INLINE_BYTES else ""
        if name or directory:
            path = f"{WORKSPACE}/{name}" if name else ""
            program = ["/bin/sh", "-c", _EXEC, "sh", path, directory or ".", *program]
        try:
            if name:
                await self.session.put(name, stdin or b"")
                stdin = None
            ran = await self.session.run(program, env=env, stdin=stdin, timeout_s=timeout_s)
            if name:
                await self.session.delete(name)
        except CallFailed as failed:
            if failed.code in DENIALS:
                raise PermissionError(f"{failed.code}: {failed.message}") from failed
            raise SandboxUnavailableError(str(failed)) from failed
        except (DaemonUnavailable, Refused) as failed:
            raise SandboxUnavailableError(str(failed)) from failed
        if ran.is_timeout:
            raise TimeoutError(ran.message)
        if ran.code == "OUTPUT_LIMIT_EXCEEDED":
            raise OutputLimitExceededError("the engine", ran.output)
        return ran


@approver(name="fumehood")  # type: ignore[untyped-decorator]  # the library is not here
def fumehood_approver(
    agent_id: str | None = None, wait_for_approval: bool | float | None = None
) -> Approver:
    """Return an approver that requests the engine's decision. Without one, the call is rejected."""
    options = {"agent_id": agent_id, "wait_for_approval": wait_for_approval}

    async def approve(
        message: str, call: ToolCall, view: ToolCallView, history: list[ChatMessage]
    ) -> Approval:
        context = {"client": "inspect-ai"}
        reason = await denial(None, call.function, call.arguments, context, options)
        return Approval(decision="approve" if reason is None else "reject", explanation=reason)

    return approve
