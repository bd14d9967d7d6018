"""Budgets on the way of a call: reserved before it runs, settled whatever becomes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood import Config, Engine
from fumehood.budgets.model import BudgetStanding
from fumehood.budgets.settings import BudgetRule
from fumehood.core.call import CallBody
from fumehood.core.envelope import Envelope
from fumehood.core.usage import Prices
from fumehood.executors.handle import CallHandle
from fumehood.testing import FakeWall

pytestmark = [pytest.mark.anyio, pytest.mark.row("E4")]

SUM = {"expression": "2 + 2"}
EVER: dict[str, Any] = {"name": "b", "period": "total"}


def limited(home: Path, wall: FakeWall | None = None, **limits: Any) -> Engine:
    """An engine with one budget, whose calculator runs nothing."""
    budgets = (BudgetRule(**{**EVER, **limits}),)
    config = Config(home=home, budgets=budgets, prices=Prices(currency="CHF"))
    return Engine(config=config, interpreter=wall or FakeWall())


def code(envelope: Envelope) -> str:
    return "OK" if envelope.error is None else envelope.error.code


def standing(engine: Engine) -> BudgetStanding:
    (found,) = engine.budgets.standings()
    return found


async def test_of_calls_at_once_only_those_run_that_the_budget_has_room_for(home: Path) -> None:
    wall = FakeWall()
    async with limited(home, wall, calls=7) as engine:
        codes: list[str] = []

        async def one() -> None:
            codes.append(code(await engine.call("calculator", SUM)))

        async with anyio.create_task_group() as group:
            for _ in range(30):
                group.start_soon(one)
        assert sorted(codes) == ["OK"] * 7 + ["QUOTA_EXCEEDED"] * 23
        assert len(wall.runs) == 7
        assert (standing(engine).spent, standing(engine).held) == (7, 0)
        used = await engine.usage()
        assert (used.total.calls, used.total.errors) == (30, 23)
        assert used.currency == "CHF"


async def test_a_dry_run_a_wrong_call_and_a_lack_of_walls_take_nothing(home: Path) -> None:
    async with limited(home, calls=1) as engine:
        assert code(await engine.call("calculator", SUM, dry_run=True)) == "OK"
        assert code(await engine.call("calculator", {})) == "INVALID_PARAMS"
        assert code(await engine.call("calculator", SUM, isolation="session")) == "INVALID_PARAMS"
        assert (standing(engine).spent, standing(engine).held) == (0, 0)
        assert code(await engine.call("calculator", SUM)) == "OK"
        assert code(await engine.call("calculator", SUM)) == "QUOTA_EXCEEDED"


async def test_a_call_that_its_caller_ends_counts_and_holds_nothing_afterwards(home: Path) -> None:
    began = anyio.Event()

    async def meanwhile(*_: Any) -> None:
        began.set()
        await anyio.sleep_forever()

    async with limited(home, FakeWall(meanwhile=meanwhile), calls=5) as engine:
        live, answers = CallHandle(), []

        async def call() -> None:
            body = CallBody(arguments=SUM)
            answers.append(await engine.run("calculator", body, engine.owner, live))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            with anyio.fail_after(20):
                await began.wait()
            assert (standing(engine).spent, standing(engine).held) == (0, 1)
            live.cancel()
        assert code(answers[0]) == "CANCELLED"
        assert (standing(engine).spent, standing(engine).held) == (1, 0)


async def test_a_call_whose_task_is_cancelled_from_outside_holds_nothing(home: Path) -> None:
    began = anyio.Event()

    async def meanwhile(*_: Any) -> None:
        began.set()
        await anyio.sleep_forever()

    async with limited(home, FakeWall(meanwhile=meanwhile), calls=5) as engine:
        async with anyio.create_task_group() as group:
            group.start_soon(engine.call, "calculator", SUM)
            with anyio.fail_after(20):
                await began.wait()
            group.cancel_scope.cancel()
        assert (standing(engine).spent, standing(engine).held) == (1, 0)


async def test_a_fault_of_the_engine_after_the_run_counts_and_holds_nothing(home: Path) -> None:
    def broken(run: Any) -> Any:
        raise RuntimeError("a bug")

    async with limited(home, FakeWall(answer=broken), calls=5) as engine:
        assert code(await engine.call("calculator", SUM)) == "INTERNAL_ERROR"
        assert standing(engine).held == 0
