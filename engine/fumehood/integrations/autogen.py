"""AutoGen: a code executor for Python, shell and JavaScript.

Needs the extra `autogen`. Python variables persist from block to block.
"""

from __future__ import annotations

import asyncio
from typing import Any, Self

from autogen_core import CancellationToken, Component
from autogen_core.code_executor import CodeBlock, CodeExecutor, CodeResult
from pydantic import BaseModel

from fumehood.client import AsyncClient
from fumehood.client.async_session import AsyncSession
from fumehood.client.finished import refused
from fumehood.core.envelope import CallFailed
from fumehood.core.json_types import JsonObject

TOOLS = {
    "python": "run_python", "py": "run_python", "sh": "run_shell", "bash": "run_shell",
    "shell": "run_shell", "javascript": "run_javascript", "js": "run_javascript",
}  # fmt: skip
"""Maps the language of a code block, in lower case, to the name of the tool that runs the block."""


class FumehoodCodeExecutorConfig(BaseModel):
    """The part of an executor's configuration that AutoGen can save. It does not include the client
    and the session.
    """

    timeout: float = 60
    image: str | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None


class FumehoodCodeExecutor(CodeExecutor, Component[FumehoodCodeExecutorConfig]):
    """Runs code blocks in one session. `timeout` is the time limit for each block, in seconds."""

    component_config_schema = FumehoodCodeExecutorConfig
    component_provider_override = "fumehood.integrations.autogen.FumehoodCodeExecutor"

    def __init__(
        self,
        timeout: float = 60,
        *,
        image: str | None = None,
        memory_mb: int | None = None,
        disk_mb: int | None = None,
        client: AsyncClient | None = None,
        **options: Any,
    ) -> None:
        """`options` are passed to `AsyncSession`. The session is created on first use."""
        self._config = FumehoodCodeExecutorConfig(
            timeout=timeout, image=image, memory_mb=memory_mb, disk_mb=disk_mb
        )
        options |= self._config.model_dump(exclude={"timeout"})
        self._session = AsyncSession(client, timeout_seconds=timeout, **options)

    async def execute_code_blocks(
        self, code_blocks: list[CodeBlock], cancellation_token: CancellationToken
    ) -> CodeResult:
        """Run the blocks in order until a block fails or is refused. Return the combined output of
        all blocks that ran.

        Raises:
            ValueError: a block has an unsupported language; nothing ran.
            TimeoutError: a block took too long.
            asyncio.CancelledError: `cancellation_token` was cancelled, and the running block was
                ended.
        """
        for block in code_blocks:
            if block.language.lower() not in TOOLS:
                raise ValueError(f"There is no sandbox for {block.language[:80]!r}.")
        running = asyncio.ensure_future(self._run(code_blocks))
        cancellation_token.link_future(running)
        return await running

    async def start(self) -> None:
        """Create the session now. If this method is not called, the first code block creates it."""
        await self._session.start()

    async def stop(self) -> None:
        """End the session if this object created it."""
        await self._session.close()

    async def restart(self) -> None:
        """End the session and create a new one."""
        await self.stop()
        await self.start()

    def _to_config(self) -> FumehoodCodeExecutorConfig:
        return self._config

    @classmethod
    def _from_config(cls, config: FumehoodCodeExecutorConfig) -> Self:
        return cls(**config.model_dump())

    async def _run(self, code_blocks: list[CodeBlock]) -> CodeResult:
        output = ""
        for block in code_blocks:
            tool = TOOLS[block.language.lower()]
            source = "command" if tool == "run_shell" else "code"
            arguments: JsonObject = {source: block.code, "return_files": False}
            envelope = await self._session.call(tool, arguments)
            try:
                ran = await self._session.finish(envelope)
            except CallFailed as failed:
                ran = refused(failed)
            output += ran.output
            if ran.is_timeout:
                raise TimeoutError(ran.message)
            if ran.exit_code:
                return CodeResult(exit_code=ran.exit_code, output=output)
            if envelope.data.get("value_repr") not in (None, "None"):
                output += f"{await self._session.whole(envelope, 'value_repr')}\n"
        return CodeResult(exit_code=0, output=output)
