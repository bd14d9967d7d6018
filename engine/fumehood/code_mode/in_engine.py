"""Code mode in one engine: gives a program the tools that its call names."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fumehood.code_mode.calls import ToolCalls
from fumehood.code_mode.stream import CALLS, CallStream
from fumehood.code_mode.tools import tools_of
from fumehood.core.errors import EngineError, ToolDisabled
from fumehood.core.json_types import JsonObject
from fumehood.engine_part import EnginePart
from fumehood.executors.around import Given, Ran, Share, needs_of
from fumehood.executors.base import ToolRun
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.context import PipelineServices
from fumehood.sandbox.streams import Stream

if TYPE_CHECKING:
    from fumehood.compose import Composition


class CodeMode(EnginePart):
    """Code mode as a part of one engine. Lets programs in containers call other tools."""

    _services: PipelineServices

    @asynccontextmanager
    async def running(self, made: Composition) -> AsyncIterator[None]:
        """Store the engine's services, which `made` contains, before the first call. `around` uses
        them.
        """
        self._services = made.services
        yield

    def require_possible(self, permitted: PermittedCall, services: PipelineServices) -> None:
        """Raise EngineError if the call names tools that its program must not call."""
        if "tools" in needs_of(permitted.tool.definition, permitted.arguments, ()):
            binding = permitted.validated.binding
            tools_of(
                permitted.request, permitted.arguments["tools"], services,
                are_fixed=binding is not None and "tools" in binding.fixed,
            )  # fmt: skip

    @asynccontextmanager
    async def around(self, run: ToolRun, before: Sequence[Given]) -> AsyncIterator[Given | None]:
        """Yield what the program needs in order to call tools. Yield None if the call's argument
        `tools` lists no tools.

        After the run, the call's result reports how often the program called the tools. `before` is
        what earlier parts add to the run; it is not used.

        Raises:
            ToolDisabled: the program may no longer call one of the tools.
        """
        if "tools" not in needs_of(run.tool.definition, run.arguments, ()):
            yield None
            return
        assert run.calls is not None
        try:
            tools = tools_of(run.request, run.arguments["tools"], self._services)
        except EngineError:
            # The name may be one that the agent's configuration fixes, which no answer may show.
            raise ToolDisabled(
                "A tool that the program may call has changed while the call waited, so nothing "
                "ran. Repeat the call."
            ) from None
        calls = ToolCalls(tools, run.calls)

        def share(ran: Ran) -> Share:
            fields: JsonObject = {}
            fields["tool_calls"] = calls.report
            return Share(fields=fields)

        yield Given(
            needs=frozenset({"tools"}),
            arguments={"tools": tools},
            streams=(Stream(CALLS, lambda port: CallStream(calls.on_call, port)),),
            share=share,
        )
