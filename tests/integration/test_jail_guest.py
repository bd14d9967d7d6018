"""The jail's guest process: start, replacement, progress reports, and a kernel without Landlock."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import anyio
import psutil
import pytest

from fumehood import Config, Engine
from fumehood.core.errors import EndedBy
from fumehood.core.identity import TrustDomain
from fumehood.core.limits import Limits
from fumehood.sandbox.process.wall import JailWall, jail_command
from fumehood.sandbox.wall import RunSinks
from support import jailed_tools
from support.answers import code_of, error_of
from support.processes import children_of_guest, is_gone
from support.wait import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.needs("landlock")]

TESTS = Path(__file__).parents[1]
WITHOUT_LANDLOCK = TESTS / "support" / "without_landlock.py"


@pytest.mark.row("S8")
async def test_progress_reports_reach_the_sink_bounded_and_survive_a_failing_sink() -> None:
    heard: list[tuple[float, str]] = []
    limits = Limits(5, 5, 256, 1 << 20)
    async with JailWall([str(TESTS)]) as wall, wall.lease(TrustDomain("a"), fresh=True) as lease:
        call = {"module": "support.jailed_tools", "name": "report", "import_path": str(TESTS)}
        ending = await lease.run(
            "function",
            {**call, "arguments": {}},
            limits,
            RunSinks(progress=lambda p, m: heard.append((p, m))),
        )
        assert ending.ended_by is EndedBy.OK
        assert heard == [(0.0, "step 0"), (50.0, "step 1")]
        heard.clear()
        ending = await lease.run(
            "function",
            {**call, "arguments": {"times": 3000}},
            limits,
            RunSinks(progress=lambda p, m: heard.append((p, m))),
        )
        assert ending.ended_by is EndedBy.OK
        assert len(heard) == 1000

        def fail(percent: float, message: str) -> None:
            heard.append((percent, message))
            raise RuntimeError("a listener of another's making")

        heard.clear()
        ending = await lease.run(
            "function", {**call, "arguments": {"times": 5}}, limits, RunSinks(progress=fail)
        )
        assert ending.ended_by is EndedBy.OK
        assert len(heard) == 1
        deaf = await lease.run("function", {**call, "arguments": {}}, limits)
        assert deaf.result == {"data": "done", "tokens_used": 0, "cost": "0"}


@pytest.mark.row("S1")
async def test_without_landlock_only_jail_tools_are_refused(tmp_path: Path) -> None:
    command = [sys.executable, str(WITHOUT_LANDLOCK), *jail_command([str(TESTS)])]
    wall = JailWall(command=command)
    async with Engine(tools=[jailed_tools.add], config=Config(home=tmp_path), jail=wall) as engine:
        refused = await engine.call("add_up", {"first": 1})
        assert code_of(refused) == "SANDBOX_UNAVAILABLE"
        assert "CONFIG_SECURITY_LANDLOCK" in error_of(refused).message
        assert engine.walls["jail"]["ready"] is False
        assert engine.walls["jail"]["essential"] is False
        assert engine.walls["jail"]["faults"] == ["Unavailable: the kernel has no Landlock"]
        assert (await engine.call("calculator", {"expression": "1 + 1"})).success


@pytest.mark.row("S2")
async def test_engine_without_sandboxed_functions_starts_no_jail(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    async with Engine(config=Config(home=tmp_path)) as engine:
        assert set(engine.walls) == {"interpreter"}
        new = [c for c in psutil.Process().children() if c.pid not in before]
        assert len(new) == 1


@pytest.mark.row("S9")
async def test_killed_jail_guest_is_replaced(tmp_path: Path) -> None:
    async with Engine(
        tools=[jailed_tools.add, jailed_tools.run_code], config=Config(home=tmp_path)
    ) as engine:
        guest = psutil.Process(engine.walls["jail"]["guest_pid"])
        family = [guest, *children_of_guest(guest)]
        lost = []

        async def run() -> None:
            lost.append(await engine.call("run_code", {"code": "while True: pass"}))

        async with anyio.create_task_group() as group:
            group.start_soon(run)
            with anyio.fail_after(20):
                while not any(
                    c.cpu_times().user > 0.3 and c.status() == "running" for c in guest.children()
                ):
                    await anyio.sleep(0.02)
            family = [guest, *children_of_guest(guest)]
            os.kill(guest.pid, signal.SIGKILL)
        assert lost[0].error.code == "SANDBOX_UNAVAILABLE"
        assert lost[0].error.retryable is False
        await anyio.to_thread.run_sync(wait_until, lambda: all(map(is_gone, family)))
        assert (await engine.call("add_up", {"first": 1})).data["sum"] == 2
        assert engine.walls["jail"]["guest_pid"] != guest.pid
