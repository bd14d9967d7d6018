"""A log that records its events, and an engine on a fake wall."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fumehood import Config, Engine
from fumehood.engine import Tool
from fumehood.testing import FakeWall, ManualClock


@dataclass
class RecordingLog:
    """Takes events like a structlog logger; `events` holds level, name and values."""

    events: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    def is_enabled_for(self, level: int) -> bool:
        """Enable every level."""
        return True

    def debug(self, event: str, **values: Any) -> None:
        self.events.append(("debug", event, values))

    def info(self, event: str, **values: Any) -> None:
        self.events.append(("info", event, values))

    def warning(self, event: str, **values: Any) -> None:
        self.events.append(("warning", event, values))

    def error(self, event: str, **values: Any) -> None:
        self.events.append(("error", event, values))

    def named(self, event: str) -> list[dict[str, Any]]:
        """The values of all events of this name."""
        return [values for _, name, values in self.events if name == event]

    def above_debug(self) -> list[tuple[str, str, dict[str, Any]]]:
        """The events above debug level, which an operator sees by default."""
        return [event for event in self.events if event[0] != "debug"]


@dataclass
class Bench:
    """An engine with a fake wall, a manual clock and a recording log."""

    engine: Engine
    wall: FakeWall
    log: RecordingLog
    clock: ManualClock


@asynccontextmanager
async def bench(
    home: Path, tools: Iterable[Tool] = (), wall: FakeWall | None = None, **config: Any
) -> AsyncIterator[Bench]:
    """A running engine without any process."""
    wall = wall or FakeWall()
    log, clock = RecordingLog(), ManualClock()
    engine = Engine(
        tools, config=Config(home=home, **config), interpreter=wall, log=log, clock=clock
    )
    async with engine:
        yield Bench(engine, wall, log, clock)
