"""Retention: in the background, at the start and when due; what fails is tried again."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from fumehood.storage import retention as retention_module
from fumehood.storage.errors import ReadFailed
from fumehood.storage.retention import retention

pytestmark = [pytest.mark.anyio, pytest.mark.row("D6")]

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Log:
    """Counts how often it was pruned; fails as it is told."""

    def __init__(self, *errors: Exception | None) -> None:
        self.errors = list(errors)
        self.pruned: asyncio.Queue[datetime] = asyncio.Queue()
        self.overdue = asyncio.Event()

    async def prune(self, now: datetime) -> int:
        self.overdue.clear()
        self.pruned.put_nowait(now)
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        return 0


async def times(log: Log, count: int) -> list[datetime]:
    async with asyncio.timeout(20):
        return [await log.pruned.get() for _ in range(count)]


async def test_log_is_pruned_at_the_start_and_whenever_it_is_overdue() -> None:
    log = Log()
    async with retention(log, lambda: NOW, pytest.fail):  # type: ignore[arg-type]
        assert await times(log, 1) == [NOW]
        for _ in range(3):
            log.overdue.set()
            assert await times(log, 1) == [NOW]
        assert log.pruned.empty()


async def test_log_is_pruned_each_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    assert retention_module.INTERVAL_S == 3600
    monkeypatch.setattr(retention_module, "INTERVAL_S", 0.001)
    log = Log()
    async with retention(log, lambda: NOW, pytest.fail):  # type: ignore[arg-type]
        assert len(await times(log, 5)) == 5


async def test_failure_is_reported_and_does_not_end_it() -> None:
    faults: list[Exception] = []
    log = Log(ReadFailed("damaged"), ValueError("a bug"), None)
    async with retention(log, lambda: NOW, faults.append):  # type: ignore[arg-type]
        for _ in range(3):
            await times(log, 1)
            log.overdue.set()
        await times(log, 1)
    assert [type(fault) for fault in faults] == [ValueError]


async def test_nothing_goes_on_after_the_end() -> None:
    log = Log()
    before = asyncio.all_tasks()
    async with retention(log, lambda: NOW, pytest.fail):  # type: ignore[arg-type]
        await times(log, 1)
        assert len(asyncio.all_tasks()) == len(before) + 1
    log.overdue.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert log.pruned.empty()
    assert asyncio.all_tasks() == before


async def test_what_is_kept_for_a_short_time_is_looked_at_as_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retention_module, "MIN_INTERVAL_S", 0.001)
    log = Log()
    async with retention(log, lambda: NOW, pytest.fail, kept_s=0.001):  # type: ignore[arg-type]
        assert len(await times(log, 3)) == 3
