"""OpenAI Agents SDK: an executor for a `ShellTool`, which runs commands in a session.

Needs the extra `openai-agents`.
"""

from __future__ import annotations

from agents import ShellCallOutcome, ShellCommandOutput, ShellCommandRequest, ShellResult

from fumehood.client.async_session import AsyncSession
from fumehood.client.finished import refused
from fumehood.core.envelope import CallFailed


class FumehoodShell(AsyncSession):
    """Runs the commands of a shell call in one session: `ShellTool(executor=FumehoodShell())`."""

    async def __call__(self, request: ShellCommandRequest) -> ShellResult:
        """Run the commands of a shell call. Return one output for each command, even for a command
        that is refused.

        The time limit of the shell call applies to each command separately.
        """
        action = request.data.action
        timeout_s = action.timeout_ms / 1000 if action.timeout_ms else None
        output = [await self._output(command, timeout_s) for command in action.commands]
        return ShellResult(output=output, max_output_length=action.max_output_length)

    async def _output(self, command: str, timeout_s: float | None) -> ShellCommandOutput:
        try:
            ran = await self.run(command, timeout_s=timeout_s)
        except CallFailed as failed:
            ran = refused(failed)
        outcome = ShellCallOutcome(type="exit", exit_code=ran.exit_code)
        if ran.is_timeout:
            outcome = ShellCallOutcome(type="timeout")
        return ShellCommandOutput(
            stdout=ran.stdout,
            stderr=ran.stderr if ran.code is None else f"{ran.stderr}{ran.message}\n",
            outcome=outcome,
            command=command,
        )
