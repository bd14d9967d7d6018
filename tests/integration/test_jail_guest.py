"""The jail's guest process: only started if needed, and a kernel without Landlock."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from fumehood import Config, Engine
from fumehood.sandbox.process.wall import JailWall, jail_command
from support import jailed_tools
from support.answers import code_of, error_of

pytestmark = [pytest.mark.anyio, pytest.mark.needs("landlock")]

TESTS = Path(__file__).parents[1]
WITHOUT_LANDLOCK = TESTS / "support" / "without_landlock.py"


@pytest.mark.row("S1")
@pytest.mark.parametrize("is_late", [False, True], ids=["as it comes", "ended before it is named"])
async def test_without_landlock_only_jail_tools_are_refused(tmp_path: Path, is_late: bool) -> None:
    jail = jail_command([str(TESTS)])
    if is_late:  # as on a busy machine
        jail[-2] = str(TESTS / "support" / "late_ids.py")
    command = [sys.executable, str(WITHOUT_LANDLOCK), *jail]
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
