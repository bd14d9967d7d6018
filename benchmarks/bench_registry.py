"""Ten thousand tools from a directory: loading, looking again, resolving, listing."""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.line import Line
from fumehood import Config, Engine
from fumehood.call_options import CallOptions
from fumehood.core.call import CallRequest
from fumehood.core.identity import Principal, Scope
from fumehood.definition_files.directory import ToolDirectory
from fumehood.definition_files.in_engine import DefinitionFiles
from fumehood.identity.model import Agent, Binding
from fumehood.pipeline.resolve import resolve
from fumehood.protocol.messages import encode_envelope
from fumehood.registry.index import ToolFilter

TOOLS = 10_000
FILES = 20
AGENTS = 1_000
TIMES = 300
TODAY = date(2026, 1, 1)
ME = Principal("uid:1000", frozenset({Scope.CALL}), frozenset({"a500"}))


def registry_lines() -> Iterator[Line]:
    """At the level of the engine, without HTTP."""
    with tempfile.TemporaryDirectory(prefix="fh-bench-", dir="/tmp") as place:
        directory, home = Path(place, "tools"), Path(place, "home")
        for path in (directory, home):
            path.mkdir(mode=0o700)
        _write_files(directory)
        before = time.perf_counter()
        engine = Engine(config=Config(home=home, tools_directory=directory))
        seconds = time.perf_counter() - before
        if len(engine.tools()) < TOOLS or engine.part(DefinitionFiles).faults:
            raise RuntimeError("the definitions were not loaded")
        yield Line(f"{TOOLS} tools: start of the engine", "–", f"{seconds:.2f} s", None)
        watched = ToolDirectory(directory)
        watched.load()
        look_ms = _median_ms(watched.poll)
        yield Line(f"{TOOLS} tools in {FILES} files: one look", "–", f"{look_ms:.2f} ms", None)
        asyncio.run(_make_agents(engine))
        for whose, options in (("", CallOptions()), (" as an agent", CallOptions(agent_id="a500"))):
            request = CallRequest("tool_05000", {}, options, ME, "call_bench", "trace_bench")
            resolve_ms = _median_ms(
                lambda r=request: resolve(r, engine._made.services.registry, engine.agents, TODAY)  # type: ignore[misc]
            )
            yield Line(
                f"{TOOLS} tools, {AGENTS} agents: resolve{whose}", "≤ 0.1 ms",
                f"{resolve_ms:.4f} ms", resolve_ms <= 0.1,
            )  # fmt: skip
        page_ms = _median_ms(lambda: engine.agent_tools(ME, "a500", at_most=100))
        yield Line("tools of one of these agents", "≤ 20 ms", f"{page_ms:.2f} ms", page_ms <= 20)
        middle = _middle(engine)
        for what, filter_by, cursor in (
            ("a page of 100", ToolFilter(), middle),
            ("a page of 100 by tag", ToolFilter(tag="t3"), None),
        ):
            page_ms = _median_ms(lambda f=filter_by, c=cursor: _page(engine, f, c))  # type: ignore[misc]
            yield Line(f"{TOOLS} tools: {what}", "≤ 20 ms", f"{page_ms:.2f} ms", page_ms <= 20)
        engine.database.close()


async def _make_agents(engine: Engine) -> None:
    """Agents with ten tools each, with one argument fixed."""
    by, now = Principal("approver:bench", frozenset({Scope.ADMIN})), engine.now()
    for number in range(AGENTS):
        agent_id = f"a{number}"
        await engine.agents.create(Agent(id=agent_id, principals=(ME.id,)), by=by, now=now)
        for tool in range(number * 10, number * 10 + 10):
            binding = Binding(tool=f"tool_{tool:05}", fixed={"limit": 5})
            await engine.agents.bind(agent_id, binding, by=by, now=now)


def _page(engine: Engine, filter_by: ToolFilter, cursor: str | None) -> bytes:
    """A page as the daemon makes it."""
    page = engine.tools_page(filter_by=filter_by, limit=100, cursor=cursor)
    if len(page.tools) != 100:
        raise RuntimeError("a page was not full")
    items = [tool.definition.model_dump(mode="json") for tool in page.tools]
    return encode_envelope(engine.answer({"items": items, "pagination": page.pagination}))


def _middle(engine: Engine) -> str:
    cursor: str | None = None
    for _ in range(TOOLS // 200):
        cursor = engine.tools_page(limit=100, cursor=cursor).next_cursor
    if cursor is None:
        raise RuntimeError("the list ended too soon")
    return cursor


def _median_ms(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(TIMES):
        before = time.perf_counter()
        work()
        times.append(time.perf_counter() - before)
    return statistics.median(times) * 1e3


def _write_files(directory: Path) -> None:
    size = TOOLS // FILES
    for number in range(FILES):
        tools = [_document(i) for i in range(number * size, (number + 1) * size)]
        path = directory / f"tools-{number:02}.json"
        path.write_text(json.dumps({"tools": tools}), encoding="utf-8")
        path.chmod(0o600)


def _document(number: int) -> dict[str, Any]:
    return {
        "name": f"tool_{number:05}",
        "type": "REST",
        "description": "Read one record of a large catalogue by its number, as it was last saved.",
        "method": "GET",
        "endpoint": f"https://catalogue.example/v1/{number}",
        "category": f"c{number % 20}",
        "tags": ["catalogue", f"t{number % 7}"],
        "read_only": True,
        "parameters": {
            "properties": {
                "query": {"type": "string", "maxLength": 200, "description": "What to look for."},
                "limit": {"type": "integer", "minimum": 1, "maximum": 50, "default": 10},
            },
            "required": ["query"],
        },
    }
