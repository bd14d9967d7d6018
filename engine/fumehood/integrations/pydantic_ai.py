"""Pydantic AI: a backend that makes a session the agent's workspace.

Needs the extra `pydantic-ai`. Pydantic AI's tools read and write files with shell commands.
*Source*: the contract in `pydantic_ai.workspaces.protocol`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

from pydantic_ai.workspaces import (
    CommandResult,
    SupportsCommands,
    WorkspaceBackend,
    WorkspaceOutputLimitError,
    WorkspaceRef,
    WorkspaceTimeoutError,
    WorkspaceUnavailableError,
)
from pydantic_ai.workspaces.protocol import WorkspaceCommand

from fumehood.client import AsyncClient
from fumehood.client.api_request import Refused
from fumehood.client.async_session import AsyncSession
from fumehood.client.finished import refused
from fumehood.core.decision import DENIALS
from fumehood.core.envelope import CallFailed

PROVIDER = "fumehood"
WORKING_DIRECTORY = "/workspace"


class FumehoodWorkspace(WorkspaceBackend, SupportsCommands):
    """A session as the workspace of an agent: `agent.run(…, workspace=FumehoodWorkspace())`.

    If `ref` or `session_id` is given, that existing session is used. As Pydantic AI's protocol
    demands, the session outlives an agent's run. A session that this object created is ended by
    `close`, or when `async with` is left.
    """

    def __init__(
        self,
        ref: WorkspaceRef | None = None,
        *,
        client: AsyncClient | None = None,
        session_id: str | None = None,
        **options: Any,
    ) -> None:
        """`options` are passed to `AsyncSession`. A new session is created on first use.

        Raises:
            ValueError: `ref` is from another provider.
        """
        if ref is not None:
            if ref.provider != PROVIDER:
                raise ValueError(f"This is no workspace of {PROVIDER}: {ref.provider[:80]!r}.")
            session_id = ref.id
        self._session = AsyncSession(client, session_id=session_id, **options)
        self._is_attached = session_id is None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the session if this object created it."""
        await self._session.close()

    @property
    def ref(self) -> WorkspaceRef | None:
        """A reference to the session, or None before the session's first use."""
        return (
            None
            if self._session.id is None
            else WorkspaceRef(provider=PROVIDER, id=self._session.id)
        )

    async def working_dir(self) -> str:
        """Return the directory in which commands start."""
        await self._attach()
        return WORKING_DIRECTORY

    async def run(
        self,
        command: WorkspaceCommand,
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  # the protocol's
    ) -> CommandResult:
        """Run a command. Without `timeout`, the engine's maximum applies.

        If the engine denies the command, return the exit code 126, because an exception would end
        the agent's run.
        """
        if isinstance(command, str) != shell:
            raise TypeError("A text needs shell=True, and a list of arguments shell=False.")
        if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
            raise ValueError("timeout must be a number of seconds over 0, or None.")
        await self._attach()
        try:
            ran = await self._session.run(command, env=env, timeout_s=timeout)
        except (CallFailed, Refused) as failed:
            if not isinstance(failed, CallFailed) or failed.code not in DENIALS:
                await self._raise_if_over(failed)
                raise
            ran = refused(failed)
        if ran.is_timeout:
            raise WorkspaceTimeoutError(ran.message, stdout=ran.stdout, stderr=ran.stderr)
        if ran.code == "OUTPUT_LIMIT_EXCEEDED":
            longest = max(len(text.encode()) for text in (ran.stdout, ran.stderr))
            raise WorkspaceOutputLimitError(
                ran.message, limit=longest, stdout=ran.stdout, stderr=ran.stderr
            )
        stderr = ran.stderr if ran.code is None else f"{ran.stderr}{ran.message}\n"
        return CommandResult(exit_code=ran.exit_code, stdout=ran.stdout, stderr=stderr)

    async def _attach(self) -> None:
        """Create the session or, on first use of a given session, check that it is active."""
        if not self._is_attached:
            await self._raise_if_over(None)
            self._is_attached = True
        await self._session.start()

    async def _raise_if_over(self, cause: Exception | None) -> None:
        try:
            if await self._session.is_active():
                return
        except Refused as refused:
            cause = cause or refused
        raise WorkspaceUnavailableError(f"The session {self._session.id} is over.") from cause
