"""The file tools and programs of one container's workspace."""

from __future__ import annotations

from dataclasses import dataclass

from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB, Limits
from fumehood.core.tool import ToolDefinition
from fumehood.executors.effects import Effect
from fumehood.executors.outcome import Outcome
from fumehood.protocol.cursors import Cursors
from fumehood.sandbox.wall import NO_SINKS, RunEnding, RunSinks
from fumehood.workspace.executors import run_workspace
from fumehood.workspace.previews import effect_of
from support.one_container import OneContainer

LIMITS = Limits(20, 20, None, MB)
DOMAIN = TrustDomain("ann", None, "sess_1")


@dataclass
class EffectFiles:
    """Previews and runs tools, and runs programs, as the lease of a session does."""

    box: OneContainer
    queue_ms: float = 0.0

    async def run(
        self, program: str, arguments: JsonObject, limits: Limits, sinks: RunSinks = NO_SINKS
    ) -> RunEnding:
        """Run a program."""
        return await self.box.run(program, arguments, wall_s=limits.wall_s)

    async def shell(self, command: str) -> str:
        """Run a command, which succeeds, and return its output."""
        ending = await self.box.shell(command)
        assert ending.ended_by.value == "ok", ending.stderr
        return ending.stdout

    async def effect(self, tool: ToolDefinition, arguments: JsonObject) -> Effect:
        """The preview of a call."""
        found = await effect_of(tool, arguments, LIMITS, self)
        assert found is not None
        return found

    async def act(
        self, tool: ToolDefinition, arguments: JsonObject, expected: str | None
    ) -> Outcome:
        """Make a call that was approved with this preview."""
        return await run_workspace(
            tool, arguments, LIMITS, self, DOMAIN, Cursors(b"k" * 32), expected=expected
        )

    async def state(self) -> str:
        """The workspace's full state as the session's own programs see it.

        The housekeeper opens a directory its owner has closed, and closes it again.
        """
        shown = "%p %y %m %s %n %l %T@"
        return await self.shell(
            f"find . -mindepth 1 -type d ! -perm -700 -printf '{shown}\\n' -o "
            f"-mindepth 1 -printf '{shown} %C@\\n' | sort; "
            "find . -type f -readable -exec sha256sum {} + | sort"
        )

    async def empty(self) -> None:
        """Delete everything, whatever its modes."""
        await self.shell("chmod -R u+rwX . 2>/dev/null; find . -mindepth 1 -delete")
