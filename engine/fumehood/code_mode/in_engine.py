"""Code mode in one engine: a program gets the tools that its call names.

Host side. The program's calls pass the whole pipeline (`pipeline/child_calls.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fumehood.code_mode.stream import CALLS, CallStream
from fumehood.core.json_types import JsonObject
from fumehood.engine_part import EnginePart
from fumehood.executors.around import Given, Ran, Share
from fumehood.executors.base import ToolRun
from fumehood.sandbox.streams import Stream


class CodeMode(EnginePart):
    """Lets programs call tools."""

    @asynccontextmanager
    async def around(self, run: ToolRun, before: Sequence[Given]) -> AsyncIterator[Given | None]:
        """Give the program the tools that its call names, and report its calls in the outcome."""
        calls = run.calls
        if calls is None or not calls.tools:
            yield None
            return

        def share(ran: Ran) -> Share:
            fields: JsonObject = {}
            fields["tool_calls"] = calls.report
            return Share(fields=fields)

        yield Given(
            needs=frozenset({"tools"}),
            arguments={"tools": calls.tools},
            streams=(Stream(CALLS, lambda port: CallStream(calls.on_call, port)),),
            share=share,
        )
