"""A scripted upstream service, played by an executor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from fumehood.core.errors import EndedBy, EngineError, NetworkError
from fumehood.core.tool import ToolDefinition
from fumehood.executors.base import Placement, ToolRun
from fumehood.executors.kinds import EXECUTORS
from fumehood.executors.outcome import Outcome
from fumehood.rest.executor import RestExecutor
from support.definitions import rest_document
from support.recording import Bench, bench

Answer = EngineError | Callable[[ToolRun], Any] | str
"""An error, a function to run, or the value of a success."""


def unsent(error: EngineError) -> EngineError:
    """The error of a request that was certainly not sent."""
    error.was_sent = False
    return error


def gone(**fields: Any) -> NetworkError:
    """The error of a service that broke the connection."""
    return NetworkError("The service broke the connection.", **fields)


@dataclass
class ScriptedUpstream(RestExecutor):
    """Answers each tool's requests in the order of its script, then with "fine"."""

    scripts: dict[str, list[Answer]] = field(default_factory=dict)
    runs: list[ToolRun] = field(default_factory=list)
    network_ms: float = 10.0

    def placement(self, tool: ToolDefinition, *, in_session: bool) -> Placement:
        return Placement("host", "host", "this test plays the service")

    async def run(self, run: ToolRun) -> Outcome:
        self.runs.append(run)
        await asyncio.sleep(0)
        script = self.scripts.get(run.tool.definition.name, [])
        answer = script.pop(0) if script else "fine"
        if callable(answer):
            answer = await answer(run)
        is_error = isinstance(answer, EngineError)
        return Outcome(
            EndedBy.EXCEPTION if is_error else EndedBy.OK,
            "none",
            data=None if is_error else {"answer": answer},
            error=answer if is_error else None,
            network_ms=self.network_ms,
        )

    def asked(self, name: str = "weather") -> int:
        """The number of requests of a tool."""
        return sum(run.tool.definition.name == name for run in self.runs)


@dataclass
class UpstreamBench:
    """An engine whose REST tools call a scripted service."""

    bench: Bench
    upstream: ScriptedUpstream

    async def call(self, tool: str = "weather", **options: Any) -> Any:
        """The envelope of a call."""
        return await self.bench.engine.call(tool, {"city": "Oslo"}, **options)


@asynccontextmanager
async def upstream_bench(
    home: Path, monkeypatch: pytest.MonkeyPatch, *tools: Any, **config: Any
) -> AsyncIterator[UpstreamBench]:
    """A running engine; retries are immediate unless the service asks for a delay."""
    played = ScriptedUpstream()
    table = MappingProxyType({**EXECUTORS, "http": played})
    monkeypatch.setattr("fumehood.pipeline.plan.EXECUTORS", table)
    monkeypatch.setattr("fumehood.pipeline.retry.BASE_S", 0)
    async with bench(home, tools, **config) as made:
        yield UpstreamBench(made, played)


def weather(**fields: Any) -> dict[str, Any]:
    """The definition of a REST tool that may be repeated."""
    return rest_document(**{"idempotent": True, "retry_count": 3, **fields})
