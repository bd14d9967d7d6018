"""Budgets in an engine: reserved before a call runs, settled however it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood import Config, Engine
from fumehood.budgets.in_engine import Spending
from fumehood.budgets.settings import BudgetRule
from fumehood.call_options import CallBody
from fumehood.core.usage import Prices
from fumehood.core.usage_table import BudgetStanding
from fumehood.executors.base import CallHandle
from fumehood.testing import FakeWall
from support.answers import code_of
from support.wait import DEADLINE_S

pytestmark = [pytest.mark.anyio, pytest.mark.row("E4")]

SUM = {"expression": "2 + 2"}
EVER: dict[str, Any] = {"name": "b", "period": "total"}


def limited(home: Path, wall: FakeWall | None = None, **limits: Any) -> Engine:
    """An engine with one budget and a fake wall for the calculator."""
    budgets = (BudgetRule(**{**EVER, **limits}),)
    config = Config(home=home, budgets=budgets, prices=Prices(currency="CHF"))
    return Engine(config=config, interpreter=wall or FakeWall())


def standing(engine: Engine) -> BudgetStanding:
    (found,) = engine.part(Spending).budgets.standings()
    return found


async def test_dry_run_invalid_call_and_unavailable_isolation_spend_no_budget(home: Path) -> None:
    async with limited(home, calls=1) as engine:
        assert code_of(await engine.call("calculator", SUM, dry_run=True)) == "OK"
        assert code_of(await engine.call("calculator", {})) == "INVALID_PARAMS"
        assert (
            code_of(await engine.call("calculator", SUM, isolation="session")) == "INVALID_PARAMS"
        )
        assert (standing(engine).spent, standing(engine).held) == (0, 0)
        assert code_of(await engine.call("calculator", SUM)) == "OK"
        assert code_of(await engine.call("calculator", SUM)) == "QUOTA_EXCEEDED"


async def test_cancelled_call_is_counted_and_releases_its_reservation(home: Path) -> None:
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
            with anyio.fail_after(DEADLINE_S):
                await began.wait()
            assert (standing(engine).spent, standing(engine).held) == (0, 1)
            live.cancel()
        assert code_of(answers[0]) == "CANCELLED"
        assert (standing(engine).spent, standing(engine).held) == (1, 0)


async def test_internal_error_after_the_run_releases_its_reservation(home: Path) -> None:
    def broken(run: Any) -> Any:
        raise RuntimeError("a bug")

    async with limited(home, FakeWall(answer=broken), calls=5) as engine:
        assert code_of(await engine.call("calculator", SUM)) == "INTERNAL_ERROR"
        assert standing(engine).held == 0
