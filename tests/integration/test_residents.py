"""Resident processes: one per trust domain, bounded in number, uses and idle time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import psutil
import pytest

from fumehood.core.identity import TrustDomain
from fumehood.core.limits import Limits
from fumehood.interpreter.sticky_workers import StickyWorkerSettings
from fumehood.interpreter.wall import InterpreterWall
from support.wait import DEADLINE_S, wait_until

pytestmark = pytest.mark.anyio

LIMITS = Limits(wall_s=5, cpu_s=5, memory_mb=64, output_bytes=65536)


@asynccontextmanager
async def wall_with(**rules: float) -> AsyncIterator[InterpreterWall]:
    async with InterpreterWall(sticky=StickyWorkerSettings(**rules)) as wall:
        yield wall


WORK = "pow(7, 10**900, 10**900 + 7)"  # some ten milliseconds: more than any process idles away


async def resident_pid(wall: InterpreterWall, who: str = "a") -> int:
    """Evaluate in one domain; the process that used the most CPU time is its resident."""
    before = cpu_times(wall)
    async with wall.lease(TrustDomain(who), fresh=False) as lease:
        ending = await lease.run("calculator", {"expression": WORK}, LIMITS)
    assert ending.isolation == "resident"
    after = cpu_times(wall)
    return max(after, key=lambda pid: after[pid] - before.get(pid, after[pid]))


def cpu_times(wall: InterpreterWall) -> dict[int, float]:
    from importlib import import_module

    kernel = import_module("fumehood.guest.core.kernel")
    children = psutil.Process(wall.guest_pid).children()
    return {child.pid: kernel.process_cpu_ns(child.pid) for child in children}


@pytest.mark.row("S2")
async def test_each_trust_domain_keeps_its_own_resident() -> None:
    async with wall_with() as wall:
        await resident_pid(wall, "a")
        await resident_pid(wall, "b")
        first = [await resident_pid(wall, "a") for _ in range(3)]
        second = [await resident_pid(wall, "b") for _ in range(3)]
        assert len(set(first)) == len(set(second)) == 1
        assert set(first).isdisjoint(second)


@pytest.mark.row("S2")
async def test_resident_is_replaced_after_its_maximum_uses() -> None:
    async with wall_with(uses=3) as wall:
        await resident_pid(wall)
        used = await resident_pid(wall)
        await resident_pid(wall)
        assert await resident_pid(wall) != used


@pytest.mark.row("S2")
async def test_resident_is_replaced_after_any_ending_but_ok() -> None:
    async with wall_with() as wall:
        await resident_pid(wall)
        for expression in ("1/0", "open(1)", "2^3", "9**9**9"):
            before = await resident_pid(wall)
            async with wall.lease(TrustDomain("a"), fresh=False) as lease:
                await lease.run("calculator", {"expression": expression}, LIMITS)
            await resident_pid(wall)
            assert await resident_pid(wall) != before, expression
            wait_until(lambda: not psutil.pid_exists(before))  # noqa: B023 it ends in this turn


@pytest.mark.row("S2")
async def test_idle_resident_ends_after_its_idle_time() -> None:
    async with wall_with(idle_s=0.05) as wall:
        await resident_pid(wall)
        guest = psutil.Process(wall.guest_pid)
        with anyio.fail_after(DEADLINE_S):
            while len(guest.children()) > 3:  # zygote and two spares stay
                await anyio.sleep(0.02)


@pytest.mark.row("S2")
async def test_least_recently_used_resident_is_evicted() -> None:
    async with wall_with(most=2) as wall:
        for who in ("a", "b"):
            await resident_pid(wall, who)
        oldest = await resident_pid(wall, "a")
        newest = await resident_pid(wall, "b")
        await resident_pid(wall, "c")
        wait_until(lambda: not psutil.pid_exists(oldest))
        assert psutil.pid_exists(newest)
